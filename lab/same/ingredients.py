"""What predictions are made of: prices of calls, products of recurrent layers, convolutions, blocks of memory.

Each case covers all recorded points of one kind, which trainings call a few of.  Its record has the number, sum, least
and largest of their values, by family, and a hash of everything that was computed.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from trainatomy.allocator import AllocatorSettings, replay
from trainatomy.catalog.calibrations import shipped
from trainatomy.catalog.files import read_text
from trainatomy.catalog.gpus import find_gpu
from trainatomy.operators.allocation.cudnn.convolution import Convolution
from trainatomy.operators.allocation.cudnn.heuristics import EnginePlan
from trainatomy.operators.allocation.cudnn.learned import workspace
from trainatomy.operators.allocation.cudnn.missing import is_unanswered, missing_engine
from trainatomy.operators.allocation.cudnn.unnamed import missing_parts
from trainatomy.operators.allocation.cudnn.ways import plan_of, way_of
from trainatomy.operators.cost import kernel_work
from trainatomy.operators.cost.algorithms import Sizes, learned_way
from trainatomy.operators.cost.recurrent import RecurrentProduct, recurrent_product_seconds
from trainatomy.operators.registry import row_of
from trainatomy.timing.cost_model import cost_model_of, kernel_cost

ROOT = Path(__file__).resolve().parents[2]
RECORDED = ROOT / "lab" / "records" / "cudnn"
"""Recorded convolutions, and what cuDNN answered for them."""
GPUS = ("h200", "h100-sxm")
"""GPUs whose calibrations ship; cuDNN's answers are of the first."""
EXTRAPOLATED = "rtx-4090"
"""The GPU that the points of each calibration are also priced for."""
CONVOLUTIONS = {
    "networks": ("calls.jsonl.gz", "answers-h200.jsonl.gz"),
    "networks held out": ("held-out-calls.jsonl.gz", ""),
    "drawn": ("drawn.jsonl.gz", "answers-drawn-h200.jsonl.gz"),
    "timed": ("timed.jsonl.gz", "answers-timed-h200.jsonl.gz"),
    "by shape": ("plans-h200.jsonl.gz", ""),
}
"""Files of convolutions, and of the answers to them, below ``RECORDED``."""
SETTINGS = {
    "usual": AllocatorSettings(),
    "expandable": AllocatorSettings(expandable_segments=True),
    "rounded": AllocatorSettings(roundup_power2_divisions=(4,) * 16),
    "unsplit": AllocatorSettings(max_split_size_bytes=64 << 20),
}
SHORT_BY = (None, 1, 2 << 20)
"""Bytes that the GPU lacks at the reserved peak of a recorded run; None: it has enough memory."""
LISTED = 2
"""Parts of the names of families of kernels, by which prices are summed up."""
Rows = Iterable[tuple[str, float, object]]
"""Of each value: its family, the value, and all else that was computed with it."""


@cache
def cases() -> dict[str, Callable[[], Rows]]:
    """Return what each case computes, by its name."""
    found: dict[str, Callable[[], Rows]] = {}
    for gpu in GPUS:
        for kind in sorted({row_of(point.operator).launch for point in shipped()[gpu].points}):
            found[f"prices {gpu} {kind}"] = partial(prices, gpu, gpu, kind)
            found[f"prices {gpu} {kind} for {EXTRAPOLATED}"] = partial(prices, gpu, EXTRAPOLATED, kind)
    found["recurrent products"] = recurrent_products
    found |= {f"convolutions {name}": partial(convolutions, *files) for name, files in CONVOLUTIONS.items()}
    found |= {f"blocks {name}": partial(blocks, settings) for name, settings in SETTINGS.items()}
    return found


def figures(rows: Rows) -> dict[str, Any]:
    """Return the record of rows: statistics by family, and the hash of all."""
    digest, values = hashlib.sha256(), defaultdict[str, list[float]](list)
    for family, value, rest in rows:
        digest.update(f"{family} {value!r} {rest!r}\n".encode())
        values[family].append(value)
    found: dict[str, Any] = {}
    for family, some in sorted(values.items()):
        found |= {f"{family}.count": len(some), f"{family}.sum": sum(some)}
        found |= {f"{family}.min": min(some), f"{family}.max": max(some)}
    return {**found, "hash": digest.hexdigest()[:16]}


