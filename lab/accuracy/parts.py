"""Tables of components at the peak, measured and predicted, as shares of the measured total."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from outcomes import Outcome
from tables import percent, percentile, table

LIMIT = 0.01
"""Tolerance for the error of a component, as a share of the measured total."""
NOTE = """\
The measured breakdown comes from the allocations recorded on the GPU, not from the prediction. An error is (predicted −
measured) as a share of the measured total."""


def recorded(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Return the rows whose allocations were recorded."""
    return [one for one in outcomes if one.parts]


def by_component(outcomes: Sequence[Outcome]) -> list[str]:
    """Tabulate for each component the rows, the errors, and how many rows are beyond the limit."""
    found: dict[str, list[tuple[float, str]]] = {}
    for one in outcomes:
        for name, gap in one.gaps().items():
            found.setdefault(name, []).append((gap, one.name))
    rows = []
    for name, gaps in found.items():
        sizes = [abs(gap) for gap, _ in gaps]
        worst, row = max(gaps, key=lambda pair: abs(pair[0]))
        beyond = sum(size > LIMIT for size in sizes)
        where = row if worst else ""
        cells = (percent(median(sizes)), percent(percentile(sizes, 0.95)), percent(worst, signed=True), beyond, where)
        rows.append((name.replace("_", " "), len(gaps), *cells))
    return table(("component", "rows", "median", "p95", "worst", f"beyond {LIMIT:.0%}", "worst row"), rows)


def sentence(outcomes: Sequence[Outcome]) -> str:
    """Summarise the comparison in one sentence."""
    within = sum(all(abs(gap) <= LIMIT for gap in one.gaps().values()) for one in outcomes)
    instants = sum(bool(one.same_instant) for one in outcomes)
    return (
        f"In {within} of {len(outcomes)} recorded rows, every component is within {LIMIT:.0%} of the total; "
        f"in {instants}, both peaks are in the same phase of the same step."
    )
