"""Resolve a reference to a record: an id, a prefix of one, a prefix of its hash, ``last``, or a path."""

from __future__ import annotations

import re
from collections.abc import Sequence

from trainatomy.errors import TrainatomyError
from trainatomy.workload.nearest import nearest

ENDING = ".json"
_LAST = re.compile(r"last(?:~(\d+))?")
_SHOWN = 8


def split_path(text: str) -> tuple[str, str] | None:
    """Return folder and file name if ``text`` is the path or URL of a file rather than an id."""
    if "/" not in text and not text.endswith(ENDING):
        return None
    folder, slash, name = text.rpartition("/")
    return (folder or slash or ".", name if name.endswith(ENDING) else name + ENDING)


def resolve(text: str, ids: Sequence[str], folder: str) -> str:
    """Return the one of ``ids`` (oldest first) that ``text`` refers to.

    Raises:
        TrainatomyError: None or several match.
    """
    if text in ids:
        return text
    if not ids:
        raise TrainatomyError(f"There is no record {text!r}: {folder} holds none. `trainatomy measure` writes them.")
    if match := _LAST.fullmatch(text):
        return _from_the_end(int(match[1] or 0), ids, folder)
    matches = [each for each in ids if text and (each.startswith(text) or each.rpartition("-")[2].startswith(text))]
    if len(matches) == 1:
        return matches[0]
    if matches:
        older = f" and {len(matches) - _SHOWN} older" if len(matches) > _SHOWN else ""
        shown = ", ".join(matches[-_SHOWN:]) + older
        raise TrainatomyError(f"{text!r} matches {len(matches)} records of {folder}: {shown}. Write more of the id.")
    raise TrainatomyError(
        f"There is no record {text!r} in {folder}{_suggestions(text, ids)}. `trainatomy history` lists them."
    )


def _from_the_end(back: int, ids: Sequence[str], folder: str) -> str:
    if back >= len(ids):
        raise TrainatomyError(f"There is no last~{back}: {folder} has {len(ids)} records.")
    return ids[-1 - back]


def _suggestions(text: str, ids: Sequence[str]) -> str:
    """Return the end of a message with ids of similar spelling, or whose hash is."""
    by_hash = {each.rpartition("-")[2]: each for each in ids}
    close = dict.fromkeys([*nearest(text, ids), *(by_hash[each] for each in nearest(text, by_hash))])
    return f"; the nearest: {', '.join(close)}" if close else ""
