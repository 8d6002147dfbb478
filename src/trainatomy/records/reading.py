"""Records in Python: a history, one record, the difference between two."""

from __future__ import annotations

import os

from trainatomy.records.difference import difference
from trainatomy.records.query import Query
from trainatomy.records.store import Store
from trainatomy.results.difference import Difference
from trainatomy.results.record import History, Record

Path = str | os.PathLike[str]


def history(path: Path | None = None, **conditions: object) -> History:
    """The records in a folder, oldest first, with the files that could not be read.

    ``path``: any that fsspec knows; without one the environment's TRAINATOMY_RECORDS, or ``./trainatomy-records``.
    ``conditions``: those of ``trainatomy.records.query.Query``, such as ``gpu="h200"``, ``last=10``,
    ``where=("train.bf16=true",)``.
    """
    return Store(path).history(Query(**conditions))  # type: ignore[arg-type]


def read_record(which: Path, path: Path | None = None) -> Record:
    """One record of the folder ``path``: by id, by the beginning of its id or of the hash in it, as ``last``; or by the
    path of its file.  Raises ``TrainatomyError``."""
    return Store(path).read(which)


def diff(a: Record | Path, b: Record | Path, path: Path | None = None) -> Difference:
    """What changed from record ``a`` to ``b`` and which component it went to; records, or what ``read_record``
    takes."""
    first, second = (each if isinstance(each, Record) else read_record(each, path) for each in (a, b))
    return difference(first, second)
