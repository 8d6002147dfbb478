"""Read records from Python: a history, one record, the difference between two."""

from __future__ import annotations

import os

from trainatomy.records.difference import difference
from trainatomy.records.query import Query
from trainatomy.records.store import Store
from trainatomy.results.difference import Difference
from trainatomy.results.record import History, Record

Path = str | os.PathLike[str]


def history(path: Path | None = None, **conditions: object) -> History:
    """Return the records in a folder, oldest first, and the files that could not be read.

    Args:
        path: Path or URL of the folder (default: the environment's TRAINATOMY_RECORDS, or ``./trainatomy-records``).
        **conditions: Attributes of ``trainatomy.records.query.Query``, such as ``gpu="h200"``, ``last=10``,
            ``where=("train.bf16=true",)``.
    """
    return Store(path).history(Query(**conditions))  # type: ignore[arg-type]


def read_record(which: Path, path: Path | None = None) -> Record:
    """Return one record of the folder ``path``.

    Args:
        which: Id, prefix of the id or of the hash in it, ``last``, ``last~1`` and so on, or the path of a file.
        path: As for ``history``.

    Raises:
        TrainatomyError: There is no such record, several match, or it cannot be read.
    """
    return Store(path).read(which)


def diff(a: Record | Path, b: Record | Path, path: Path | None = None) -> Difference:
    """Return what changed from record ``a`` to ``b``, and which memory components changed with it.

    Args:
        a: A record, or a reference as for ``read_record``.
        b: The same.
        path: As for ``history``.
    """
    first, second = (each if isinstance(each, Record) else read_record(each, path) for each in (a, b))
    return difference(first, second)
