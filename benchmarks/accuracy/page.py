"""The page that says how far predictions are from a GPU: Markdown from a run and from what was measured."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from statistics import median

from outcomes import FIGURES, SETS, Line, Outcome, Run, digest, family
from techniques import PLAIN, TECHNIQUES, techniques

MARK = "<!-- Written by `make accuracy`. -->"
README_MARKS = ("<!-- accuracy: written by `make accuracy` -->", "<!-- end of accuracy -->")
ABOUT = """\
Every row was measured on a GPU and is predicted afresh, without one, by `make accuracy`. An error is (predicted
− measured) / measured; median, 95th percentile and worst are of its absolute value. *Exact* counts predictions
that are right to the byte, *too low* those that promise more room than there is. *Allocated* and *reserved* are
the peaks of PyTorch's allocator, *device* what nvidia-smi shows for the process.

Held-out rows were drawn by a hash of their names ([benchmarks/accuracy](../benchmarks/accuracy/README.md)); the
measured bytes are in [records](../benchmarks/accuracy/records/README.md)."""
DEVICE = """\
Where a row shared the card with others, *device* compares NVML's figure for the process, with what that leaves out
([cards.yaml](../benchmarks/accuracy/records/cards.yaml))."""


def page(run: Run, lines: Sequence[Line]) -> str:
    """The whole page."""
    by_name = {line["name"]: line for line in lines}
    parts = ["# How far predictions are from a GPU", "", MARK, "", *environment(run, lines), "", ABOUT, "", DEVICE]
    for kind, title in SETS.items():
        chosen = [one for one in run.outcomes if one.set == kind]
        if chosen:
            parts += ["", f"## {title}: {counted(chosen)}", "", *summary(chosen)]
            if kind != "notebook":
                parts += ["", "### By family", "", *groups(chosen, lambda one: [family(by_name[one.name])])]
                parts += ["", "### By technique", "", "A row counts under each technique that it uses.", ""]
                order = [PLAIN, *TECHNIQUES]
                parts += groups(chosen, lambda one: techniques(by_name[one.name]["workload"]), order)
    return "\n".join([*parts, "", "## Rows", "", *details(run.outcomes), ""])


def in_readme(text: str, run: Run) -> str:
    """The README's text with the summaries of ``run`` between its two marks."""
    parts: list[str] = []
    for kind, title in SETS.items():
        chosen = [one for one in run.outcomes if one.set == kind]
        parts += [f"{title}, {counted(chosen)}:", "", *summary(chosen), ""] if chosen else []
    before, _, rest = text.partition(README_MARKS[0])
    return (
        before
        + README_MARKS[0]
        + "\n\n"
        + "\n".join(parts)
        + "\n"
        + README_MARKS[1]
        + rest.partition(README_MARKS[1])[2]
    )


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


def errors(outcomes: Iterable[Outcome], figure: str) -> list[float]:
    """The known errors of one figure."""
    return [error for one in outcomes if (error := one.error(figure)) is not None]


def summary(outcomes: Sequence[Outcome]) -> list[str]:
    """A Markdown table: for each figure the rows, median, 95th percentile and worst error, exact and too low."""
    lines = ["| figure | rows | median | p95 | worst | exact | too low |", "|---|---:|---:|---:|---:|---:|---:|"]
    for figure in FIGURES:
        found = errors(outcomes, figure)
        if found:
            sizes = sorted(map(abs, found))
            p95 = sizes[math.ceil(0.95 * len(sizes)) - 1]
            exact, low = sum(error == 0 for error in found), sum(error < 0 for error in found)
            cells = (figure, len(found), *map(percent, (median(sizes), p95, sizes[-1])), exact, low)
            lines.append(f"| {' | '.join(map(str, cells))} |")
    return lines


def groups(
    outcomes: Sequence[Outcome], groups_of: Callable[[Outcome], list[str]], order: Sequence[str] = ()
) -> list[str]:
    """A Markdown table: for each group its rows, and of each figure the median and worst error, and the exact ones."""
    members: dict[str, list[Outcome]] = {name: [] for name in order}
    for one in outcomes:
        for name in groups_of(one):
            members.setdefault(name, []).append(one)
    heads = [text for figure in FIGURES for text in (f"{figure}: median", "worst", "exact")]
    lines = [f"| | rows | {' | '.join(heads)} |", f"|---|{'---:|' * (len(heads) + 1)}"]
    for name, chosen in members.items():
        cells: list[object] = [name, len(chosen)]
        for figure in FIGURES:
            sizes = [abs(error) for error in errors(chosen, figure)]
            cells += [percent(median(sizes)), percent(max(sizes)), sizes.count(0)] if sizes else ["", "", ""]
        if chosen:
            lines.append(f"| {' | '.join(map(str, cells))} |")
    return lines


def details(outcomes: Iterable[Outcome]) -> list[str]:
    """A Markdown table: for each row the measured MiB and the error of each figure."""
    heads = [text for figure in FIGURES for text in (f"{figure} MiB", "error")]
    lines = [f"| row | set | {' | '.join(heads)} | |", f"|---|---|{'---:|' * len(heads)}---|"]
    for one in outcomes:
        cells = []
        for figure in FIGURES:
            measured, error = one.measured[figure], one.error(figure)
            cells.append("" if measured is None else f"{measured / 2**20:.1f}")
            cells.append("" if error is None else "exact" if error == 0 else percent(error, signed=True))
        lines.append(f"| {one.name} | {one.set} | {' | '.join(cells)} | {one.problem} |")
    return lines


def percent(share: float, *, signed: bool = False) -> str:
    """``0.0123`` as ``1.230 %``."""
    return f"{share * 100:{'+' if signed else ''}.3f} %"
