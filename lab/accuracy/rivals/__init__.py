"""Other tools that estimate the memory of a training, asked about the measured rows.

Each is a module with ``ABOUT`` (an ``About``) and ``answer(line)``, which returns bytes or raises; any exception counts
as no answer.  ``run_rivals.py`` runs them and keeps the answers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


class NoAnswer(Exception):
    """The tool gives no answer; the message says why."""


@dataclass(frozen=True, slots=True)
class About:
    """A tool that was asked.

    Attributes:
        tool: Its name.
        packages: Packages whose versions are kept.
        figure: The measured figure that its answer estimates.
        how: One sentence on how it was asked.
        needs_gpu: It only runs on a GPU machine.
    """

    tool: str
    packages: Sequence[str]
    figure: str
    how: str
    needs_gpu: bool = False


@dataclass(frozen=True, slots=True)
class Said:
    """A tool's answers for all rows: bytes, or why it did not answer; ``seconds``: median for one row."""

    about: About
    date: str
    versions: Mapping[str, str]
    seconds: float
    answers: Mapping[str, int] = field(default_factory=dict)
    no_answers: Mapping[str, str] = field(default_factory=dict)
