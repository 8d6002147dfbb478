"""Compare the stored predictions with the measured cases: ``python benchmarks/everyday/report.py --gpu h200``.

Writes Markdown to ``--out``, or prints it.  Predictions are those that were stored before the cases were measured;
``--again`` predicts with the code of today instead.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import everyday_cases
import predict as predicting
from everyday_cases import Case

from trainatomy.api import predict
from trainatomy.errors import TrainatomyError

FIGURES = {
    "peak_allocated_bytes": "allocated",
    "peak_reserved_bytes": "reserved",
    "device_bytes": "device",
    "step_seconds": "time",
    "reserved_before_bytes": "reserved before evaluation",
    "evaluation_seconds": "evaluation",
    "first_token_seconds": "first token",
    "token_seconds": "further token",
    "checkpoint_bytes": "disk",
}
TIMES = ("step_seconds", "evaluation_seconds", "first_token_seconds", "token_seconds")
_EXACT = 5e-5


@dataclass(frozen=True, slots=True)
class Outcome:
    """A case as predicted and as measured; figures by their name in ``FIGURES``, None where one is missing."""

    name: str
    kind: str
    held_out: bool
    status: str
    measured: Mapping[str, float | None]
    predicted: Mapping[str, float | None]

    def error(self, figure: str) -> float | None:
        """Return (predicted - measured) / measured; None for a run that did not complete."""
        measured, predicted = self.measured.get(figure), self.predicted.get(figure)
        if self.status != "completed" or not measured or predicted is None:
            return None
        return predicted / measured - 1


def figures_of(line: Mapping[str, Any]) -> dict[str, float | None]:
    """Return the figures of a line of predictions or of records."""
    memory, evaluation = line.get("memory") or {}, line.get("evaluation") or {}
    generation, checkpoint = line.get("generation") or {}, line.get("checkpoint") or {}
    totals = {name: line.get(name, memory.get(name)) for name in FIGURES}
    figures = totals | {
        "reserved_before_bytes": evaluation.get("reserved_before_bytes"),
        "evaluation_seconds": evaluation.get("seconds"),
        "first_token_seconds": generation.get("first_token_seconds"),
        "token_seconds": generation.get("token_seconds"),
        "checkpoint_bytes": sum(checkpoint["files"].values()) if checkpoint else None,
    }
    return figures | dict.fromkeys(TIMES if line.get("shared") else ())


def outcomes(records: Iterable[Mapping[str, Any]], predictions: Mapping[str, Mapping[str, Any]]) -> list[Outcome]:
    """Return the measured cases that have a prediction."""
    return [
        Outcome(
            line["name"],
            line["kind"],
            line["held_out"],
            line["status"],
            figures_of(line),
            figures_of(predictions[line["name"]]),
        )
        for line in records
        if line["name"] in predictions
    ]


def summary(found: Sequence[Outcome]) -> list[str]:
    """Return a table of errors by kind: cases, exact ones, median and worst, of allocated and reserved memory."""
    rows = []
    for kind in sorted({one.kind for one in found}):
        for figure, title in FIGURES.items():
            errors = [abs(error) for one in found if one.kind == kind and (error := one.error(figure)) is not None]
            if errors:
                exact = sum(error < _EXACT for error in errors)
                row = [kind, title, str(len(errors)), str(exact), percent(median(errors)), percent(max(errors))]
                rows.append(row)
    return table(["kind", "figure", "cases", "exact", "median", "worst"], rows)


def details(found: Sequence[Outcome]) -> list[str]:
    """Return a table with the errors of every case."""
    rows = []
    for one in sorted(found, key=lambda each: (each.kind, each.name)):
        errors = [one.error(figure) for figure in FIGURES]
        shown = ["" if error is None else signed(error) for error in errors]
        rows.append([one.kind, one.name, "held out" if one.held_out else "tuning", one.status, *shown])
    return table(["kind", "case", "set", "status", *FIGURES.values()], rows)


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return a table in Markdown."""
    return [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}", *(f"| {' | '.join(row)} |" for row in rows)]


def percent(share: float) -> str:
    """Format the size of an error."""
    return f"{100 * share:.2f} %"


def signed(share: float) -> str:
    """Format an error."""
    return f"{100 * share:+.2f} %".replace("-", "−")


def page(found: Sequence[Outcome], missing: Sequence[str]) -> str:
    """Return the report."""
    text = ["# Evaluation, generation, checkpoints, lengths and quantised weights, predicted and measured", ""]
    text += ["The error is (predicted − measured) / measured.  *Exact* counts errors below 0.005 %.", ""]
    for title, of in (("Held out", True), ("Tuning", False)):
        part = [one for one in found if one.held_out is of]
        if part:
            text += [f"## {title}: {len(part)} cases", "", *summary(part), ""]
    if missing:
        text += [f"Without a prediction: {', '.join(missing)}.", ""]
    return "\n".join([*text, "## Cases", "", *details(found), ""])


def predicted_again(records: Iterable[Mapping[str, Any]], gpu: str) -> dict[str, Mapping[str, Any]]:
    """Predict the measured cases with the code of today, for the release of PyTorch that measured them."""
    found: dict[str, Mapping[str, Any]] = {}
    for line in records:
        case = Case(line["name"], line["kind"], line["workload"])
        try:
            workload = case.workload(gpu).replace("software.torch", line["versions"]["torch"])
            found[case.name] = predicting.line_of(case, predict(workload), "")
        except TrainatomyError as error:
            print(f"{case.name}: {error}", file=sys.stderr)
    return found


def main(arguments: list[str] | None = None) -> int:
    """Write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", default="h200")
    parser.add_argument("--predictions", type=Path)
    parser.add_argument("--records", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--again", action="store_true")
    options = parser.parse_args(arguments)
    records = everyday_cases.lines(options.records or everyday_cases.RECORDS / f"{options.gpu}.jsonl")
    stored = everyday_cases.lines(options.predictions or everyday_cases.PREDICTIONS / f"{options.gpu}.jsonl")
    known: dict[str, Mapping[str, Any]] = {line["name"]: line for line in stored if "error" not in line}
    predictions = predicted_again(records, options.gpu) if options.again else known
    text = page(outcomes(records, predictions), [line["name"] for line in records if line["name"] not in predictions])
    if options.out:
        options.out.write_text(text, encoding="utf-8")
    else:
        print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
