"""Predict the cases before they are measured: ``python lab/everyday/predict.py --gpu h200``.

Each prediction becomes a line of ``predictions/GPU.jsonl`` at once, with the commit that made it; a second call
continues.  ``measure.py`` refuses cases without one.  Times are predicted for several paces of the host, because the
pace is known only when a case has been measured.

``--again`` predicts the times of measured cases with the code of today, into ``predictions/GPU-again.jsonl``.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import everyday_cases
from everyday_cases import Case, pace_of

from trainatomy.api import predict
from trainatomy.errors import TrainatomyError
from trainatomy.prediction.assemble import keep_executed
from trainatomy.prediction.tasks import evaluation_time, first_token_time
from trainatomy.results.prediction import Prediction
from trainatomy.results.time import Time
from trainatomy.workload.schema import Workload

_PARTS = ("evaluation", "generation", "checkpoint", "lengths")
"""What a prediction says of some cases only."""


PACES = (0.7, 0.85, 1.15, 1.3, 1.5, 2.0, 3.0)
"""Paces of the host for which times are predicted, besides 1; the measured pace lies between two."""


def predicted(workload: Workload, pace: float | None = None) -> tuple[Prediction, dict[str, dict[str, float]]]:
    """Return a prediction, and its times by the host's pace: for one pace, or for all of ``PACES``."""
    paces, layouts = (PACES, True) if pace is None else ((pace,), False)  # other addresses change no time
    with keep_executed() as executed:
        found = predict(workload, host_paces=paces, layouts=layouts)
    times = {} if found.time is None else {"step_seconds": found.time}
    if found.lengths is None and executed:
        workload, simulation, analysis = executed[-1]
        if found.evaluation is not None:
            times["evaluation_seconds"] = evaluation_time(workload, simulation, analysis, paces=paces)
        if found.generation is not None and found.generation.first_token_seconds is not None:
            times["first_token_seconds"] = first_token_time(workload, simulation, paces=paces)
    by_pace = {name: _by_pace(one) for name, one in times.items()}
    if (first := by_pace.get("first_token_seconds")) and workload.mode == "generation":
        further = (workload.generation.max_new_tokens or 1) - 1
        by_pace["token_seconds"] = {
            pace: (whole - first[pace]) / further for pace, whole in by_pace["step_seconds"].items() if further
        }
    return found, by_pace


def _by_pace(time: Time) -> dict[str, float]:
    return {"1.0": time.step_seconds, **{str(one.pace): one.step_seconds for one in time.at_paces}}


def line_of(
    case: Case, found: Prediction | TrainatomyError, commit: str, paced: dict[str, dict[str, float]]
) -> dict[str, Any]:
    """Return what is kept of a prediction; ``paced``: its times by the host's pace."""
    about = {"name": case.name, "kind": case.kind, "held_out": case.held_out, "workload": dict(case.mapping)}
    made = {"commit": commit, "date": datetime.now(UTC).isoformat(timespec="seconds")}
    if isinstance(found, TrainatomyError):
        return {**about, **made, "error": str(found).splitlines()[0]}  # further lines name files of this machine
    memory = asdict(found.memory)
    parts: dict[str, Any] = {name: asdict(part) for name in _PARTS if (part := getattr(found, name)) is not None}
    parts |= {"restored": [asdict(each) for each in found.restored]} if found.restored else {}
    times: dict[str, Any] = {"step_seconds": None if found.time is None else found.time.step_seconds, "paced": paced}
    if found.time is not None:
        times |= {"bound_by": found.time.bound_by, "backward_host_share": found.time.backward_host_share}
    return {**about, **made, "versions": found.versions, "memory": memory, **times, **parts}


def commit_of(folder: Path) -> str:
    """Return the commit of a checkout, with a plus sign if files differ from it; empty outside of one."""
    try:
        named = subprocess.run(["git", "describe", "--always", "--dirty=+"], cwd=folder, capture_output=True, text=True)
    except OSError:
        return ""
    return named.stdout.strip()


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", default="h200")
    parser.add_argument("--cases", type=Path, default=everyday_cases.CASES, help="folder of cases")
    parser.add_argument("--out", type=Path, help="default: predictions/GPU.jsonl")
    parser.add_argument("--names", help="cases, separated by commas")
    parser.add_argument("--kinds", help="kinds of cases, such as evaluation,generation")
    parser.add_argument("--again", action="store_true", help="predict measured cases once more, for their times")
    parser.add_argument("--torch", help="version of PyTorch on the GPU's machine (default: the installed one)")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Predict; return 1 where a case cannot be predicted."""
    options = parse(arguments)
    name = f"{options.gpu}-again.jsonl" if options.again else f"{options.gpu}.jsonl"
    out = options.out or everyday_cases.PREDICTIONS / name
    done = {line["name"] for line in everyday_cases.lines(out) if "error" not in line}
    commit, failed = commit_of(everyday_cases.HERE), 0
    for case, release, pace in waiting(options):
        if case.name in done:
            continue
        began, paced = time.monotonic(), dict[str, dict[str, float]]()
        found: Prediction | TrainatomyError
        try:
            workload = case.workload(options.gpu)
            workload = workload.replace("software.torch", release) if release else workload
            found, paced = predicted(workload, pace)
            shown = f"{found.memory.peak_allocated_bytes:,} {found.memory.peak_reserved_bytes:,}"
        except TrainatomyError as error:
            found, failed, shown = error, failed + 1, f"NOT PREDICTED: {error}"
        line = line_of(case, found, commit, paced)
        everyday_cases.append(out, times_of(line) if options.again else line)
        print(f"{case.kind:12} {case.name:40} {shown} in {time.monotonic() - began:.1f} s", flush=True)
    return 1 if failed else 0


def waiting(options: argparse.Namespace) -> list[tuple[Case, str | None, float | None]]:
    """Return the chosen cases, the release of PyTorch to predict for and the host's pace.

    With ``--again`` these are the cases that were timed and recorded a pace.
    """
    if not options.again:
        every = everyday_cases.chosen(everyday_cases.cases(options.cases), options.names, options.kinds)
        return [(case, options.torch, None) for case in every]
    records = everyday_cases.lines(everyday_cases.RECORDS / options.gpu)
    timed = {line["name"]: (line["versions"]["torch"], pace_of(line)) for line in records if not line.get("shared")}
    cases = tuple(Case(line["name"], line["kind"], line["workload"]) for line in records)
    found = [case for case in everyday_cases.chosen(cases, options.names, options.kinds) if case.name in timed]
    return [(case, *timed[case.name]) for case in found if timed[case.name][1] is not None]


def times_of(line: dict[str, Any]) -> dict[str, Any]:
    """Return what is kept of a prediction that was made again."""
    return {
        name: line[name]
        for name in ("name", "commit", "paced", "bound_by", "backward_host_share", "evaluation", "error")
        if name in line
    }


if __name__ == "__main__":
    sys.exit(main())
