"""Tables of step-time errors: by set and measurement session, by bound, by family, and row by row."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from statistics import median
from typing import NamedTuple

import bounds
import busy
import steps
from outcomes import SETS, Line, Outcome, Run, family
from steps import APART, CLOSE, Step
from tables import percentile, table

NOTE = f"""\
`Prediction.time` with the calibrations that ship, compared with measured steps. The error is (predicted − measured) /
measured; median, 90th percentile (p90) and worst refer to its absolute value. *Order* counts pairs of rows whose
measured times differ by more than {APART:.0%}, and those that are predicted in the right order. *In the interval*
counts measured times within `interval_seconds`, which should hold in 9 of 10 cases.

The timing model predicts a step in the middle of a training, with the CPU running ahead of the GPU. Sessions marked
*synchronised* waited for the GPU after each step, so that the next step's first kernels started late; this lengthens
the measured step and is not predicted. Other load on a shared CPU only ever slows a training down, so *fastest session
of each row* compares with the smallest of a row's times."""
AIM = "| *target, held out* | | *40* | *6 %* | *15 %* | *30 %* | *90 %* | *97 %* | *90 %* |"
HEADS = ("rows", "median", "p90", "worst", f"within {CLOSE:.0%}", "order", "in the interval")
BOUND_TITLES = {"host": "CPU", "arithmetic": "arithmetic", "memory bandwidth": "memory bandwidth"}
FEW = 2
"""Minimum number of rows for counting the order of pairs."""


class Timed(NamedTuple):
    """A row of a set in one measurement session."""

    row: Outcome
    step: Step
    occasion: str

    @property
    def error(self) -> float:
        """Relative error, positive if the prediction is too long."""
        return self.step.seconds / self.step.measured[self.occasion] - 1


def timed(outcomes: Sequence[Outcome]) -> dict[tuple[str, str], list[Timed]]:
    """Return the rows with a measured and a predicted time, by set and session.

    Sets are in the order of the page. In each, the fastest session of each row comes first and the session of the
    row's own record last.
    """
    found: dict[tuple[str, str], list[Timed]] = {}
    for kind in SETS:
        for one in outcomes:
            if one.set == kind and one.step is not None:
                for occasion in one.step.measured:
                    found.setdefault((kind, occasion), []).append(Timed(one, one.step, occasion))
    kinds = list(SETS)
    return dict(sorted(found.items(), key=lambda item: (kinds.index(item[0][0]), item[0][1] != steps.QUICKEST)))


def section(run: Run, lines: Sequence[Line]) -> list[str]:
    """Return the section of the page about time, or nothing if no row has a time."""
    found = timed(run.outcomes)
    if not found:
        return []
    text = ["", "## How long a step takes", "", "![Predicted and measured time of a step](accuracy-time.svg)", "", NOTE]
    text += ["", left_out(run), "", *by_occasion(found, aim=True), "", *about(found), "", *again(run)]
    text += bounds.section(run, found)
    text += busy.section(run)
    text += ["### By what bounds the step", "", *_by_bound(found), "", "### By family", ""]
    return [*text, *_by_family(found, lines)]


def left_out(run: Run) -> str:
    """Say how many rows have no usable time."""
    without = sum(one.step is not None and not one.step.measured for one in run.outcomes)
    failed = sum(one.step is None for one in run.outcomes)
    return (
        f"{without} of {len(run.outcomes)} rows shared the GPU with others while they were measured. Their times are "
        f"not those of the training alone and are left out here; {failed} have no predicted time."
    )


def by_occasion(found: Mapping[tuple[str, str], Sequence[Timed]], *, aim: bool = False) -> list[str]:
    """Tabulate the errors by set and session."""
    rows = [(SETS[kind], steps.title(occasion), *cells(rows)) for (kind, occasion), rows in found.items()]
    text = table(("", "session", *HEADS), rows, 2)
    return [*text, AIM] if aim else text


def cells(rows: Sequence[Timed]) -> list[str]:
    """Return rows, median, p90, worst, share within ``CLOSE``, order of pairs, and share within the interval."""
    sizes = [abs(one.error) for one in rows]
    right, pairs = steps.order([one.step for one in rows], rows[0].occasion)
    inside = sum(one.step.holds(one.occasion) for one in rows)
    values = [str(len(rows)), *map(percent, (median(sizes), percentile(sizes, 0.9), max(sizes)))]
    values.append(_share(sum(size <= CLOSE for size in sizes), len(sizes)))
    return [*values, f"{right} of {pairs}" if len(rows) >= FEW else "–", _share(inside, len(rows))]


