"""Tables of memory errors in Markdown: of a set of rows, of its groups, and row by row."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from statistics import median

from outcomes import FIGURES, Outcome


def errors(outcomes: Iterable[Outcome], figure: str) -> list[float]:
    """Return the known errors of one figure."""
    return [error for one in outcomes if (error := one.error(figure)) is not None]


def percentile(sizes: Iterable[float], share: float) -> float:
    """Return the smallest value that at least ``share`` of the values do not exceed."""
    ordered = sorted(sizes)
    return ordered[math.ceil(share * len(ordered)) - 1]


def statistics(found: Sequence[float]) -> list[str]:
    """Return median, p95 and worst of the absolute errors, how many are too low, and the worst of those."""
    sizes = [abs(error) for error in found]
    low = [error for error in found if error < 0]
    lowest = percent(min(low), signed=True) if low else "–"
    return [percent(median(sizes)), percent(percentile(sizes, 0.95)), percent(max(sizes)), str(len(low)), lowest]


STATISTICS = ("median", "p95", "worst", "too low", "by at most")


def table(heads: Sequence[str], rows: Iterable[Sequence[object]], left: int = 1) -> list[str]:
    """Format a Markdown table whose first ``left`` columns are text."""
    rule = "---|" * left + "---:|" * (len(heads) - left)
    return [f"| {' | '.join(heads)} |", f"|{rule}", *(f"| {' | '.join(map(str, row))} |" for row in rows)]


def summary(outcomes: Sequence[Outcome]) -> list[str]:
    """Tabulate the errors by figure, with the number of exact predictions."""
    rows = [
        (figure, len(found), *statistics(found), found.count(0))
        for figure in FIGURES
        if (found := errors(outcomes, figure))
    ]
    return table(("figure", "rows", *STATISTICS, "exact"), rows)


def groups(
    outcomes: Sequence[Outcome], groups_of: Callable[[Outcome], list[str]], order: Sequence[str] = ()
) -> list[str]:
    """Tabulate the errors of each figure by group."""
    members: dict[str, list[Outcome]] = {name: [] for name in order}
    for one in outcomes:
        for name in groups_of(one):
            members.setdefault(name, []).append(one)
    heads = [text for figure in FIGURES for text in (f"{figure}: median", "p95", "worst", "too low")]
    rows = []
    for name, chosen in members.items():
        cells: list[object] = [name, len(chosen)]
        for figure in FIGURES:
            found = errors(chosen, figure)
            cells += statistics(found)[:4] if found else [""] * 4
        if chosen:
            rows.append(cells)
    return table(("", "rows", *heads), rows)


def details(outcomes: Iterable[Outcome]) -> list[str]:
    """Tabulate the measured MiB and the error of each figure, row by row."""
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
    """Format ``0.0123`` as ``1.230 %``."""
    return f"{share * 100:{'+' if signed else ''}.3f} %"
