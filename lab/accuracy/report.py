"""Compare predictions with measurements: ``python lab/accuracy/report.py [MEASURED.jsonl ...]``.

Every measured row is predicted again, without a GPU.  Without arguments the shipped records are used: the run is kept
in errors.json, lab/pages/one-gpu.md, its figures and the README's table are written from it, and changes since the
last run are printed (``make accuracy``).  A row that cannot be predicted stays in the tables.

``--check`` fails where the median or the worst error of a set exceeds ``limits.yaml``; ``--accept`` rewrites that file.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import figure
import limits
import outcomes
import page
import step_figure
import steps
import tables
from grid import HERE
from outcomes import RECORDS, Line, Run

ERRORS = HERE / "errors.json"
PAGE = HERE.parent / "pages" / "one-gpu.md"
FIGURE, STEP_FIGURE = PAGE.with_name("accuracy.svg"), PAGE.with_name("accuracy-time.svg")
README = HERE.parents[1] / "README.md"
NO_ROWS = ("walls-", "steps-")
"""Prefixes of record files that do not hold rows."""
SETS = {
    "tuning": "tuning",
    "heldout": "held out",
    "notebook": "notebook",
    "unseen": "unseen",
    "fresh": "fresh",
    "h100": "H100",
}


def shipped() -> list[Line]:
    """Return the shipped records, in the order of the page."""
    order = list(outcomes.SETS)
    files = [path for path in sorted(RECORDS.glob("*.jsonl")) if not path.name.startswith(NO_ROWS)]
    lines = steps.with_other_occasions(outcomes.read_records(files), outcomes.set_of)
    return sorted(lines, key=lambda line: order.index(outcomes.set_of(line)))


def predict(lines: list[Line], gpu: str, jobs: int) -> Run:
    """Predict every line and print each result at once."""
    found, began = [], time.perf_counter()
    for one in outcomes.predict_all(lines, gpu, jobs):
        found.append(one)
        print(*tables.details([one])[2:], f"{one.seconds:.1f} s", file=sys.stderr, flush=True)
    print(f"{len(found)} rows in {time.perf_counter() - began:.0f} s", file=sys.stderr)
    return Run(outcomes.software(), outcomes.digest(lines), found)


def keep(run: Run, lines: list[Line]) -> None:
    """Write errors.json and the page; print what changed since the errors.json before."""
    before = outcomes.read(ERRORS) if ERRORS.exists() else None
    outcomes.write(run, ERRORS)
    publish(run, lines)
    if before:
        found = outcomes.changes(before, run)
        print(f"{len(found)} figures changed since the last run", *found, sep="\n  ")


def publish(run: Run, lines: list[Line]) -> None:
    """Write the page, its figures and the README's tables from a run."""
    FIGURE.write_bytes(figure.draw(run, lines))
    STEP_FIGURE.write_bytes(step_figure.draw(run))
    PAGE.write_text(page.page(run, lines), encoding="utf-8")
    README.write_text(page.in_readme(README.read_text(encoding="utf-8"), run), encoding="utf-8")


def options() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("measured", type=Path, nargs="*", help="measured.jsonl, from measure_grid.py")
    parser.add_argument("--only", choices=tuple(SETS))
    parser.add_argument("--names", help="rows, separated by commas")
    parser.add_argument("--gpu", default="", help="the GPU that was measured (default: by records/cards.yaml)")
    parser.add_argument("--jobs", type=int, default=2, help="processes that predict (default: 2)")
    parser.add_argument("--out", type=Path, help="write the page here, and keep nothing")
    parser.add_argument("--page-only", action="store_true", help="write the page from errors.json again")
    parser.add_argument("--check", action="store_true", help="fail where errors grew beyond limits.yaml")
    parser.add_argument("--accept", action="store_true", help="write limits.yaml from the errors of this run")
    return parser.parse_args()


def main() -> int:
    """Predict, print and write; return 1 where a row could not be predicted or, with ``--check``, errors grew."""
    asked = options()
    lines = outcomes.read_records(asked.measured) if asked.measured else shipped()
    if asked.page_only:
        run = outcomes.read(ERRORS)
        publish(run, lines)
        return judge(run, asked)
    names = asked.names.split(",") if asked.names else None
    chosen = [
        line
        for line in lines
        if (names is None or line["name"] in names)
        and (asked.only is None or outcomes.set_of(line) == SETS[asked.only])
    ]
    run = predict(chosen, asked.gpu, asked.jobs)
    if asked.out:
        asked.out.write_text(page.page(run, chosen), encoding="utf-8")
    elif not asked.measured and chosen == lines:
        keep(run, lines)
        return judge(run, asked)
    else:
        print(page.page(run, chosen))
    return int(any(not one.predicted for one in run.outcomes))


def judge(run: Run, asked: argparse.Namespace) -> int:
    """Accept the run's errors, or check them against the limits."""
    if asked.accept:
        limits.write(run)
    found = limits.violations(run, limits.read()) if asked.check else []
    print(*found, sep="\n", file=sys.stderr)
    return int(bool(found) or any(not one.predicted for one in run.outcomes))


if __name__ == "__main__":
    sys.exit(main())
