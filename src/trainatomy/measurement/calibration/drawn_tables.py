"""Calibration cases with random shapes: tables, sampling, recurrent layers, optimizers, bitsandbytes."""

from __future__ import annotations

from functools import partial
from random import Random
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from trainatomy.measurement.calibration.cases import BF16, F16, F32, Case, both_ways, leaf
from trainatomy.measurement.calibration.cases import random as normal
from trainatomy.measurement.calibration.lists import clipped, optimizer_step
from trainatomy.measurement.calibration.traffic import embedding

if TYPE_CHECKING:
    from trainatomy.measurement.calibration.cases import Work

HALVES = (F16, BF16)
MOST_TABLE = 2**27
"""Numbers of a table."""


def _between(random: Random, least: float, most: float) -> int:
    """Return a whole number whose logarithm is uniform."""
    return round(least * (most / least) ** random.random())


def table(random: Random) -> Case:
    """Draw an embedding of tokens, also of narrow rows as in recommenders."""
    width = random.choice((8, 16, 32, 64, 128, 256, 768))
    entries = min(_between(random, 100, 4e6), MOST_TABLE // width)
    return Case(
        partial(embedding, _between(random, 256, 131072), entries, width, random.choice((F32, F32, BF16))), runs=3
    )


def bag(random: Random) -> Case:
    """Draw an embedding bag."""
    width = random.choice((8, 16, 32, 64, 128, 256))
    entries = min(_between(random, 100, 4e6), MOST_TABLE // width)
    bags, length = _between(random, 64, 32768), _between(random, 1, 64)
    mode = random.choice(("sum", "sum", "mean", "max"))
    return Case(partial(bagged, entries, width, bags, min(length, 2**20 // bags), mode), runs=3)


def bagged(entries: int, width: int, bags: int, length: int, mode: str) -> Work:
    """Return bags of random entries: a sum, mean or maximum of rows, forward and backward."""
    ids = torch.randint(entries, (bags * length,), device="cuda")
    offsets = torch.arange(0, bags * length, length, device="cuda")
    return both_ways(lambda w: F.embedding_bag(ids, w, offsets, mode=mode), leaf(entries, width))


def sampling(random: Random) -> Case:
    """Draw an operator that chooses, sorts or counts."""
    rows, width = _between(random, 1, 4096), _between(random, 32, 65536)
    width = min(width, max(2**22 // rows, 32))
    function: Any = random.choice((
        lambda x, ids: torch.multinomial(x.abs(), 1),
        lambda x, ids: torch.topk(x, 8),
        lambda x, ids: torch.sort(x),
        lambda x, ids: torch.argmax(x, -1),
        lambda x, ids: torch.cumsum(x, -1),
        lambda x, ids: torch.zeros_like(x).scatter_add_(-1, ids, x),
        lambda x, ids: x.flatten().index_add(0, ids.flatten(), x.flatten()),
        lambda x, ids: x.gather(-1, ids),
        lambda x, ids: torch.bincount(ids.flatten(), minlength=width),
        lambda x, ids: torch.zeros_like(x).index_put_((ids[:, 0] % rows,), x, accumulate=True),
        lambda x, ids: torch.randperm(x.numel(), device="cuda"),
        lambda x, ids: torch.empty_like(x).exponential_(),
    ))  # fmt: skip
    return Case(partial(chosen, function, rows, width), runs=3)


def chosen(function: Any, rows: int, width: int) -> Work:
    """Return a function of scores and of random positions in their rows."""
    x, ids = normal(rows, width), torch.randint(width, (rows, width), device="cuda")
    return lambda: function(x, ids)


def sequence_loss(random: Random) -> Case:
    """Draw a CTC loss."""
    steps, batch = _between(random, 50, 1500), _between(random, 1, 32)
    return Case(partial(aligned, steps, batch, random.choice((29, 32, 1000)), max(steps // 10, 2)), runs=3)


def aligned(steps: int, batch: int, classes: int, target: int) -> Work:
    """Return the CTC loss of random targets, forward and backward."""
    targets = torch.randint(1, classes, (batch, target), device="cuda")
    lengths = torch.full((batch,), steps, dtype=torch.long), torch.full((batch,), target, dtype=torch.long)
    return both_ways(lambda x: F.ctc_loss(x, targets, *lengths), leaf(steps, batch, classes))


def recurrent(random: Random) -> Case:
    """Draw a recurrent network."""
    kind = random.choice((torch.nn.LSTM, torch.nn.LSTM, torch.nn.GRU, torch.nn.RNN))
    sizes = random.choice((32, 64, 128, 256, 300, 512)), random.choice((32, 64, 128, 256, 384, 512, 1024))
    shape = _between(random, 1, 256), _between(random, 4, 60)
    options = {"num_layers": random.choice((1, 1, 2, 3)), "bidirectional": random.random() < 0.4}
    return Case(partial(unrolled, kind, sizes, shape, random.choice((F32, F32, *HALVES)), options), runs=2)


def recurrent_of_any_width(random: Random) -> Case:
    """Draw a recurrent network whose rows may begin at any number: 16-byte alignment decides cuDNN's products."""
    kind = random.choice((torch.nn.LSTM, torch.nn.LSTM, torch.nn.GRU, torch.nn.RNN))
    step = random.choice((1, 2, 2, 4, 4, 8))
    inputs, hidden = (_between(random, 24, 1000) // step * step for _ in range(2))
    shape = _between(random, 2, 256), _between(random, 8, 80)
    options = {"num_layers": random.choice((1, 2, 3)), "bidirectional": random.random() < 0.3}
    dtype = random.choice((F32, *HALVES, *HALVES))
    return Case(partial(unrolled, kind, (inputs, hidden), shape, dtype, options), runs=2)


def recurrent_of_usual_size(random: Random) -> Case:
    """Draw a recurrent network as tutorials and papers have them; one layer of fp16 may be a persistent kernel."""
    kind = random.choice((torch.nn.LSTM, torch.nn.LSTM, torch.nn.GRU, torch.nn.RNN))
    hidden = random.choice((200, 256, 300, 400, 500, 512, 600, 650, 768, 1000, 1024, 1150, 1500))
    inputs = random.choice((hidden, hidden, 128, 256, 300))
    shape = random.choice((16, 20, 32, 40, 64, 80, 96, 128)), random.choice((20, 35, 50, 70))
    layers = random.choice((1, 1, 2, 3))
    options: dict[str, Any] = {"num_layers": layers, "bidirectional": random.random() < 0.2}
    if layers > 1 and random.random() < 0.5:
        options["dropout"] = 0.5
    return Case(partial(unrolled, kind, (inputs, hidden), shape, random.choice((F32, F16, F16, F16)), options), runs=2)


def unrolled(
    kind: Any, sizes: tuple[int, int], shape: tuple[int, int], dtype: torch.dtype, options: dict[str, Any]
) -> Work:
    """Return a recurrent network over a batch of sequences, forward and backward."""
    network = kind(*sizes, batch_first=True, device="cuda", dtype=dtype, **options)
    weights = list(network.parameters())
    return both_ways(lambda x, *_: network(x)[0], leaf(*shape, sizes[0], dtype=dtype), *weights)


def small_tensors(random: Random) -> Case:
    """Draw an optimizer over many small tensors."""
    shapes = tuple((_between(random, 8, random.choice((1e3, 1e4, 1e5, 1e6))),) for _ in range(random.randint(50, 1200)))
    dtype = random.choice((F32, F32, BF16))
    adam, sgd = torch.optim.AdamW, torch.optim.SGD
    step: Any = random.choice((
        partial(optimizer_step, adam, shapes, dtype, foreach=True),
        partial(optimizer_step, adam, shapes, dtype, fused=True),
        partial(optimizer_step, sgd, shapes, dtype, foreach=True, momentum=0.9),
        partial(clipped, shapes, dtype),
    ))  # fmt: skip
    return Case(step, runs=2)


def quantised_states(random: Random) -> Case:
    """Draw an update of one parameter by an optimizer of bitsandbytes."""
    count, dtype = _between(random, 2**12, 2**27), random.choice((F32, F16, BF16))
    name = random.choice(("AdamW8bit", "AdamW8bit", "AdamW8bit", "Lion8bit", "AdamW32bit"))
    return Case(partial(library_step, name, count, dtype), runs=3)


def library_step(name: str, count: int, dtype: torch.dtype) -> Work:
    """Return a step of an optimizer of bitsandbytes over one parameter."""
    import bitsandbytes

    return optimizer_step(getattr(bitsandbytes.optim, name), ((count,),), dtype)


def quantised_layer(random: Random) -> Case:
    """Draw a layer with weights of 4 or 8 bits, for few and for many rows."""
    sizes = random.choice((768, 1024, 2048, 3072, 4096)), random.choice((768, 1024, 2048, 4096, 8192, 11008, 14336))
    dtype, rows = (
        random.choice(HALVES),
        random.choice((1, 4, 8)) if random.random() < 0.3 else _between(random, 16, 8192),
    )
    kind = random.choice(("nf4", "nf4", "fp4", "int8"))
    sizes = (sizes[1], sizes[0]) if random.random() < 0.5 else sizes
    return Case(partial(quantised, kind, sizes, rows, F16 if kind == "int8" else dtype), warm=True, runs=3)


def quantised(kind: str, sizes: tuple[int, int], rows: int, dtype: torch.dtype) -> Work:
    """Return a linear layer of bitsandbytes, forward and backward."""
    import bitsandbytes as bnb

    if kind == "int8":
        layer: Any = bnb.nn.Linear8bitLt(*sizes, bias=False, has_fp16_weights=False, threshold=6.0)
    else:
        layer = bnb.nn.Linear4bit(*sizes, bias=False, compute_dtype=dtype, quant_type=kind)
    layer.weight.data = layer.weight.data.to(dtype)
    layer = layer.to("cuda")
    return both_ways(layer, leaf(rows, sizes[0], dtype=dtype))


def quantised_weight(random: Random) -> Case:
    """Draw the quantisation and dequantisation of a weight in blocks."""
    return Case(
        partial(
            packed, _between(random, 2**14, 2**27) // 64 * 64, random.choice(HALVES), random.choice(("nf4", "fp4", "8"))
        )
    )


def packed(count: int, dtype: torch.dtype, kind: str) -> Work:
    """Return a weight packed and unpacked."""
    from bitsandbytes import functional

    weight = normal(count, dtype=dtype)

    def work() -> None:
        if kind == "8":
            functional.dequantize_blockwise(*functional.quantize_blockwise(weight))
        else:
            functional.dequantize_4bit(*functional.quantize_4bit(weight, quant_type=kind))

    return work
