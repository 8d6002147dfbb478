"""Measure what the clock needs, on the GPU of this machine: ``trainatomy calibrate``.

The file is JSON, ``trainatomy/calibration/1``::

    environment    card, driver, versions, processor, date
    sections
      kernels      points: one operator each, with the device's microseconds: again on the same tensors (``us``), and
                   with the L2 cache full of something else (``cold_us``, where that differs), and how many kernels ran
      device       launches one behind the other, waits, memory from the driver
      host         factors: how many times as long as the reference host this one takes, by part of a step

Other parts of a calibration are further sections.  A point's call reads as ``facts/calls.py`` says.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import defaultdict
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from trainatomy.errors import DeviceError
from trainatomy.measurement.calibration.environment import environment

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from trainatomy.measurement.calibration.cases import Case
    from trainatomy.measurement.calibration.host import Answer
    from trainatomy.measurement.profiler.calls import CallRecorder, Sample

SCHEMA = "trainatomy/calibration/1"
TIME_LIMIT = 120.0
"""Seconds; what is not measured by then is left out, and the file says so."""
COLD_RUNS = 3
WARM_SECONDS = 0.008
TENSOR_CORES = ("aten::mm(", "aten::addmm(", "aten::bmm(", "aten::baddbmm(", "aten::convolution")
"""Operators that TF32 changes."""
SAME = 0.03
"""A cold run that differs by less is not written down."""
FLUSHED = 2
"""How many times the L2 cache's size is written to empty it."""


def calibrate(
    *, time_limit: float = TIME_LIMIT, kernel_names: bool = False, progress: Callable[[str], None] | None = None
) -> dict[str, Any]:
    """Measure this machine's GPU and return the calibration (see above); ``DeviceError`` where there is none.

    ``kernel_names``: keep the names of the kernels beside each point.
    """
    import torch

    if not torch.cuda.is_available():
        raise DeviceError(
            "`calibrate` measures the GPU of this machine, and PyTorch finds none here "
            f"(torch {torch.__version__}). Run it where `nvidia-smi` shows the card, then use the file anywhere: "
            "`trainatomy predict --calibration FILE`."
        )
    say = progress or (lambda line: print(line, file=sys.stderr, flush=True))
    deadline = time.monotonic() + time_limit
    from trainatomy.measurement.calibration import device as calibrate_device
    from trainatomy.measurement.calibration import host

    with host.expected_for(torch.cuda.get_device_name()) as expected:
        points, left_out = kernel_points(deadline, kernel_names, say)
        known = _host(expected, deadline, left_out, say)
    say("launches, waits, memory")
    device = {
        "launches": calibrate_device.launches(),
        "waiting": calibrate_device.waiting() | calibrate_device.gap(),
        "memory": calibrate_device.memory(),
    }
    sections = {"kernels": {"points": points, "left_out": left_out}, "device": device, **known}
    return {"schema": SCHEMA, "environment": environment(), "sections": sections}


def _host(expected: Answer, deadline: float, left_out: list[str], say: Callable[[str], None]) -> dict[str, Any]:
    """The section ``host``; nothing where it could not be measured."""
    from trainatomy.measurement.calibration.host import host_section

    if time.monotonic() > deadline:
        left_out.append("host: out of time")
        return {}
    try:
        return {"host": host_section(expected, say)}
    except RuntimeError as error:
        left_out.append(f"host: {str(error).splitlines()[0]}")
        return {}


def groups() -> dict[str, Callable[[], Iterable[Case]]]:
    """The groups of cases, most wanted first."""
    from trainatomy.measurement.calibration import cases, lists, traffic

    return {
        "matrix products": cases.matrix_products,
        "element-wise": traffic.elementwise,
        "normalisations": traffic.normalisations,
        "attention": cases.attention,
        "optimizers": lists.optimizers,
        "batched products": cases.batched_products,
        "losses": traffic.losses,
        "rows of scores": traffic.rows_of_scores,
        "broadcast": traffic.broadcast,
        "tables": traffic.tables,
        "small ones": lists.small_ones,
        "convolutions": cases.convolutions,
        "image operators": cases.image_operators,
        "grouped products": cases.grouped_products,
        "transfers": lists.transfers,
    }


