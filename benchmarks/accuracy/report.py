"""Predicted beside measured: ``python benchmarks/accuracy/report.py MEASURED.jsonl [--only heldout]``.

Every measured row is predicted afresh, without a GPU.  An error is (predicted - measured) / measured; the summary gives
median, 95th percentile and worst of its absolute value, and how many predictions were too low.  A row that cannot be
predicted is a row of its own, never left out.  ``device`` compares only rows measured with the card to themselves, or
whose process NVML could tell apart.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import grid

from trainatomy import api

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from trainatomy.results.bill import Memory
    from trainatomy.workload.schema import Workload

FIGURES = ("allocated", "reserved", "device")
MEASURED_KEYS = {"allocated": "peak_allocated_bytes", "reserved": "peak_reserved_bytes", "device": "device_bytes"}


@dataclass(frozen=True, slots=True)
class Outcome:
    """One row: bytes predicted and measured by figure (``None``: not known), or the error that prediction ended in."""

    name: str
    held_out: bool
    predicted: dict[str, int | None]
    measured: dict[str, int | None]
    seconds: float
    problem: str = ""

    def error(self, figure: str) -> float | None:
        """The relative error, positive where the prediction is too high."""
        predicted, measured = self.predicted.get(figure), self.measured.get(figure)
        return None if predicted is None or not measured else (predicted - measured) / measured


def outcome(line: dict[str, Any], card: str) -> Outcome:
    """Predict the training of a measured line on ``card`` with the software that it was measured with."""
    measured = {figure: line[key] for figure, key in MEASURED_KEYS.items()}
    began = time.perf_counter()
    try:
        memory = api.predict(workload_of(line, card)).memory
        predicted, problem = figures(memory), ""
    except Exception as error:
        predicted, problem = {}, f"{type(error).__name__}: {error}".splitlines()[0]
    if line["status"] != "completed":
        problem = problem or line["status"]
    return Outcome(line["name"], line["held_out"], predicted, measured, time.perf_counter() - began, problem)


def workload_of(line: dict[str, Any], card: str) -> Workload:
    """The measured training, with the card and the version of PyTorch that it ran on."""
    row = grid.Row(line["name"], line["family"], line["workload"], line["alone"], line["held_out"])
    software = {"torch": line["versions"]["torch"].split("+")[0]}
    return replace(row, mapping={**row.mapping, "gpu": card, "software": software}).workload()


def figures(memory: Memory) -> dict[str, int | None]:
    """The predicted bytes of each figure."""
    return {
        "allocated": memory.peak_allocated_bytes,
        "reserved": memory.peak_reserved_bytes,
        "device": memory.device_bytes,
    }


def summary(outcomes: Sequence[Outcome]) -> list[str]:
    """A Markdown table: for each figure the rows, median, 95th percentile and worst error, exact and too low."""
    lines = ["| figure | rows | median | p95 | worst | exact | too low |", "|---|---:|---:|---:|---:|---:|---:|"]
    for figure in FIGURES:
        errors = [error for one in outcomes if (error := one.error(figure)) is not None]
        if errors:
            sizes = sorted(map(abs, errors))
            p95 = sizes[math.ceil(0.95 * len(sizes)) - 1]
            exact, low = sum(error == 0 for error in errors), sum(error < 0 for error in errors)
            cells = (figure, len(errors), *map(percent, (median(sizes), p95, sizes[-1])), exact, low)
            lines.append(f"| {' | '.join(map(str, cells))} |")
    return lines


def details(outcomes: Iterable[Outcome]) -> list[str]:
    """A Markdown table: for each row the measured MiB and the error of each figure."""
    heads = [text for figure in FIGURES for text in (f"{figure} MiB", "error")]
    lines = [f"| row | held out | {' | '.join(heads)} | s | |", f"|---|---|{'---:|' * len(heads)}---:|---|"]
    for one in outcomes:
        cells = []
        for figure in FIGURES:
            measured, error = one.measured[figure], one.error(figure)
            cells += [
                "" if measured is None else f"{measured / 2**20:.1f}",
                "" if error is None else percent(error, signed=True),
            ]
        held_out = "yes" if one.held_out else ""
        lines.append(f"| {one.name} | {held_out} | {' | '.join(cells)} | {one.seconds:.1f} | {one.problem} |")
    return lines


def percent(share: float, *, signed: bool = False) -> str:
    """``0.0123`` as ``1.230 %``."""
    return f"{share * 100:{'+' if signed else ''}.3f} %"


def document(outcomes: Sequence[Outcome], lines: Sequence[dict[str, Any]]) -> str:
    """The whole report: what was measured on, the two summaries, the rows."""
    places = sorted({f"{line['gpu']}, driver {line['driver']}, {line['date']}" for line in lines})
    software = sorted({", ".join(f"{name} {version}" for name, version in line["versions"].items()) for line in lines})
    parts = [
        "# Predicted and measured",
        "",
        *(f"Measured on {place}." for place in places),
        *(f"{each}." for each in software),
    ]
    for title, chosen in (
        ("Held out", [one for one in outcomes if one.held_out]),
        ("Tuned on", [one for one in outcomes if not one.held_out]),
    ):
        if chosen:
            failed = sum(bool(one.problem) for one in chosen)
            parts += ["", f"## {title}: {len(chosen)} rows, {failed} with a problem", "", *summary(chosen)]
    return "\n".join([*parts, "", "## Rows", "", *details(outcomes), ""])


def main() -> int:
    """Predict, print and write the report; 1 where a row could not be predicted."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("measured", type=Path, nargs="+", help="measured.jsonl, from measure_grid.py")
    parser.add_argument("--only", choices=("tuning", "heldout", "all"), default="all")
    parser.add_argument("--names", help="rows, separated by commas")
    parser.add_argument("--gpu", default="h200", help="the card that was measured (default: h200)")
    parser.add_argument("--out", type=Path, help="write the report here")
    options = parser.parse_args()
    lines = [json.loads(text) for path in options.measured for text in path.read_text(encoding="utf-8").splitlines()]
    names = options.names.split(",") if options.names else None
    lines = [
        line
        for line in lines
        if (names is None or line["name"] in names)
        and (options.only == "all" or line["held_out"] == (options.only == "heldout"))
    ]
    outcomes = []
    for line in lines:
        outcomes.append(outcome(line, options.gpu))
        print(*details(outcomes[-1:])[2:], file=sys.stderr, flush=True)
    text = document(outcomes, lines)
    print(text)
    if options.out:
        options.out.write_text(text, encoding="utf-8")
    return int(any(not one.predicted for one in outcomes))


if __name__ == "__main__":
    sys.exit(main())
