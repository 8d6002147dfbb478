"""The page that says how far predictions are from a GPU: Markdown from a run and from what was measured."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import parts
import rivalry
import step_tables
import verdicts
from outcomes import FIGURES, SETS, Line, Outcome, Run, digest, family
from tables import details, errors, groups, statistics, summary, table
from techniques import PLAIN, TECHNIQUES, techniques

MARK = "<!-- Written by `make accuracy`. -->"
README_MARKS = ("<!-- accuracy: written by `make accuracy` -->", "<!-- end of accuracy -->")
ABOUT = """\
Every row was measured on a GPU and is predicted afresh, without one, by `make accuracy`. An error is (predicted
− measured) / measured; median, 95th percentile and worst are of its absolute value. *Exact* counts predictions
that are right to the byte, *too low* those that promise more room than there is, *by at most* the worst of these.
*Allocated* and *reserved* are the peaks of PyTorch's allocator, *device* what nvidia-smi shows for the process.

Held-out rows were drawn by a hash of their names ([benchmarks/accuracy](../benchmarks/accuracy/README.md)); the
measured bytes are in [records](../benchmarks/accuracy/records/README.md)."""
DEVICE = """\
Where a row shared the card with others, *device* compares NVML's figure for the process, with what that leaves out
([cards.yaml](../benchmarks/accuracy/records/cards.yaml))."""


def page(run: Run, lines: Sequence[Line]) -> str:
    """The whole page."""
    text = ["# How far predictions are from a GPU", "", MARK, "", *environment(run, lines), "", ABOUT, "", DEVICE, ""]
    text += ["![Errors by tool, family and technique](accuracy.svg)", "", *_beside(run), *_walls(), *_components(run)]
    text += step_tables.section(run, lines)
    by_name = {line["name"]: line for line in lines}
    for kind, title in SETS.items():
        chosen = [one for one in run.outcomes if one.set == kind]
        if chosen:
            text += ["", f"## {title}: {counted(chosen)}", "", *summary(chosen)]
            if kind != "notebook":
                text += ["", "### By family", "", *groups(chosen, lambda one: [family(by_name[one.name])])]
                text += ["", "### By technique", "", "A row counts under each technique that it uses.", ""]
                order = [PLAIN, *TECHNIQUES]
                text += groups(chosen, lambda one: techniques(by_name[one.name]["workload"]), order)
    text += ["", "## Rows", "", *details(run.outcomes)]
    text += ["", "## Steps", "", *step_tables.details(run)]
    walls = verdicts.read()
    text += ["", "## Runs at the wall", "", *verdicts.details(walls)] if walls else []
    return "\n".join([*text, ""])


def _beside(run: Run) -> list[str]:
    return ["## Beside other tools", "", rivalry.NOTE, "", *rivalry.comparison(run), "", *rivalry.about()]


def _walls() -> list[str]:
    walls = verdicts.read()
    if not walls:
        return []
    text = ["", "## Does it fit", "", verdicts.sentence(walls), "", verdicts.NOTE, "", *verdicts.by_size(walls)]
    return [*text, "", "Every run is [below](#runs-at-the-wall)."]


def _components(run: Run) -> list[str]:
    recorded = parts.recorded(run.outcomes)
    if not recorded:
        return []
    return [
        "",
        "## Component by component",
        "",
        parts.sentence(recorded),
        parts.NOTE,
        "",
        *parts.by_component(recorded),
    ]


def in_readme(text: str, run: Run) -> str:
    """The README's text with the figure and the tables of ``run`` between its two marks."""
    walls, recorded = verdicts.read(), parts.recorded(run.outcomes)
    found = ["![Errors by tool, family and technique](docs/accuracy.svg)", "", *by_set(run), ""]
    found += ["Other tools on the same rows, each for the figure that it speaks of:", "", *rivalry.comparison(run), ""]
    found += [verdicts.sentence(walls), ""] if walls else []
    found += [parts.sentence(recorded), ""] if recorded else []
    if timed := step_tables.timed(run.outcomes):
        found += [
            "How long a step takes, predicted beside measured; a training has one prediction for all its occasions:",
            "",
        ]
        found += ["![Predicted and measured time of a step](docs/accuracy-time.svg)", ""]
        found += [*step_tables.by_occasion(timed, aim=True), ""]
    before, _, rest = text.partition(README_MARKS[0])
    after = rest.partition(README_MARKS[1])[2]
    return before + README_MARKS[0] + "\n\n" + "\n".join(found) + "\n" + README_MARKS[1] + after


def by_set(run: Run) -> list[str]:
    """One table: for each set of rows and each figure, the errors."""
    rows = []
    for kind, title in SETS.items():
        chosen = [one for one in run.outcomes if one.set == kind]
        for figure in FIGURES:
            if found := errors(chosen, figure):
                cells = (len(found), *statistics(found)[:4], found.count(0))
                rows.append((title if figure == FIGURES[0] else "", figure, *cells))
    return table(("", "", "rows", "median", "p95", "worst", "too low", "exact"), rows, 2)


def counted(outcomes: Sequence[Outcome]) -> str:
    """``54 rows``, and how many have a problem."""
    failed = sum(bool(one.problem) for one in outcomes)
    return f"{len(outcomes)} rows" + (f", {failed} with a problem" if failed else "")


def environment(run: Run, lines: Sequence[Line]) -> list[str]:
    """Where and with what was measured and predicted."""
    places = Counter(f"{line['gpu']}, driver {line['driver']}, {line['date']}" for line in lines)
    versions: dict[str, set[str]] = {}
    for line in lines:
        for name, version in line["versions"].items():
            versions.setdefault(name, set()).add(version)
    measured = ", ".join(f"{name} {'/'.join(sorted(found))}" for name, found in versions.items())
    predicted = ", ".join(f"{name} {version}" for name, version in run.predicted_with.items())
    return [
        *(f"- Measured: {count} rows on {place}." for place, count in sorted(places.items())),
        f"- Measured with {measured}.",
        f"- Predicted without a GPU with {predicted}, for the version of PyTorch that was measured.",
        f"- Digest of the measured rows: `{digest(lines)}`.",
    ]