def prices(calibrated: str, gpu: str, kind: str) -> Rows:
    """Yield the time of each point of a calibration that is launched as this kind, with its work, on a GPU."""
    models = {tf32: cost_model_of(find_gpu(gpu), tf32=tf32 or None) for tf32 in (False, True)}
    for point in shipped()[calibrated].points:
        if row_of(point.operator).launch == kind:
            model, call = models[point.tf32], point.call
            work, cost = kernel_work(call, model.chip), kernel_cost(call, model)
            yield ".".join(work.family.split(".")[:LISTED]), cost.seconds, (tuple(work), tuple(cost))


def recurrent_products() -> Rows:
    """Yield the time of each measured product of a recurrent layer, on GPUs of 132 and of 108 multiprocessors."""
    for line in read_text("recurrent_products.csv").splitlines():
        if not line.startswith("#"):
            kind, role, rows, columns, depth, at_a_time, _ = line.split(",")
            one = RecurrentProduct(kind, role, int(rows), int(columns), int(depth))
            here, there = (recurrent_product_seconds(one, float(at_a_time), count) for count in (132, 108))
            yield f"{kind} {role}", here, there


def convolutions(names: str, answers: str) -> Rows:
    """Yield the workspace of each recorded convolution, and how it is computed by rules and by cuDNN's answer."""
    lines = [line for line in _lines(names) if "kind" in line]
    answered = {line["number"]: line for line in _lines(answers) if "engine" in line} if answers else {}
    for number, line in enumerate(lines):
        kind, one = line["kind"], _convolution(line)
        how = learned_way(kind, _sizes(line)), _by_plan(kind, one, answered.get(number))
        yield f"{kind} {line['dtype']}", workspace(kind, one), how


def _by_plan(kind: Any, one: Convolution, answer: Mapping[str, Any] | None) -> object:
    """Return what follows from cuDNN's answer."""
    if answer is None:
        return is_unanswered(one)
    knobs = tuple((knob, value) for knob, value in answer["knobs"])
    text = " ".join([str(answer["engine"]), *(f"{knob}={value}" for knob, value in knobs)])
    plan = EnginePlan(answer["engine"], knobs, (), answer["workspace"], listed=(text,))
    way = way_of(kind, one, plan) if one.groups > 1 else None
    engine, parts = missing_engine(kind, one, plan), missing_parts(kind, one, plan)
    return is_unanswered(one), engine, parts, plan_of(kind, one, plan), way


def blocks(settings: AllocatorSettings) -> Rows:
    """Yield the reserved peak of each recorded run, with all blocks and calls of the driver, on GPUs of some sizes."""
    sys.path.append(str(ROOT / "tests" / "allocator"))
    from recorded import NAMES, load

    for name in NAMES:
        trace = load(name).trace
        peak = replay(trace, settings).peak_reserved_bytes
        for lacking in SHORT_BY:
            found = replay(trace, settings, None if lacking is None else peak - lacking)
            series = [list(found.block_bytes), list(found.allocated_bytes), list(found.reserved_bytes)]
            how = (found.num_alloc_retries, found.out_of_memory_at, found.driver_calls)
            yield f"{name}, lacks {lacking or 0}", found.peak_reserved_bytes, (series, how)


def _lines(name: str) -> Iterator[dict[str, Any]]:
    with gzip.open(RECORDED / name, "rt", encoding="utf-8") as file:
        yield from map(json.loads, file)


def _convolution(line: Mapping[str, Any]) -> Convolution:
    data, weight, output = (torch.Size(line[name]) for name in ("data", "weight", "output"))
    settings = line["strides"], line["padding"], line["dilation"]
    how = line["groups"], line["transposed"], line["last"], find_gpu(GPUS[0]).multiprocessors
    return Convolution(data, weight, output, getattr(torch, line["dtype"]), *settings, *how)


def _sizes(line: Mapping[str, Any]) -> Sizes:
    settings = tuple(line["strides"]), tuple(line["padding"]), tuple(line["dilation"])
    how = line["groups"], line["dtype"], line["transposed"], bool(line["last"])
    return Sizes(tuple(line["data"]), tuple(line["weight"]), tuple(line["output"]), *settings, *how)
