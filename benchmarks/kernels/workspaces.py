"""Workspaces of cuDNN for convolutions and recurrent layers drawn at random.

python benchmarks/kernels/workspaces.py --out workspaces-h200.json.gz [--convolutions 1500] [--seed 0]      (on a GPU)

Sizes are bytes requested from the allocator.  The shapes are those of real models: one to three dimensions, filters of
1 to 128, strides, groups, depthwise and transposed ones, three types, both layouts.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

Case = dict[str, Any]
TYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
CHANNELS = (
    3,
    8,
    16,
    24,
    32,
    40,
    48,
    64,
    80,
    96,
    112,
    128,
    144,
    160,
    192,
    224,
    256,
    320,
    384,
    512,
    640,
    768,
    1024,
    1280,
)
HIDDEN = (32, 64, 96, 128, 200, 256, 384, 512, 650, 1024)
LARGEST = 2**28
"""Largest tensor, bytes."""


def convolutions(count: int, chance: random.Random) -> Iterator[Case]:
    """Draw random convolutions that a model might have."""
    made = 0
    while made < count:
        case = _convolution(chance)
        if case is not None:
            made += 1
            yield case


def _convolution(chance: random.Random) -> Case | None:
    dimensions = chance.choice((1, 1, 2, 2, 2, 2, 2, 3))
    kernels = {1: (1, 2, 3, 3, 5, 7, 10, 15, 31, 128), 2: (1, 1, 3, 3, 3, 3, 5, 7, 2, 4, 8, 14, 16), 3: (1, 3, 3, 2)}
    kernel = chance.choice(kernels[dimensions])
    stride = chance.choice((1, 1, 1, 2, kernel, max(kernel // 2, 1)))
    padding = chance.choice((0, kernel // 2, kernel // 2))
    dilation = chance.choice((1,) * 9 + (2,)) if kernel in (3, 5) else 1
    inside, outside = chance.choice(CHANNELS), chance.choice(CHANNELS[1:])
    groups = 1
    drawn = chance.random()
    if drawn < 0.12:
        outside = inside = max(inside, 8)
        groups = inside
    elif drawn < 0.25:
        groups = chance.choice((2, 4, 8, 16, 32))
        inside, outside = max(inside // groups, 1) * groups, max(outside // groups, 1) * groups
    side = {
        1: (50, 99, 128, 149, 249, 300, 499, 768, 1500, 1999, 3000, 7999, 15999, 160000),
        2: (4, 7, 8, 10, 14, 16, 20, 28, 32, 40, 56, 64, 80, 112, 128, 160, 224, 256),
        3: (4, 8, 14, 16, 28),
    }
    places = [chance.choice(side[dimensions])] * dimensions
    batch = chance.choice((1, 2, 3, 4, 6, 8, 10, 12, 16, 24, 32, 48, 64, 128))
    case = {
        "kind": "convolution", "dtype": chance.choice(tuple(TYPES)), "batch": batch, "inside": inside,
        "outside": outside, "groups": groups, "places": places, "kernel": [kernel] * dimensions,
        "stride": [stride] * dimensions, "padding": [padding] * dimensions, "dilation": [dilation] * dimensions,
        "transposed": chance.random() < 0.08, "last": dimensions == 2 and chance.random() < 0.1,
    }  # fmt: skip
    if case["transposed"]:
        case["dilation"] = [1] * dimensions
    reach = dilation * (kernel - 1) + 1
    if places[0] + 2 * padding < reach:
        return None
    size = TYPES[case["dtype"]].itemsize
    grown = places[0] * stride + kernel if case["transposed"] else (places[0] + 2 * padding - reach) // stride + 1
    largest = batch * max(inside * places[0] ** dimensions, outside * grown**dimensions) * size
    work = batch * outside * (inside // groups) * kernel**dimensions * max(grown, 1) ** dimensions
    return case if largest <= LARGEST and 2**16 < work < 2**38 else None


def measured_convolution(case: Case) -> Case:
    """Measure what forward, input gradient and weight gradient allocate besides their results."""
    dtype = TYPES[case["dtype"]]
    groups = case["groups"]
    shape = (case["batch"], case["inside"], *case["places"])
    pair = (case["inside"], case["outside"]) if case["transposed"] else (case["outside"], case["inside"])
    weight = torch.empty(pair[0], pair[1] // groups, *case["kernel"], device="cuda", dtype=dtype)
    data = torch.empty(shape, device="cuda", dtype=dtype)
    if case["last"]:
        data, weight = (each.to(memory_format=torch.channels_last) for each in (data, weight))
    where = (case["stride"], case["padding"], case["dilation"], case["transposed"], [0] * len(case["places"]), groups)
    output, forward = _besides(lambda: torch.ops.aten.convolution(data, weight, None, *where))
    gradient = torch.empty_like(output)
    found = {"output": list(output.shape), "forward": forward}
    for name, mask in (("input gradient", [True, False, False]), ("weight gradient", [False, True, False])):
        _, found[name] = _besides(
            lambda mask=mask: torch.ops.aten.convolution_backward(gradient, data, weight, None, *where, mask)
        )
    return found


def _besides(call: Any) -> tuple[Any, int]:
    """Return the result, and the bytes requested beside it."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch._C._cuda_memoryStats(0)["requested_bytes"]["all"]["current"]
    result = call()
    after = torch._C._cuda_memoryStats(0)["requested_bytes"]["all"]
    return result, after["peak"] - max(after["current"], before)


