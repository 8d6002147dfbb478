"""Predict the time of held-out trainings (``trainings.yaml``), and compare: the GPU's own time, and the whole step.

The GPU's own time is that of kernels, fills and copies, without those of batches from pageable memory: a profiler
counts these as the GPU's, but the host copies them into the driver's buffers first, at 1 to 10 GB/s on machines
measured so far.

python benchmarks/timing/trainings.py predict [--gpu ID]       # with cuDNN's library: predictions/trainings-ID.jsonl
python benchmarks/timing/measure_trainings.py --out FILE [--gpu ID]  # on the GPU: what is predicted
python benchmarks/timing/trainings.py report FILE [--gpu ID]   # errors, by what bounds the step
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import sys
import time
from collections import defaultdict
from collections.abc import Container, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from math import log
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "accuracy"))

import grid  # noqa: E402

from trainatomy.results.host_pace import HostPace  # noqa: E402
from trainatomy.workload.schema import Workload  # noqa: E402

TRAININGS = HERE / "trainings.yaml"
PREDICTIONS = HERE / "predictions"
PACES = (0.7, 0.85, 1.15, 1.3, 1.5, 2.0, 3.0)
"""Paces of the host for which a step is predicted, besides 1; the measured pace lies between two."""
PACE_STEP = 1.08
"""Ratio of paces between which a step's growth says what bounds it."""
SHOWN_KERNELS = 10
PAGEABLE_COPY = "Memcpy HtoD (Pageable"
"""How a profiler names a copy of a batch from memory that is not pinned."""


def rows() -> list[grid.Row]:
    """Return the trainings in an order without families, so that a time limit cuts all of them short."""
    return sorted(grid.rows(TRAININGS), key=lambda row: hashlib.sha256(row.name.encode()).digest())


def predictions_of(gpu_id: str) -> Path:
    """Return the file with the predictions for a GPU."""
    return PREDICTIONS / f"trainings-{gpu_id}.jsonl"


def records_of(gpu_id: str) -> Path:
    """Return the file with what was measured on a GPU: the lines of ``measure_trainings.py``, compressed."""
    return HERE / "records" / f"trainings-{gpu_id}.jsonl.gz"


