"""Compare predictions of trainings with measurements: the GPU's own time, and the whole step.

The GPU's own time is that of kernels, fills and copies, without those of batches from pageable memory: a profiler
counts these as the GPU's, but the host copies them into the driver's buffers first, at 1 to 10 GB/s on machines
measured so far.

python lab/timing/training_errors.py report FILE [--gpu ID]  # errors, by what bounds the step
python lab/timing/training_errors.py page                    # tables of all stored trainings
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Container, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from math import log
from pathlib import Path
from statistics import median
from typing import Any

sys.path.append(str(Path(__file__).resolve().parent))

import trainings

from trainatomy.results.measurement import HostPace

PACE_STEP = 1.08
"""Ratio of paces between which a step's growth says what bounds it."""


def own_seconds(measurement: dict[str, Any]) -> tuple[float, float]:
    """Return the GPU's own seconds that were measured, and those of copies from pageable memory."""
    kernels = measurement.get("by_kernel", {}).items()
    copied = sum(us for name, us in kernels if name.startswith(trainings.PAGEABLE_COPY)) * 1e-6
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
    from trainatomy.catalog.machines import reference_host

    slower, quicker = pace * PACE_STEP, pace / PACE_STEP
    grown = log(at_pace(line, slower) / at_pace(line, quicker)) / log(slower / quicker)
    exponent = reference_host().copy_exponent
    copied = line["copied_seconds"] + line.get("collated_seconds", 0.0)
    copied_share = copied * pace**exponent / at_pace(line, pace)
    return "host" if grown + (1 - exponent) * copied_share > 0.5 else "GPU"


def todays(recorded: HostPace) -> HostPace:
    """Return a recorded pace beside what is known of the reference host today."""
    from trainatomy.catalog.machines import reference_host

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
    predicted = {line["name"]: line for line in trainings.lines(predictions)}
    gathered = _gathered(trainings.lines(measurements), predicted)
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
        every = list(compared(trainings.records_of(gpu_id), trainings.predictions_of(gpu_id), None))
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


def main() -> int:
    """Report on a file, or print the tables of all stored trainings."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    reporting = commands.add_parser("report")
    reporting.add_argument("file", type=Path)
    reporting.add_argument("--gpu", default="h200")
    reporting.add_argument("--predictions", type=Path, help="default: those that are stored for the GPU")
    reporting.add_argument("--quiet-us", type=float, help="the probe on a quiet host (default: the least measured)")
    commands.add_parser("page", help="tables of all stored trainings")
    options = parser.parse_args()
    if options.command == "page":
        page(("h200", "h100-sxm"))
    else:
        report(options.file, options.predictions or trainings.predictions_of(options.gpu), options.quiet_us)
    return 0


if __name__ == "__main__":
    sys.exit(main())
