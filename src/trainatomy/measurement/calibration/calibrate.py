"""Measure this machine for the timing model: ``trainatomy calibrate``.

The file is JSON, ``trainatomy/calibration/1``::

    environment    GPU, driver, versions, CPU, date
    sections
      kernels      points: one operator each, with its GPU microseconds: repeated on the same tensors (``us``), and with
                   the L2 cache full of other data (``cold_us``, if that differs), and the number of kernels
      device       consecutive launches, synchronisation, memory allocation by the driver
      collectives  points: one collective each, with its kind, ranks, machines, bytes and GPU seconds (several GPUs)
      host         factors: time of this CPU as a multiple of the reference CPU's, by part of a step; probe_us: time of
                   the probe of the host's pace; busy: why the machine was not quiet (empty: it was), and its load

``trainatomy/catalog/calibrations.py`` defines the text form of a point's call.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import torch

from trainatomy.catalog.calibrations import SCHEMA, WHOLE, to_text
from trainatomy.errors import DeviceError, TrainatomyError
from trainatomy.libraries import installed_versions
from trainatomy.measurement.calibration import cases, device, traffic
from trainatomy.measurement.calibration.host import JsonProcess, expected_for, host_section, measure_phases
from trainatomy.measurement.device import nvml
from trainatomy.measurement.profiled_calls import CallRecorder, Sample, profiled
from trainatomy.measurement.step.results import driver_version
from trainatomy.operators.cost import cost_module
from trainatomy.workload.parallel import ParallelSpec

if TYPE_CHECKING:
    from trainatomy.measurement.calibration.cases import Case


TIME_LIMIT = 120.0
"""Seconds; cases that are not measured by then are left out, and the file lists them."""
COLD_RUNS = 3
WARM_SECONDS = 0.008
TF32_OPERATORS = ("aten::mm(", "aten::addmm(", "aten::bmm(", "aten::baddbmm(", "aten::convolution")
"""Operators whose speed TF32 changes."""
COLD_TOLERANCE = 0.03
"""Cold times that differ by less are not written."""
FLUSH_FACTOR = 2
"""Multiple of the L2 cache's size that is written to flush it."""


def calibrate(
    *,
    time_limit: float = TIME_LIMIT,
    kernel_names: bool = False,
    gpus: int = 1,
    force: bool = False,
    progress: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Measure this machine's GPU and CPU and return the calibration (see above).

    Args:
        time_limit: Seconds after which no more cases are measured.
        kernel_names: Keep the names of the kernels with each point.
        gpus: GPUs whose links are measured too.
        force: Calibrate also where the machine is busy with other work.
        progress: Called with lines of progress (default: print to stderr).

    Raises:
        DeviceError: There is no GPU, or fewer than ``gpus``.
        TrainatomyError: The machine did not become quiet; nothing else was measured.
    """
    if torch.version.hip:
        raise DeviceError(nvml.NOT_ON_AMD)
    if not torch.cuda.is_available():
        raise DeviceError(
            "`calibrate` measures the GPU of this machine, and PyTorch finds none here "
            f"(torch {torch.__version__}). Run it where `nvidia-smi` shows the GPU, then use the file anywhere: "
            "`trainatomy predict --calibration FILE`."
        )
    report = progress or (lambda line: print(line, file=sys.stderr, flush=True))
    links = _measure_links(gpus, time_limit, report)
    deadline = time.monotonic() + time_limit
    measured, problems = _measure_host(report)
    if measured.get("busy") and not force:
        raise TrainatomyError(too_busy(measured))
    with expected_for(torch.cuda.get_device_name()) as expected:
        points, left_out = kernel_points(deadline, kernel_names, report)
        host_sections = _compare_host(measured, expected, problems)
    left_out += problems
    report("launches, synchronisation, memory")
    of_device = {
        "launches": device.launches(),
        "waiting": device.synchronisation() | device.gap(),
        "memory": device.memory(),
    }
    sections = {"kernels": {"points": points, "left_out": left_out}, "device": of_device, **host_sections, **links}
    return {"schema": SCHEMA, "environment": environment(), "sections": sections}


def _measure_links(gpus: int, time_limit: float, report: Callable[[str], None]) -> dict[str, Any]:
    """Return the section ``collectives``, or nothing for one GPU.  Comes before this process uses CUDA."""
    if gpus == 1:
        return {}
    nvml.require_gpus(ParallelSpec(gpus=gpus))
    return {"collectives": device.collectives_section(gpus, time_limit=time_limit, report=report)}


def _measure_host(report: Callable[[str], None]) -> tuple[dict[str, Any], list[str]]:
    """Return the times of small trainings on this CPU, and what failed; first, so that a busy machine is soon told."""
    try:
        return measure_phases(report), []
    except RuntimeError as error:
        return {}, [f"host: {str(error).splitlines()[0]}"]


def _compare_host(measured: dict[str, Any], expected: JsonProcess, problems: list[str]) -> dict[str, Any]:
    """Return the section ``host``, or nothing if it could not be measured."""
    if not measured:
        return {}
    try:
        return {"host": host_section(measured, expected)}
    except RuntimeError as error:
        problems.append(f"host: {str(error).splitlines()[0]}")
        return {}


def too_busy(measured: Mapping[str, Any]) -> str:
    """Return the message of a calibration that is not kept."""
    return (
        f"calibrate: this machine is busy: {measured['busy']}, after {measured['attempts']} attempts. A calibration "
        "taken now would make every prediction for this machine too slow. End the other work and try again; "
        "--force keeps what can be measured."
    )


def groups() -> dict[str, Callable[[], Iterable[Case]]]:
    """Return the groups of cases, most important first."""
    return {
        "matrix products": cases.matrix_products,
        "element-wise": traffic.elementwise,
        "normalisations": traffic.normalisations,
        "attention": cases.attention,
        "optimizers": cases.optimizers,
        "batched products": cases.batched_products,
        "losses": traffic.losses,
        "rows of scores": traffic.rows_of_scores,
        "broadcast": traffic.broadcast,
        "tables": traffic.tables,
        "tiny tensors": cases.tiny_tensors,
        "convolutions": cases.convolutions,
        "image operators": cases.image_operators,
        "grouped products": cases.grouped_products,
        "transfers": cases.transfers,
    }


def kernel_points(
    deadline: float,
    kernel_names: bool,
    report: Callable[[str], None],
    chosen: Mapping[str, Callable[[], Iterable[Case]]] | None = None,
) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the points of all groups, or of those chosen, and the names of cases left out."""
    points: list[dict[str, Any]] = []
    left_out: list[str] = []
    flush_buffer = torch.empty(FLUSH_FACTOR * _l2_bytes(), dtype=torch.uint8, device="cuda")
    for name, listed in (chosen or groups()).items():
        began = time.monotonic()
        if began > deadline:
            left_out.append(f"{name}: out of time")
            continue
        recorder = CallRecorder()
        events: list[dict[str, Any]] = []
        count = 0
        with profiled(events):
            for case in listed():
                if time.monotonic() > deadline:
                    left_out.append(f"{name}: out of time after {count} cases")
                    break
                try:
                    run_case(case, recorder, flush_buffer)
                except (RuntimeError, AttributeError, TypeError, ValueError, ImportError) as error:
                    left_out.append(f"{name}: {str(error).splitlines()[0][:160]}")
                count += 1
        points += _points_of(recorder, events, kernel_names)
        report(f"{name}: {count} cases, {time.monotonic() - began:.1f} s")
        torch.cuda.empty_cache()
    return points, left_out


def _points_of(recorder: CallRecorder, events: list[dict[str, Any]], kernel_names: bool) -> list[dict[str, Any]]:
    """Return a point for each call that ran kernels; with TF32 only for the operators that it changes."""
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
        and ("tf32" not in label or texts[call].startswith(TF32_OPERATORS))
    ]