def about(found: Mapping[tuple[str, str], Sequence[Timed]]) -> list[str]:
    """Tabulate how steps were timed in each session, and the load on its CPU."""
    known = steps.occasions()
    rows = []
    for occasion in dict.fromkeys(occasion for _, occasion in found if occasion != steps.QUICKEST):
        one = known.get(occasion, {})
        rows.append((steps.title(occasion), occasion, one.get("how", ""), one.get("host", "")))
    return table(("session", "date", "how steps were timed", "CPU load"), rows, 4)


def again(run: Run) -> list[str]:
    """Compare the times of the same rows in two sessions, for each pair of sessions that shares rows."""
    ratios: dict[tuple[str, str], list[float]] = {}
    for one in run.outcomes:
        known = one.step.measured.items() if one.step else ()
        measured = [(occasion, seconds) for occasion, seconds in known if occasion != steps.QUICKEST]
        for (before, first), (after, second) in pairwise(measured):
            ratios.setdefault((before, after), []).append(second / first)
    text = []
    for (before, after), found in ratios.items():
        text += [
            f"The same {len(found)} rows took {median(found):.2f} times as long ({min(found):.2f} to {max(found):.2f}) "
            f"in the session “{steps.title(after)}” as in “{steps.title(before)}”; both have the same prediction.",
            "",
        ]
    return text


def _by_bound(found: Mapping[tuple[str, str], Sequence[Timed]]) -> list[str]:
    """Tabulate the errors by set, session and predicted bound."""
    rows = []
    for (kind, occasion), members in found.items():
        bounds = Counter(one.step.bound_by for one in members)
        for bound, _ in bounds.most_common():
            chosen = [one for one in members if one.step.bound_by == bound]
            rows.append((SETS[kind], steps.title(occasion), BOUND_TITLES[bound], *cells(chosen)))
    return table(("", "session", "bound by", *HEADS), rows, 3)


def _by_family(found: Mapping[tuple[str, str], Sequence[Timed]], lines: Sequence[Line]) -> list[str]:
    """Tabulate the errors of the held-out rows by model family and session."""
    by_name = {line["name"]: line for line in lines}
    rows = []
    for (kind, occasion), members in found.items():
        if kind != "held out":
            continue
        for name, chosen in _grouped(members, lambda one: family(by_name[one.row.name])).items():
            rows.append((name, steps.title(occasion), *cells(chosen)))
    rows.sort(key=lambda row: row[0].lower())
    return table(("held out", "session", *HEADS), rows, 2)


def _grouped(members: Sequence[Timed], name_of: Callable[[Timed], str]) -> dict[str, list[Timed]]:
    groups: dict[str, list[Timed]] = {}
    for one in members:
        groups.setdefault(name_of(one), []).append(one)
    return groups


def details(run: Run) -> list[str]:
    """Tabulate every row in every session: measured and predicted milliseconds, error, interval, bound."""
    rows = []
    for (kind, occasion), members in timed(run.outcomes).items():
        for row, step, _ in members:
            low, high = step.interval_seconds
            rows.append(
                (
                    row.name,
                    kind,
                    steps.title(occasion),
                    BOUND_TITLES[step.bound_by],
                    f"{1e3 * step.measured[occasion]:.1f}",
                    f"{1e3 * step.seconds:.1f}",
                    f"{100 * (step.error(occasion) or 0):+.1f} %",
                    f"{1e3 * low:.1f} – {1e3 * high:.1f}" + ("" if step.holds(occasion) else " **(outside)**"),
                    f"{1e3 * step.host_seconds:.1f}",
                    f"{1e3 * step.gpu_seconds:.1f}",
                )
            )
    heads = ("measured ms", "predicted ms", "error", "interval ms", "CPU ms", "GPU ms")
    return table(("row", "set", "session", "bound by", *heads), rows, 4)


def percent(share: float) -> str:
    """Format ``0.0123`` as ``1.2 %``."""
    return f"{100 * share:.1f} %"


def _share(count: int, of: int) -> str:
    return f"{count} of {of}"