def lines(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a file of JSON lines, which may be compressed; none if there is no file."""
    content = path.read_bytes() if path.exists() else b""
    text = gzip.decompress(content) if path.suffix == ".gz" and content else content
    return [json.loads(line) for line in text.decode().splitlines()]


def prediction(row: grid.Row, gpu_id: str) -> dict[str, Any]:
    """Predict the GPU's own time of a training, and the step at several paces of the host."""
    from trainatomy.catalog.gpus import find_gpu
    from trainatomy.prediction import analysis_of
    from trainatomy.simulator.simulate import simulate

    gpu = find_gpu(gpu_id)
    workload = row.workload(HERE).model_copy(update={"gpu": gpu_id})
    simulation = simulate(workload, gpu)
    return priced(row, workload, simulation, analysis_of(workload, simulation).driver_calls)


def priced(row: grid.Row, workload: Workload, simulation: Any, driver_calls: Sequence[Any]) -> dict[str, Any]:
    """Return the predicted times of a simulated training."""
    from recurrent_times import RECURRENT, recurrent_seconds

    from trainatomy.catalog.hosts import reference_host
    from trainatomy.prediction import replayed_as, time_of
    from trainatomy.timing.cost_model import cost_model_of, kernel_cost, tensor_cores_for_fp32
    from trainatomy.timing.host_costs import cpu_costs
    from trainatomy.timing.launch import batch_bytes, cpu_seconds_by_phase
    from trainatomy.workload.loops import loop_of

    found = time_of(workload, simulation, driver_calls, None, paces=PACES)
    tf32 = tensor_cores_for_fp32(workload.train.tf32, simulation.torch_version)
    gpu = workload.resolve_gpu()
    model = cost_model_of(gpu, tf32=tf32)
    operations, own, recurrent, copied = simulation.operations, 0.0, 0.0, 0.0
    for one in operations.operations:
        call = operations.calls[one.call]
        seconds = kernel_cost(call, model).seconds * one.repeats
        if batch_bytes(call):
            copied += seconds
            continue
        own += seconds
        recurrent += seconds * (RECURRENT in call.name)
    costs = cpu_costs(reference_host().microseconds)
    batch_seconds = cpu_seconds_by_phase(operations, costs, loop_of(workload).cpu_costs)["batch"]
    paced = dict[str, float]()
    if recurrent:
        known = replayed_as(workload, simulation).items()
        replaying = {name: value for name, value in known if name not in ("tf32", "links")}  # which the model has
        replaying["driver_calls"] = driver_calls
        rest = own - recurrent
        own = rest + recurrent_seconds(operations, model, gpu, 1.0, **replaying)
        paced = {str(pace): rest + recurrent_seconds(operations, model, gpu, pace, **replaying) for pace in PACES}
    return {
        "name": row.name,
        "workload": dict(row.mapping),
        "gpu_seconds": _rounded(own),
        **({"gpu_at_paces": {pace: _rounded(seconds) for pace, seconds in paced.items()}} if paced else {}),
        "copied_seconds": _rounded(copied),
        "collated_seconds": _rounded(batch_seconds if workload.data.factory is None else 0.0),
        "step_seconds": _rounded(found.step_seconds),
        "at_paces": {one.pace: _rounded(one.step_seconds) for one in found.at_paces},
        "host_seconds": _rounded(found.host_seconds),
        "backward_share": _rounded(found.backward_host_share),
        "bound_by": found.bound_by,
        "launches": found.launches,
    }


def _rounded(value: float | None) -> float | None:
    """Return a number to seven digits, of which a stored prediction needs no more."""
    return None if value is None else float(f"{value:.7g}")


def own_seconds(measurement: dict[str, Any]) -> tuple[float, float]:
    """Return the GPU's own seconds that were measured, and those of copies from pageable memory."""
    kernels = measurement.get("by_kernel", {}).items()
    copied = sum(us for name, us in kernels if name.startswith(PAGEABLE_COPY)) * 1e-6
    return measurement["gpu_seconds"] - copied, copied


def at_pace(line: dict[str, Any], pace: float) -> float:
    """Return the predicted step at a pace of the host; beyond those that were predicted, at the last of them."""
    return _between(line["step_seconds"], line["at_paces"], pace)


def gpu_at_pace(line: dict[str, Any], pace: float) -> float:
    """Return the GPU's own predicted time at a pace of the host, on which that of recurrent layers depends."""
    return _between(line["gpu_seconds"], line.get("gpu_at_paces", {}), pace)


def _between(quiet: float, at_paces: dict[str, float], pace: float) -> float:
    known = sorted([(1.0, quiet), *((float(key), value) for key, value in at_paces.items())])
    pace = min(max(pace, known[0][0]), known[-1][0])
    for (low, before), (high, after) in pairwise(known):
        if pace <= high:
            return float(before + (after - before) * (pace - low) / (high - low))
    return float(known[-1][1])


def bound_at(line: dict[str, Any], pace: float) -> str:
    """Return what bounds the predicted step at a pace of the host: the host, if most of a slower pace shows in it.

    Copies of batches from pageable memory are the host's as well, and copies of samples into batches, although they
    grow less than the pace.
    """
    from trainatomy.catalog.hosts import reference_host

    slower, quicker = pace * PACE_STEP, pace / PACE_STEP
    grown = log(at_pace(line, slower) / at_pace(line, quicker)) / log(slower / quicker)
    exponent = reference_host().copy_exponent
    copied = line["copied_seconds"] + line.get("collated_seconds", 0.0)
    copied_share = copied * pace**exponent / at_pace(line, pace)
    return "host" if grown + (1 - exponent) * copied_share > 0.5 else "GPU"


def todays(recorded: HostPace) -> HostPace:
    """Return a recorded pace beside what is known of the reference host today."""
    from trainatomy.catalog.hosts import reference_host

    host, probe = reference_host(), recorded.probe
    if probe not in host.probe_seconds:
        return recorded
    return replace(recorded, reference_seconds=host.probe_seconds[probe], exponent=host.pace_exponents[probe])


def visits(measured: Sequence[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """Yield the lines of each visit to a machine: kernels of all trainings, then steps, as far as the time allowed."""
    visit: list[dict[str, Any]] = []
    for line in measured:
        if visit and line.get("part") == "kernels" and visit[-1].get("part") == "steps":
            yield visit
            visit = []
        visit.append(line)
    if visit:
        yield visit


def _probed(pace: dict[str, Any]) -> float:
    return HostPace(**pace).seconds


def _gathered(measured: Sequence[dict[str, Any]], predicted: Container[str]) -> dict[str, dict[str, Any]]:
    """Return what was measured of each training: its kernels, the rounds of its steps, and its visit's median pace."""
    found: dict[str, dict[str, Any]] = defaultdict(lambda: {"rounds": []})
    for visit in visits(measured):
        valid = [line for line in visit if "error" not in line and line.get("name") in predicted]
        for line in valid:
            one = found[line["name"]]
            if line["part"] == "steps":
                one["rounds"] = [line] if line.get("round", 1) == 1 else [*one["rounds"], line]
            else:
                one["kernels"] = line
        if paced := sorted((line["host_pace"] for line in valid if "host_pace" in line), key=_probed):
            for line in valid:
                found[line["name"]]["visit_pace"] = paced[len(paced) // 2]
    return found


def _undisturbed(rounds: Sequence[dict[str, Any]]) -> Sequence[dict[str, Any]]:
    """Return the rounds in which the hypervisor took little of the processors' time; all of them, if it always did."""
    from trainatomy.measurement.calibration.quiet import MOST_STOLEN

    kept = [one for one in rounds if (one.get("host_pace", {}).get("stolen_share") or 0.0) <= MOST_STOLEN]
    return kept or rounds


def compared(measurements: Path, predictions: Path, quiet_us: float | None) -> Iterator[dict[str, Any]]:
    """Yield the errors of each training: the GPU's time at the pace beside its kernels, the step's at that beside it.

    Where neither was probed, at the median pace of the visit to the machine.  Of several rounds of steps, each at its
    own pace, the error is their median; the step and its pace are those of the round nearest to it.
    """
    predicted = {line["name"]: line for line in lines(predictions)}
    gathered = _gathered(lines(measurements), predicted)
    probed = [one["host_pace"] for found in gathered.values() for one in found["rounds"] if "host_pace" in one]
    quickest = quiet_us * 1e-6 if quiet_us else min(map(_probed, probed), default=1.0)

    def against(recorded: dict[str, Any] | None, backward_share: float | None) -> float:
        if recorded is None:
            return 1.0
        pace = todays(HostPace(**recorded))
        return pace.beside(pace.reference_seconds or quickest, backward_share)

    for name, found in gathered.items():
        ours, rounds, visit_pace = predicted[name], _undisturbed(found["rounds"]), found.get("visit_pace")
        one: dict[str, Any] = {"name": name, "bound": "host" if ours["bound_by"] == "host" else "GPU"}
        share = ours.get("backward_share")
        paces = [against(line.get("host_pace", visit_pace), share) for line in rounds]
        if "kernels" in found:
            own, copied = own_seconds(found["kernels"])
            beside_steps = rounds[-1].get("host_pace", visit_pace) if rounds else visit_pace
            pace = against(found["kernels"].get("kernels_pace") or beside_steps, share)
            one |= {"gpu": own, "gpu_error": gpu_at_pace(ours, pace) / own - 1, "copied": copied}
        if rounds:
            steps = [line["step_seconds"] for line in rounds]
            errors = [at_pace(ours, pace) / step - 1 for pace, step in zip(paces, steps, strict=True)]
            error = median(errors)
            nearest = min(range(len(rounds)), key=lambda each: abs(errors[each] - error))
            step, pace = steps[nearest], paces[nearest]
            one |= {"pace": pace, "step": step, "step_error": error, "bound": bound_at(ours, pace)}
            one |= {"quiet_error": ours["step_seconds"] / step - 1, "round_errors": errors}
        yield one


def _shown(one: dict[str, Any]) -> str:
    own = f"GPU {one['gpu'] * 1e3:8.2f} ms {one['gpu_error']:+7.1%}" if "gpu" in one else " " * 23
    if "step" not in one:
        return own
    errors = f"{one['step_error']:+7.1%} (quiet {one['quiet_error']:+7.1%})"
    return f"{own}  step {one['step'] * 1e3:8.2f} ms {errors} pace {one['pace']:4.2f}"


def groups_of(every: Sequence[dict[str, Any]]) -> dict[str, list[float]]:
    """Return the absolute errors by what bounds the step: the GPU's own time, and whole steps at either pace."""
    groups: dict[str, list[float]] = defaultdict(list)
    for one in every:
        steps = f"whole steps that the {one['bound']} bounds"
        kinds = {"gpu_error": "the GPU's own time", "step_error": f"{steps}, at the measured pace"}
        for key, title in {**kinds, "quiet_error": f"{steps}, at a quiet host"}.items():
            if key in one:
                groups[title].append(abs(one[key]))
    return dict(sorted(groups.items()))


def report(measurements: Path, predictions: Path, quiet_us: float | None) -> None:
    """Print the errors: each training, then median and worst by what bounds the step."""
    every = sorted(compared(measurements, predictions, quiet_us), key=lambda one: one.get("gpu_error", 0.0))
    for one in every:
        print(f"{one['name']:32} {one['bound']:4} {_shown(one)}")
    for name, errors in groups_of(every).items():
        print(f"{name}: {len(errors)} trainings, median {median(errors):.1%}, worst {max(errors):.1%}")


def page(gpu_ids: Sequence[str]) -> None:
    """Print tables of the errors of stored predictions: what bounds the step, then each training, for each GPU."""
    for gpu_id in gpu_ids:
        every = list(compared(records_of(gpu_id), predictions_of(gpu_id), None))
        print(f"\n### {gpu_id}\n\n| | trainings | median | nine of ten | worst |\n| --- | ---: | ---: | ---: | ---: |")
        for name, errors in groups_of(every).items():
            most = sorted(errors)[int(0.9 * len(errors))]
            print(f"| {name} | {len(errors)} | {median(errors):.1%} | {most:.1%} | {max(errors):.1%} |")
        print("\n| training | the GPU's own time | error | whole step | error | bound by |")
        print("| --- | ---: | ---: | ---: | ---: | --- |")
        for one in sorted(every, key=lambda one: str(one["name"])):
            own = f"{one['gpu'] * 1e3:.1f} ms | {one['gpu_error']:+.1%}" if "gpu" in one else "|"
            step = f"{one['step'] * 1e3:.1f} ms | {one['quiet_error']:+.1%}" if "step" in one else "|"
            print(f"| {one['name']} | {own} | {step} | {one['bound']} |")


def predict(gpu_id: str, names: str, again: bool) -> None:
    """Store the predictions of trainings that have none, or ``again`` of all, or of those that are named."""
    from trainatomy.catalog.gpus import find_gpu
    from trainatomy.operators.cost.plans import names_engines
    from trainatomy.simulator.cudnn import installed_heuristics

    gpu = find_gpu(gpu_id)
    heuristics = installed_heuristics(gpu)
    if heuristics is None or not names_engines(heuristics.version, gpu.capability):
        raise SystemExit('stored predictions need cuDNN\'s library: pip install "trainatomy[cudnn]"')
    path = predictions_of(gpu_id)
    path.parent.mkdir(exist_ok=True)
    if again:
        kept = [line for line in lines(path) if names and line["name"] not in names.split(",")]
        path.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")
    done = {line["name"]: line["workload"] for line in lines(path)}
    for row in sorted(rows(), key=lambda row: "factory" in row.mapping["model"]):  # torchvision_path.py says why
        if done.get(row.name) == dict(row.mapping) or (names and row.name not in names.split(",")):
            continue
        began = time.monotonic()
        try:
            found = prediction(row, gpu_id)
        except Exception as error:
            print(f"{row.name}: NOT PREDICTED: {type(error).__name__}: {error}", flush=True)
            continue
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(found) + "\n")
        times = f"{found['gpu_seconds'] * 1e3:.2f} {found['step_seconds'] * 1e3:.2f} ms {found['bound_by']}"
        print(f"{row.name}: {times} in {time.monotonic() - began:.1f} s", flush=True)


def main() -> int:
    """Predict or report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    predicting = commands.add_parser("predict")
    predicting.add_argument("--gpu", default="h200")
    predicting.add_argument("--names", default="")
    predicting.add_argument("--again", action="store_true", help="replace stored predictions")
    reporting = commands.add_parser("report")
    reporting.add_argument("file", type=Path)
    reporting.add_argument("--gpu", default="h200")
    reporting.add_argument("--predictions", type=Path, help="default: those that are stored for the GPU")
    reporting.add_argument("--quiet-us", type=float, help="the probe on a quiet host (default: the least measured)")
    commands.add_parser("page", help="tables for docs/timing-accuracy.md")
    options = parser.parse_args()
    if options.command == "page":
        page(("h200", "h100-sxm"))
    elif options.command == "predict":
        predict(options.gpu, options.names, options.again)
    else:
        report(options.file, options.predictions or predictions_of(options.gpu), options.quiet_us)
    return 0


if __name__ == "__main__":
    sys.exit(main())
