"""Measure what the CPU takes for single operators on this machine's GPU: forward with a graph, and backward.

``python benchmarks/timing/host_operators.py --out FILE.jsonl [--rounds 5]``

Each operator is called in a plain loop on small tensors, so that the GPU keeps up and no module's Python runs in
between: what it costs in a training is that and the Python of modules around it.  Each call has its own inputs, so that
backward adds no gradients of the same tensor.  A line holds the median microseconds of a call in one round, and the
host's pace beside it.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.nn import functional

from trainatomy.catalog.hosts import reference_host
from trainatomy.measurement.device.host_probe import PROBE, probe_seconds

CALLS, REPEATS, PROBES, ROWS, COLUMNS = 60, 8, 3, 32, 64
SCANNED = 32
"""Steps of a recurrence that is written in Python."""


def operators() -> dict[str, Callable[[Any], Any]]:
    """Return functions of a matrix by their names; each calls one operator, or what its name says."""
    device = "cuda"
    whole = torch.randint(0, ROWS, (ROWS,), device=device)
    pairs = torch.randint(0, ROWS, (ROWS, COLUMNS), device=device)
    other = torch.randn(ROWS, COLUMNS, device=device)
    square = torch.randn(COLUMNS, COLUMNS, device=device)
    bias = torch.randn(COLUMNS, device=device)
    mask = torch.rand(ROWS, COLUMNS, device=device) > 0.5
    return {
        "mul": lambda x: x * other,
        "add": lambda x: x + other,
        "rsub": lambda x: 1.0 - x,
        "view": lambda x: x.view(-1),
        "select": lambda x: x[:, 3],
        "slice": lambda x: x[:, 3:9],
        "transpose": lambda x: x.transpose(0, 1),
        "unsqueeze": lambda x: x.unsqueeze(0),
        "expand": lambda x: x.unsqueeze(0).expand(2, -1, -1),
        "permute": lambda x: x.permute(1, 0),
        "to_copy": lambda x: x.to(torch.bfloat16),
        "clone": lambda x: x.clone(),
        "cat": lambda x: torch.cat([x, other]),
        "mm": lambda x: x @ square,
        "linear": lambda x: functional.linear(x, square, bias),
        "softmax": lambda x: x.softmax(-1),
        "sum": lambda x: x.sum(-1),
        "layer_norm": lambda x: functional.layer_norm(x, (COLUMNS,), bias, bias),
        "dropout": lambda x: functional.dropout(x, 0.1),
        "masked_fill": lambda x: x.masked_fill(mask, 0.0),
        "where": lambda x: torch.where(mask, x, other),
        "tanh": lambda x: x.tanh(),
        "embedding": lambda x: functional.embedding(whole, x),
        "embedding_bag": lambda x: functional.embedding_bag(pairs, x, mode="sum"),
        "index": lambda x: x[whole],
        "index two": lambda x: x[whole, whole],
        "index_select": lambda x: x.index_select(0, whole),
        "gather": lambda x: x.gather(0, pairs),
        "scatter": lambda x: other.scatter(0, pairs, x),
        "scatter_add": lambda x: other.scatter_add(0, pairs, x),
        "index_add": lambda x: other.index_add(0, whole, x),
        "index_put": lambda x: other.index_put((whole,), x),
        "cumsum": lambda x: x.cumsum(0),
        "sort": lambda x: x.sort(-1)[0],
        "topk": lambda x: x.topk(4, -1)[0],
        "eq": lambda x: x == other,
        "argsort": lambda x: x.argsort(-1),
        "one_hot": lambda x: functional.one_hot(whole, ROWS),
        "histc": lambda x: torch.histc(bias, bins=8, min=0, max=1),
        "scan": _scan,
    }


def _scan(x: Any) -> Any:
    """Return the states of a linear recurrence, written one after the other into a tensor."""
    result, state = torch.zeros_like(x), x[:, 0]
    for step in range(SCANNED):
        state = x[:, step] * state + x[:, step]
        result[:, step] = state
    return result


def times_of(function: Callable[[Any], Any], calls: int) -> Iterator[tuple[float, float | None]]:
    """Yield the seconds of a call forward and backward (``None``: it has no gradient), once for each repeat."""
    for _ in range(REPEATS):
        inputs = [torch.randn(ROWS, COLUMNS, device="cuda", requires_grad=True) for _ in range(calls)]
        torch.cuda.synchronize()
        began = time.perf_counter()
        results = [function(one) for one in inputs]
        forward, backward = (time.perf_counter() - began) / calls, None
        if results[0].requires_grad:
            gradients = [torch.ones_like(one) for one in results]
            torch.cuda.synchronize()
            began = time.perf_counter()
            torch.autograd.grad(results, inputs, gradients)
            backward = (time.perf_counter() - began) / calls
        torch.cuda.synchronize()
        yield forward, backward


def measured(name: str, function: Callable[[Any], Any]) -> dict[str, Any]:
    """Return the line of an operator: median microseconds and the pace beside them."""
    calls = 4 if name == "scan" else CALLS
    probes = [probe_seconds() for _ in range(PROBES)]
    times = list(times_of(function, calls))
    probes += [probe_seconds() for _ in range(PROBES)]
    line = {"operator": name, "pace": median(probes) / reference_host().probe_seconds[PROBE]}
    line["forward_us"] = round(median(one for one, _ in times) * 1e6, 3)
    if times[0][1] is not None:
        line["backward_us"] = round(median(one or 0.0 for _, one in times) * 1e6, 3)
    return line


def main() -> int:
    """Measure all operators, round by round."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    gpu = torch.cuda.get_device_name()
    for number in range(1, options.rounds + 1):
        lines = [{"gpu": gpu, "round": number, **measured(*one)} for one in operators().items()]
        with options.out.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)
    return 0


if __name__ == "__main__":
    sys.exit(main())
