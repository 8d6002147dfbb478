"""Comparison with other tools: each on the rows it gave an answer for, beside our predictions of the same rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import run_rivals
from outcomes import FIGURES, Run
from rivals import Said
from tables import STATISTICS, errors, statistics, table

US = "trainatomy"
NOT_ASKED = ("H100", "fresh")
"""Sets that the tools were not run on: a repetition on another GPU, and rows that were added later."""
REASONS = 4
"""Number of reasons for missing answers to list, the most frequent first."""
NOTE = """\
Each tool is compared with the figure that it estimates, on the rows for which it gives an estimate. A refusal or an
exception counts as no answer. The line below each tool is trainatomy's prediction of the same rows and figure."""


@dataclass(frozen=True, slots=True)
class Contender:
    """A line of the table: tool, figure, rows that it was run on, and the errors of those it answered."""

    name: str
    figure: str
    asked: int
    errors: Sequence[float]


def contenders(run: Run, said: Sequence[Said] | None = None) -> list[Contender]:
    """Return trainatomy's three figures over all rows, then each tool, followed by trainatomy on the same rows."""
    rows = {one.name: one for one in run.outcomes if one.set not in NOT_ASKED}
    found = [Contender(US, figure, len(rows), errors(rows.values(), figure)) for figure in FIGURES]
    for one in run_rivals.kept() if said is None else said:
        figure = one.about.figure
        answered = [rows[name] for name in one.answers if name in rows and rows[name].measured.get(figure)]
        theirs = [
            (one.answers[row.name] - measured) / measured for row in answered if (measured := row.measured[figure])
        ]
        found.append(Contender(one.about.tool, figure, len(rows), theirs))
        found.append(Contender(f"{US}, same rows", figure, len(answered), errors(answered, figure)))
    return found


def comparison(run: Run, said: Sequence[Said] | None = None) -> list[str]:
    """Return the table as Markdown."""
    rows = [
        (one.name, one.figure, f"{len(one.errors)} of {one.asked}", *statistics(one.errors))
        for one in contenders(run, said)
        if one.errors
    ]
    return table(("", "figure", "answered", *STATISTICS), rows, 2)


def about(said: Sequence[Said] | None = None) -> list[str]:
    """Describe how each tool was run, with versions and date, and why it gave no answer."""
    lines = []
    for one in run_rivals.kept() if said is None else said:
        versions = ", ".join(f"{name} {version}" for name, version in one.versions.items())
        reasons: dict[str, int] = {}
        for problem in one.no_answers.values():
            reason = problem.removeprefix("NoAnswer: ").split(" (")[0].split(". ")[0][:100]
            reasons[reason] = reasons.get(reason, 0) + 1
        most = sorted(reasons.items(), key=lambda item: -item[1])[:REASONS]
        silent = "; ".join(f"{count} × {reason}" for reason, count in most)
        lines.append(f"- **{one.about.tool}** ({versions}; {one.date}): {one.about.how}; {one.seconds:.1f} s a row.")
        lines += [f"  No answer: {silent}."] if silent else []
    return lines
