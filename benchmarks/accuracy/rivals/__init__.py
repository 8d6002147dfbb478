"""Other ways to know a training's memory beforehand, asked about the rows that were measured.

A rival is a module with ``ABOUT`` (an ``About``) and ``answer(line)``, which returns bytes or raises: whatever it
raises counts as no answer.  ``run_rivals.py`` runs them and keeps what they said.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


class NoAnswer(Exception):
    """The rival does not say: why."""


@dataclass(frozen=True, slots=True)
class About:
    """``tool``: what to call it; ``packages``: whose versions are kept; ``figure``: the measured figure that its answer
    is meant to be; ``how``: one sentence on how it was asked; ``needs_gpu``: whether it has to run on a GPU machine."""

    tool: str
    packages: Sequence[str]
    figure: str
    how: str
    needs_gpu: bool = False


@dataclass(frozen=True, slots=True)
class Said:
    """What a rival said of all rows: bytes, or why it did not answer; ``seconds`` for one row in the median."""

    about: About
    date: str
    versions: Mapping[str, str]
    seconds: float
    answers: Mapping[str, int] = field(default_factory=dict)
    no_answers: Mapping[str, str] = field(default_factory=dict)
