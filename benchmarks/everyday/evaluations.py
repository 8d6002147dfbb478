"""Predict the times of measured evaluations again: ``python benchmarks/everyday/evaluations.py``.

Reads the records of one H200 (``records/h200``) and of two (``../parallel/records/h200x2.jsonl``), and prints a
line for each evaluation: how many bytes it gathers, the predicted time with what a first evaluation takes longer, the
measured one, and the error.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import everyday_cases

from trainatomy.api import predict
from trainatomy.results.prediction import Prediction
from trainatomy.workload.measurable import measurable
from trainatomy.workload.schema import Workload

RECORDS = (everyday_cases.RECORDS / "h200", Path(__file__).parents[1] / "parallel/records/h200x2.jsonl")
GATHERED = "gathered_outputs"


def predicted(line: dict[str, Any]) -> Prediction:
    """Return the prediction of a measured training, with the release of PyTorch that was measured."""
    mapping = {**line["workload"], "name": line["name"], "gpu": "h200"}
    mapping.setdefault("software", {"torch": ".".join(line["versions"]["torch"].split(".")[:2])})
    return predict(measurable(Workload.from_mapping(mapping)))


def main() -> int:
    """Print a line for each measured evaluation."""
    for path in RECORDS:
        for line in everyday_cases.lines(path):
            measured = (line.get("evaluation") or {}).get("seconds")
            if measured is None:
                continue
            found = predicted(line)
            assert found.evaluation is not None and found.evaluation.seconds is not None
            seconds = found.evaluation.seconds + (found.evaluation.first_extra_seconds or 0.0)
            held_out = "held out" if line["held_out"] else "tuning"
            gathered = found.memory.components.as_dict().get(GATHERED, 0) / 1e9
            figures = f"{gathered:6.2f} GB {seconds:7.3f} s {measured:7.3f} s {seconds / measured - 1:+7.1%}"
            print(f"{line['name']:38} {held_out:9} {figures}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
