"""Predict the cases that have not been measured yet: ``python lab/parallel/predict.py --gpus 2 --torch 2.11``.

Each prediction becomes a line of ``predictions/GPUxGPUS.jsonl`` at once, with the commit that made it, so that a
measurement can be compared with what was said before it.  Lines that are there are kept; remove one to predict its
case again.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import parallel_cases

from trainatomy.api import predict
from trainatomy.errors import TrainatomyError
from trainatomy.results.prediction import Prediction

PACES = (0.7, 0.85, 1.15, 1.3, 1.5, 2.0, 3.0)
"""Paces of the hosts for which times are predicted, besides 1; the measured pace lies between two."""


def line_of(name: str, found: Prediction | TrainatomyError) -> dict[str, Any]:
    """Return what is kept of a prediction: totals of the fullest rank, and the range where there is one."""
    about = {"name": name, "commit": _commit(), "date": datetime.now(UTC).isoformat(timespec="seconds")}
    if isinstance(found, TrainatomyError):
        return {**about, "error": str(found).splitlines()[0]}  # further lines name files of this machine
    memory, time = found.memory, found.time
    totals = {key: getattr(memory, key) for key in ("peak_allocated_bytes", "peak_reserved_bytes", "device_bytes")}
    spans = {
        name: {"allocated": one.allocated_bytes, "reserved": one.reserved_bytes}
        for name, one in (("range", memory.range), ("layouts", memory.layouts))
        if one is not None
    }
    times: dict[str, Any] = {"step_seconds": time and time.step_seconds, "rank": found.rank, "range": None}
    if time is not None:
        by_pace = {str(one.pace): one.step_seconds for one in time.at_paces}
        times |= {"paced": {"1.0": time.step_seconds, **by_pace}, "host_seconds": time.host_seconds}
    return {**about, **totals, **times, **spans}


def _commit() -> str:
    described = ["git", "-C", str(parallel_cases.HERE), "describe", "--always", "--dirty=+"]
    return subprocess.run(described, capture_output=True, text=True, check=False).stdout.strip()


def _names(path: Path) -> set[str]:
    """Return the names of the cases that have a line in a file."""
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    return {json.loads(line)["name"] for line in text.splitlines()}


def main() -> int:
    """Predict; return 1 where a case cannot be predicted."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", default=parallel_cases.GPU)
    parser.add_argument("--gpus", type=int, default=parallel_cases.GPUS)
    parser.add_argument("--torch", default="2.11", help="version of PyTorch on the GPUs' machine")
    parser.add_argument("--cases", type=Path, help="file of cases (default: that of the number of GPUs)")
    options = parser.parse_args()
    measured = parallel_cases.records(options.gpus, options.gpu)
    if options.cases is not None:
        measured = measured.with_stem(f"{options.cases.stem}-{measured.stem}")
    out = parallel_cases.HERE / "predictions" / measured.name
    out.parent.mkdir(exist_ok=True)
    done = _names(measured) | _names(out)
    failed = 0
    with out.open("a", encoding="utf-8") as file:
        for case in parallel_cases.cases(options.cases, options.gpus, options.gpu):
            if case.name in done:
                continue
            found: Prediction | TrainatomyError
            try:
                found = predict(case.workload().replace("software.torch", options.torch), host_paces=PACES)
            except TrainatomyError as error:
                found, failed = error, failed + 1
            line = line_of(case.name, found)
            file.write(json.dumps(line) + "\n")
            file.flush()
            print(line, flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