def run_case(case: Case, recorder: CallRecorder, flush_buffer: Any) -> None:
    """Warm up, then run a few times, then a few times with the L2 cache full of other data."""
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
            flush_buffer.fill_(1)
            with recorder:
                work()
    finally:
        matmul.allow_tf32 = False


def point(
    call: str, samples: Sequence[Sample], cold: Sequence[Sample], label: str, kernel_names: bool
) -> dict[str, Any]:
    """Return one point of the file."""
    found: dict[str, Any] = {"call": call, "us": round(median(sample.microseconds for sample in samples), 2)}
    if cold:
        cold_us = round(median(sample.microseconds for sample in cold), 2)
        if abs(cold_us - found["us"]) > COLD_TOLERANCE * found["us"]:
            found["cold_us"] = cold_us
    found["kernels"] = len(samples[-1].kernels)
    if "tf32" in label:
        found["tf32"] = True
    if kernel_names:
        found["names"] = [name[:90] for name in samples[-1].kernels[:6]]
    return found


def _l2_bytes() -> int:
    return int(torch.cuda.get_device_properties(0).L2_cache_size)


def write(calibration: dict[str, Any], path: Path) -> None:
    """Write a calibration as JSON, one point a line; into a folder with a file for each kind of kernel."""
    if path.is_dir():
        kernels = calibration["sections"]["kernels"]
        kinds: dict[str, list[Any]] = defaultdict(list)
        for point in kernels["points"]:
            kinds[_kind(point["call"])].append(point)
        for kind, points in kinds.items():
            _write({"points": points}, path / f"{kind}.json")
        sections = calibration["sections"] | {"kernels": kernels | {"points": []}}
        _write(calibration | {"sections": sections}, path / WHOLE)
    else:
        _write(calibration, path)


def _kind(call: str) -> str:
    """Return the name of the file of a call's points: that of its cost module; several for convolutions."""
    operator, _, operands = call.partition("(")
    kind = cost_module(operator) or "other"
    if kind != "convolution":
        return kind
    direction = "_backward" if operator.endswith("backward") else ""
    return f"{kind}{direction}_{operands.partition('[')[0]}"


def _write(content: dict[str, Any], path: Path) -> None:
    text = json.dumps(content, separators=(",", ":"))
    for first in ('{"call"', '{"kind"'):
        text = text.replace(first, f"\n{first}")
    path.write_text(text + "\n", encoding="utf-8")


def environment() -> dict[str, Any]:
    """Return the GPU, driver, library versions and CPU of this machine, and the date."""
    properties = torch.cuda.get_device_properties(0)
    return {
        "gpu": properties.name,
        "capability": [properties.major, properties.minor],
        "multiprocessors": properties.multi_processor_count,
        "l2_bytes": properties.L2_cache_size,
        "memory_bytes": properties.total_memory,
        "driver": driver_version(),
        "versions": installed_versions(),
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "processor": _processor(),
        "date": datetime.now(UTC).date().isoformat(),
    }


def _processor() -> str:
    """Return the CPU's model, as Linux names it."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def main(arguments: Sequence[str] | None = None) -> int:
    """Calibrate from the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m trainatomy.measurement.calibration.calibrate", description=calibrate.__doc__
    )
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--time-limit", type=float, default=TIME_LIMIT)
    parser.add_argument("--kernel-names", action="store_true")
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--force", action="store_true")
    options = parser.parse_args(arguments)
    found = calibrate(
        time_limit=options.time_limit, kernel_names=options.kernel_names, gpus=options.gpus, force=options.force
    )
    write(found, options.output)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
