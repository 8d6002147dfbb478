"""Compare the predicted GPU time of each operation with a profiler's trace of the same training.

``python benchmarks/timing/kernel_times.py DIR [--by family|operator] [--worst 20] [--calibration FILE]``: DIR holds
traces written by ``probe.py``, ``ROW.trace.json.gz``.  The row is simulated; its operations and those of the trace have
the same number and order by name, so the k-th of a name is matched with the k-th.  Names whose numbers differ are
listed and left out.  Held-out rows are refused.
"""

from __future__ import annotations

import argparse
import sys
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "accuracy"))

import grid  # noqa: E402

from trainatomy.catalog.calibrations import load  # noqa: E402
from trainatomy.catalog.calls import to_text  # noqa: E402
from trainatomy.catalog.gpus import gpus  # noqa: E402
from trainatomy.measurement.profiler.calls import read_trace  # noqa: E402
from trainatomy.results.operations import Call, Operations  # noqa: E402
from trainatomy.simulator.simulate import simulate  # noqa: E402
from trainatomy.timing.cost_model import CostModel, cost_model_of, kernel_cost, kernel_work  # noqa: E402  # noqa: E402

SUFFIX = ".trace.json.gz"
REAL = {f"aten::native_batch_norm{way}": f"aten::cudnn_batch_norm{way}" for way in ("", "_backward")}
"""Names of operators on a GPU that differ from those in the simulation."""
MAX_MISSING = 4
"""Operations of a name that the trace may lack at its beginning: a batch is collated before it starts."""


@dataclass
class Span:
    """An operator on the CPU, and the microseconds of each kernel launched within it."""

    name: str
    begins: float
    ends: float
    durations: list[float] = field(default_factory=list)


@dataclass
class Matched:
    """A row's operations matched with its trace.

    Attributes:
        total: Microseconds of all kernels of the trace.
        runs: The spans of each distinct call.
        unmatched: Operators left out: number simulated, number in the trace, microseconds.
    """

    row: str
    total: float
    runs: dict[Call, list[Span]]
    unmatched: dict[str, tuple[int, int, float]]


def spans(events: Sequence[dict[str, Any]], names: set[str]) -> tuple[list[Span], float]:
    """Return the outermost operators with one of ``names``, and the microseconds of all kernels.

    An operator that contains another of its own name (autocast, autograd) is skipped in favour of the inner one.
    """
    by_thread: dict[Any, list[dict[str, Any]]] = defaultdict(list)
    launches: dict[int, tuple[float, Any]] = {}
    kernels = []
    for event in events:
        kind = event.get("cat")
        if kind == "cpu_op":
            by_thread[event["tid"]].append(event)
        elif kind in ("cuda_runtime", "cuda_driver") and "correlation" in event.get("args", {}):
            launches[event["args"]["correlation"]] = event["ts"], event["tid"]
        elif kind in ("kernel", "gpu_memcpy", "gpu_memset"):
            kernels.append(event)
    found = {thread: list(_outermost(operators, names)) for thread, operators in by_thread.items()}
    starts = {thread: [span.begins for span in own] for thread, own in found.items()}
    for kernel in kernels:
        at, thread = launches.get(kernel["args"]["correlation"], (0.0, None))
        index = bisect_right(starts.get(thread, []), at) - 1
        if index >= 0 and at <= found[thread][index].ends:
            found[thread][index].durations.append(kernel["dur"])
    ordered = sorted((span for own in found.values() for span in own), key=lambda span: span.begins)
    return ordered, sum(kernel["dur"] for kernel in kernels)


def _outermost(operators: list[dict[str, Any]], names: set[str]) -> Iterator[Span]:
    operators.sort(key=lambda event: (event["ts"], -event["dur"]))
    passes_on = [False] * len(operators)
    open_: list[int] = []
    for index, event in enumerate(operators):
        while open_ and operators[open_[-1]]["ts"] + operators[open_[-1]]["dur"] <= event["ts"]:
            open_.pop()
        for outer in open_:
            passes_on[outer] = passes_on[outer] or operators[outer]["name"] == event["name"]
        open_.append(index)
    end = -1.0
    for index, event in enumerate(operators):
        if event["ts"] >= end and event["name"] in names and not passes_on[index]:
            end = event["ts"] + event["dur"]
            yield Span(event["name"], event["ts"], end)


