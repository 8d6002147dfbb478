"""Which record is meant: by id, by the beginning of one, by the hash in it, by ``last``, or by a path."""

from __future__ import annotations

import re
from collections.abc import Sequence

from trainatomy.errors import TrainatomyError
from trainatomy.workload.nearest import nearest

ENDING = ".json"
_LAST = re.compile(r"last(?:~(\d+))?")
_SHOWN = 8


def split_path(text: str) -> tuple[str, str] | None:
    """Folder and file name, if ``text`` is the path or URL of a file rather than an id."""
    if "/" not in text and not text.endswith(ENDING):
        return None
    folder, slash, name = text.rpartition("/")
    return (folder or slash or ".", name if name.endswith(ENDING) else name + ENDING)


def resolve(text: str, ids: Sequence[str], folder: str) -> str:
    """The one of ``ids`` (in order, oldest first) that is meant; raises ``TrainatomyError`` for none or several."""
    if text in ids:
        return text
    if not ids:
        raise TrainatomyError(f"There is no record {text!r}: {folder} holds none. `trainatomy measure` writes them.")
    if match := _LAST.fullmatch(text):
        return _counted_from_the_end(int(match[1] or 0), ids, folder)
    meant = [each for each in ids if text and (each.startswith(text) or each.rpartition("-")[2].startswith(text))]
    if len(meant) == 1:
        return meant[0]
    if meant:
        shown = ", ".join(meant[-_SHOWN:]) + (f" and {len(meant) - _SHOWN} older" if len(meant) > _SHOWN else "")
        raise TrainatomyError(
            f"{text!r} may be any of {len(meant)} records of {folder}: {shown}. Write more of the id."
        )
    raise TrainatomyError(
        f"There is no record {text!r} in {folder}{_near(text, ids)}. `trainatomy history` lists them."
    )


def _counted_from_the_end(back: int, ids: Sequence[str], folder: str) -> str:
    if back >= len(ids):
        raise TrainatomyError(f"last~{back} lies before the first of the {len(ids)} records of {folder}.")
    return ids[-1 - back]


def _near(text: str, ids: Sequence[str]) -> str:
    """Ids spelt like it, and ids whose hash is, as the end of a message."""
    by_hash = {each.rpartition("-")[2]: each for each in ids}
    close = dict.fromkeys([*nearest(text, ids), *(by_hash[each] for each in nearest(text, by_hash))])
    return f"; the nearest: {', '.join(close)}" if close else ""