def kernel_points(
    deadline: float, kernel_names: bool, say: Callable[[str], None]
) -> tuple[list[dict[str, Any]], list[str]]:
    """The points of all groups, and what could not be measured."""
    import torch

    from trainatomy.measurement.profiler.calls import CallRecorder, profiled

    points: list[dict[str, Any]] = []
    left_out: list[str] = []
    scrap = torch.empty(FLUSHED * _l2_bytes(), dtype=torch.uint8, device="cuda")
    for name, cases in groups().items():
        began = time.monotonic()
        if began > deadline:
            left_out.append(f"{name}: out of time")
            continue
        recorder = CallRecorder()
        events: list[dict[str, Any]] = []
        count = 0
        with profiled(events):
            for case in cases():
                if time.monotonic() > deadline:
                    left_out.append(f"{name}: out of time after {count} cases")
                    break
                try:
                    run_case(case, recorder, scrap)
                except (RuntimeError, AttributeError, TypeError) as error:
                    left_out.append(f"{name}: {str(error).splitlines()[0][:160]}")
                count += 1
        points += _points_of(recorder, events, kernel_names)
        say(f"{name}: {count} cases, {time.monotonic() - began:.1f} s")
        torch.cuda.empty_cache()
    return points, left_out


def _points_of(recorder: CallRecorder, events: list[dict[str, Any]], kernel_names: bool) -> list[dict[str, Any]]:
    """A point for each call that ran kernels; with TF32 only for operators that it changes."""
    from trainatomy.catalog.calls import to_text

    gathered: dict[tuple[int, str], list[Sample]] = defaultdict(list)
    for sample in recorder.samples(events):
        gathered[sample.call, sample.label].append(sample)
    texts = {index: to_text(call) for call, index in recorder.calls.items() if not call.is_view}
    return [
        point(texts[call], samples, gathered.get((call, label.replace("hot", "cold")), []), label, kernel_names)
        for (call, label), samples in gathered.items()
        if label.startswith("hot")
        and call in texts
        and samples[-1].kernels
        and ("tf32" not in label or texts[call].startswith(TENSOR_CORES))
    ]


def run_case(case: Case, recorder: CallRecorder, scrap: Any) -> None:
    """Warm up, then run a few times, then a few times with a cache that holds other things."""
    import torch

    matmul, convolution = torch.backends.cuda.matmul, torch.backends.cudnn
    matmul.allow_tf32 = case.tf32
    convolution.allow_tf32 = True
    try:
        work = case.make()
        work()
        torch.cuda.synchronize()
        begin = time.perf_counter()
        work()
        torch.cuda.synchronize()
        took = time.perf_counter() - begin
        for _ in range(min(40, int(WARM_SECONDS / took)) if case.warm else 0):
            work()
        recorder.label = "hot tf32" if case.tf32 else "hot"
        with recorder:
            for _ in range(case.runs):
                work()
        recorder.label = recorder.label.replace("hot", "cold")
        for _ in range(min(COLD_RUNS, case.runs)):
            scrap.fill_(1)
            with recorder:
                work()
    finally:
        matmul.allow_tf32 = False


def point(
    call: str, samples: Sequence[Sample], cold: Sequence[Sample], label: str, kernel_names: bool
) -> dict[str, Any]:
    """One point of the file."""
    found: dict[str, Any] = {"call": call, "us": round(median(sample.microseconds for sample in samples), 2)}
    if cold:
        cold_us = round(median(sample.microseconds for sample in cold), 2)
        if abs(cold_us - found["us"]) > SAME * found["us"]:
            found["cold_us"] = cold_us
    found["kernels"] = len(samples[-1].kernels)
    if "tf32" in label:
        found["tf32"] = True
    if kernel_names:
        found["names"] = [name[:90] for name in samples[-1].kernels[:6]]
    return found


def _l2_bytes() -> int:
    import torch

    return int(torch.cuda.get_device_properties(0).L2_cache_size)


def write(calibration: dict[str, Any], path: Path) -> None:
    """One point a line."""
    text = json.dumps(calibration, separators=(",", ":"))
    path.write_text(text.replace('{"call"', '\n{"call"') + "\n", encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m trainatomy.measurement.calibration.calibrate", description=calibrate.__doc__
    )
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--time-limit", type=float, default=TIME_LIMIT)
    parser.add_argument("--kernel-names", action="store_true")
    options = parser.parse_args(arguments)
    write(calibrate(time_limit=options.time_limit, kernel_names=options.kernel_names), options.output)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
