"""Predict the cases before they are measured: ``python benchmarks/everyday/predict.py --gpu h200``.

Each prediction becomes a line of ``predictions/GPU.jsonl`` at once, with the commit that made it; a second call
continues.  ``measure.py`` refuses cases without one.
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
from everyday_cases import Case

from trainatomy.api import predict
from trainatomy.errors import TrainatomyError
from trainatomy.results.prediction import Prediction

_PARTS = ("evaluation", "generation", "checkpoint", "lengths")
"""What a prediction says of some cases only."""


def line_of(case: Case, found: Prediction | TrainatomyError, commit: str) -> dict[str, Any]:
    """Return what is kept of a prediction."""
    about = {"name": case.name, "kind": case.kind, "held_out": case.held_out, "workload": dict(case.mapping)}
    made = {"commit": commit, "date": datetime.now(UTC).isoformat(timespec="seconds")}
    if isinstance(found, TrainatomyError):
        return {**about, **made, "error": str(found).splitlines()[0]}  # further lines name files of this machine
    memory = asdict(found.memory)
    parts: dict[str, Any] = {name: asdict(part) for name in _PARTS if (part := getattr(found, name)) is not None}
    parts |= {"restored": [asdict(each) for each in found.restored]} if found.restored else {}
    step_seconds = None if found.time is None else found.time.step_seconds
    return {**about, **made, "versions": found.versions, "memory": memory, "step_seconds": step_seconds, **parts}


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
    parser.add_argument("--torch", help="version of PyTorch on the GPU's machine (default: the installed one)")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Predict; return 1 where a case cannot be predicted."""
    options = parse(arguments)
    out = options.out or everyday_cases.PREDICTIONS / f"{options.gpu}.jsonl"
    done = {line["name"] for line in everyday_cases.lines(out) if "error" not in line}
    commit, failed = commit_of(everyday_cases.HERE), 0
    for case in everyday_cases.chosen(everyday_cases.cases(options.cases), options.names, options.kinds):
        if case.name in done:
            continue
        began = time.monotonic()
        found: Prediction | TrainatomyError
        try:
            workload = case.workload(options.gpu)
            workload = workload.replace("software.torch", options.torch) if options.torch else workload
            found = predict(workload)
            shown = f"{found.memory.peak_allocated_bytes:,} {found.memory.peak_reserved_bytes:,}"
        except TrainatomyError as error:
            found, failed, shown = error, failed + 1, f"NOT PREDICTED: {error}"
        everyday_cases.append(out, line_of(case, found, commit))
        print(f"{case.kind:12} {case.name:40} {shown} in {time.monotonic() - began:.1f} s", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