def recurrences(count: int, chance: random.Random) -> Iterator[Case]:
    """Draw random recurrent layers."""
    for _ in range(count):
        mode, hidden = chance.choice(("LSTM", "LSTM", "LSTM", "GRU", "GRU", "RNN")), chance.choice(HIDDEN)
        yield {
            "kind": "recurrence",
            "mode": mode,
            "projection": chance.choice((0, 16, hidden // 4, hidden // 2, hidden - 8)) if mode == "LSTM" else 0,
            "packed": chance.random() < 0.15,
            "dtype": chance.choice(tuple(TYPES)),
            "input": chance.choice((32, 64, 100, 128, 256, 300, 512)),
            "hidden": hidden,
            "layers": chance.choice((1, 1, 2, 2, 3, 4)),
            "bidirectional": chance.random() < 0.4,
            "dropout": chance.choice((0.0, 0.0, 0.2)),
            "bias": chance.random() < 0.85,
            "steps": chance.choice((5, 20, 35, 50, 100, 128, 200)),
            "batch": chance.choice((1, 4, 8, 16, 20, 32, 40, 48, 64, 128)),
        }


def measured_recurrence(case: Case) -> Case:
    """Measure every allocation and release of a forward and a backward, signed bytes as requested."""
    kind = getattr(nn, case["mode"])
    projection = {"proj_size": case["projection"]} if case.get("projection") else {}
    layer = kind(
        case["input"], case["hidden"], case["layers"], bias=case["bias"], dropout=case["dropout"],
        bidirectional=case["bidirectional"], **projection,
    ).to("cuda", TYPES[case["dtype"]])  # fmt: skip
    data = torch.empty(case["steps"], case["batch"], case["input"], device="cuda", dtype=TYPES[case["dtype"]])
    data.requires_grad_(True)
    if case.get("packed"):  # the longest sequence first
        lengths = [max(1, case["steps"] * (case["batch"] - place) // case["batch"]) for place in range(case["batch"])]
        data = nn.utils.rnn.pack_padded_sequence(data, lengths)
    found: Case = {}
    output: Any = None
    for name in ("forward", "backward", "inference"):
        torch.cuda.synchronize()
        torch.cuda.memory._record_memory_history(enabled="all", context=None, stacks="python", clear_history=True)
        if name == "forward":
            output = layer(data)[0]
            output = output.data if case.get("packed") else output
        elif name == "backward":
            output.backward(output.detach())
        else:
            layer.eval()
            with torch.no_grad():
                layer(data)
        trace = torch.cuda.memory._snapshot()["device_traces"][0]
        torch.cuda.memory._record_memory_history(enabled=None)
        sign = {"alloc": 1, "free_completed": -1}
        found[name] = [sign[entry["action"]] * entry["size"] for entry in trace if entry["action"] in sign]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--convolutions", type=int, default=1500)
    parser.add_argument("--recurrences", type=int, default=150)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=240, help="after which no case starts (default: 240)")
    options = parser.parse_args()
    chance = random.Random(options.seed)
    begin = time.monotonic()
    told = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "cudnn": torch.backends.cudnn.version()}
    lines = [told]
    cases = [*recurrences(options.recurrences, chance), *convolutions(options.convolutions, chance)]
    for case in cases:
        if time.monotonic() - begin > options.seconds:
            break
        measure = measured_recurrence if case["kind"] == "recurrence" else measured_convolution
        try:
            lines.append({**case, **measure(case)})
        except Exception as error:
            lines.append({**case, "error": f"{type(error).__name__}: {str(error)[:200]}"})
            torch.cuda.empty_cache()
    with gzip.open(options.out, "wt", encoding="utf-8") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)
    print(f"{len(lines) - 1} of {len(cases)} cases, {time.monotonic() - begin:.0f} s")


if __name__ == "__main__":
    main()