def matched(row: str, operations: Operations, events: Sequence[dict[str, Any]]) -> Matched:
    """Match operations and trace by name and order."""
    wanted: dict[str, list[Call]] = defaultdict(list)
    for index in operations.unrolled():
        call = operations.calls[operations.operations[index].call]
        wanted[REAL.get(call.name, call.name)].append(call)
    seen, total = spans(events, set(wanted))
    of_name: dict[str, list[Span]] = defaultdict(list)
    for span in seen:
        of_name[span.name].append(span)
    runs: dict[Call, list[Span]] = defaultdict(list)
    unmatched = {}
    for name, calls in wanted.items():
        real = of_name[name]
        extra = len(calls) - len(real)
        if 0 <= extra <= MAX_MISSING:
            for call, span in zip(calls[extra:], real, strict=True):
                runs[call].append(span)
        elif microseconds := sum(sum(span.durations) for span in real):
            unmatched[name] = (len(calls), len(real), microseconds)
    return Matched(row, total, runs, unmatched)


def rows_in(folder: Path) -> Iterator[tuple[grid.Row, Path]]:
    """Yield the rows whose traces are in a folder, except tiny ones."""
    known = {row.name: row for row in grid.rows()}
    for path in sorted(folder.glob(f"*{SUFFIX}")):
        row = known.get(path.name.removesuffix(SUFFIX))
        if row is not None:
            if row.held_out:
                raise SystemExit(f"{row.name} is held out: the timing model must not be tuned to it")
            yield row, path


def report(every: list[tuple[Matched, CostModel]], by: str, worst: int) -> None:
    """Print the rows, the families or operators by their share of the error, and the calls that are furthest off."""
    table: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    calls, off = [], []
    for one, cost_model in every:
        measured = predicted = 0.0
        kernels: Counter[str] = Counter()
        for call, runs in one.runs.items():
            cost = kernel_cost(call, cost_model)
            real = sum(sum(span.durations) for span in runs)
            ours = cost.seconds * 1e6 * len(runs)
            measured, predicted = measured + real, predicted + ours
            kernels.update(real=sum(len(span.durations) for span in runs), ours=cost.launches * len(runs))
            entry = table[kernel_work(call, cost_model.chip).family if by == "family" else call.name]
            for place, value in enumerate((real, ours, abs(ours - real))):
                entry[place] += value / one.total
            calls.append(
                ((ours - real) / one.total, one.row, call, median(sum(s.durations) for s in runs), ours / len(runs))
            )
        off.append(abs(predicted / measured - 1))
        left = ", ".join(f"{name} {a}/{b}" for name, (a, b, _) in one.unmatched.items())
        print(
            f"{one.row:38} {measured / 1e3:8.2f} ms {predicted / 1e3:8.2f} {predicted / measured - 1:+6.1%}  kernels "
            f"{kernels['real']} {kernels['ours']}  of all {measured / one.total:.1%} {left}"
        )
    print(f"\nmedian {median(off):.1%}, worst {max(off):.1%}\n")
    for name, (real, ours, error) in sorted(table.items(), key=lambda item: -item[1][2])[:40]:
        share = real / len(every)
        print(
            f"{name:56} {share:6.2%} of a step  {ours / real - 1 if real else 0:+7.1%}  error {error / len(every):.2%}"
        )
    print()
    for error, row, call, real, ours in sorted(calls, key=lambda entry: -abs(entry[0]))[:worst]:
        print(f"{error:+.1%} {row} {to_text(call)[:150]} measured {real:.1f} predicted {ours:.1f} µs")


def main() -> int:
    """Print the comparison."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--by", choices=("family", "operator"), default="family")
    parser.add_argument("--worst", type=int, default=20)
    parser.add_argument("--gpu", default="NVIDIA H200", help="GPU of the traces, by the name its driver reports")
    parser.add_argument("--calibration", type=Path)
    options = parser.parse_args()
    gpu = next(gpu for gpu in gpus() if gpu.device_name == options.gpu)
    calibration = load(options.calibration) if options.calibration else None
    cost_models = {tf32: cost_model_of(gpu, calibration, tf32=tf32) for tf32 in (False, True)}
    every = []
    for row, path in rows_in(options.folder):
        workload = row.workload()
        simulation = simulate(workload.model_copy(update={"gpu": gpu.id}), gpu)
        joined = matched(row.name, simulation.operations, read_trace(path))
        every.append((joined, cost_models[bool(workload.train.tf32)]))
    report(every, options.by, options.worst)
    return 0


if __name__ == "__main__":
    sys.exit(main())
