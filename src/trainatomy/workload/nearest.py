"""Suggestions for misspelt names."""

from __future__ import annotations

from difflib import get_close_matches
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


def nearest(name: str, known: Iterable[str], limit: int = 3) -> list[str]:
    """Return up to ``limit`` of the ``known`` names that are spelt like ``name``; case and hyphens do not count."""
    folded = {_fold(each): each for each in reversed(list(known))}
    return [folded[match] for match in get_close_matches(_fold(name), folded, n=limit, cutoff=0.6)]


def suggestion(name: str, known: Iterable[str]) -> str:
    """Return the end of a message about an unknown name: the nearest names, all if they are few, or nothing."""
    names = list(known)
    if close := nearest(name, names):
        return f"; did you mean {_either(close)}?"
    return f"; known: {', '.join(names)}" if 0 < len(names) <= 12 else ""


def _either(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} or {names[-1]}"


def _fold(name: str) -> str:
    return name.casefold().replace("-", "_")
