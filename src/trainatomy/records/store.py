"""The store: a folder of records."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from trainatomy.errors import TrainatomyError
from trainatomy.records.document import from_document, to_document
from trainatomy.records.make import KEY_DIGITS
from trainatomy.records.place import Place
from trainatomy.records.query import EVERYTHING, Query
from trainatomy.records.reference import ENDING, resolve, split_path
from trainatomy.records.summary import summary_of
from trainatomy.results.record import History, Record, Skipped, Summary

VARIABLE = "TRAINATOMY_RECORDS"
FOLDER = "trainatomy-records"
_PROBE = ".trainatomy-can-write"


def default_folder() -> str:
    """What the environment's TRAINATOMY_RECORDS names, else ``./trainatomy-records``."""
    return os.environ.get(VARIABLE) or FOLDER


class Store:
    """Records in a folder of any filesystem that fsspec knows: ``runs``, ``s3://bucket/runs``.

    The id of a record is the name of its file.  A file that is no record, or a damaged one, is in nobody's way: it is
    named by ``history`` and otherwise left alone.
    """

    def __init__(self, path: str | os.PathLike[str] | None = None, **options: Any) -> None:
        """``path``: ``default_folder()`` unless given; ``options``: what fsspec's filesystem takes besides.

        Raises ``TrainatomyError`` for a filesystem that is not known, ``MissingLibrary`` for one that is not installed.
        """
        self.path = os.fspath(path) if path else default_folder()
        self._options = options
        self._place = Place(self.path, options)

    def exists(self) -> bool:
        """Whether the folder is there."""
        return self._place.exists()

    def check(self) -> None:
        """Write and remove an empty file, before hours of measuring; raises ``TrainatomyError`` where that fails."""
        self._place.write(_PROBE, b"")
        self._place.remove(_PROBE)

    def write(self, record: Record) -> str:
        """Write a record, whole or not at all, and return where it is.

        Raises ``TrainatomyError`` where the folder cannot be written or the disk is full; the record is then kept in
        the folder for temporary files if that can be done, and the message says so.
        """
        document, name = to_document(record), record.id + ENDING
        try:
            return self._place.write(name, document)
        except TrainatomyError as error:
            raise TrainatomyError(f"{error}\n{_rescued(name, document)}") from error

    def read(self, which: str | os.PathLike[str]) -> Record:
        """One record: by its id, by the beginning of its id or of the hash in it, by the path of its file, or ``last``,
        ``last~1`` (the one before), and so on.

        Raises ``TrainatomyError``: no such record (with the nearest ids), several that it may be, not readable.
        """
        text = os.fspath(which)
        if (path := split_path(text)) is not None:
            place, name = Place(path[0], self._options), path[1]
        else:
            place, name = self._place, resolve(text, self._ids(), self.path) + ENDING
        content = place.read(name)
        if content is None:
            raise TrainatomyError(f"There is no file {place.where(name)}")
        try:
            return self._parsed(name, content)
        except TrainatomyError as error:
            raise TrainatomyError(f"{place.where(name)}: {error}") from None

    def history(self, query: Query = EVERYTHING) -> History:
        """What ``query`` asks for, oldest first, and the files that could not be read, with the reason of each."""
        found, skipped = [], []
        for name, record in self._records(self._ids()):
            if isinstance(record, Record):
                if query.wants(record):
                    found.append(summary_of(record, self._place.where(name)))
            else:
                skipped.append(Skipped(self._place.where(name), str(record)))
        return History(self.path, query.newest(sorted(found, key=lambda row: (row.created, row.id))), tuple(skipped))

    def list(self, query: Query = EVERYTHING) -> tuple[Summary, ...]:
        """The records of ``history``, oldest first."""
        return self.history(query).records

    def find(self, key: str, group: str = "", repeat: int = 0) -> Record | None:
        """The newest record of what was asked for (``records.key.key_of``), or ``None``."""
        mine = [each for each in self._ids() if each.rpartition("-")[2][:KEY_DIGITS] == key[:KEY_DIGITS]]
        found = [record for _, record in self._records(mine) if isinstance(record, Record)]
        same = [record for record in found if (record.key, record.group, record.repeat) == (key, group, repeat)]
        return max(same, key=lambda record: (record.created, record.id), default=None)

    def _ids(self) -> tuple[str, ...]:
        return tuple(name.removesuffix(ENDING) for name in self._place.names(ENDING))

    def _records(self, ids: Sequence[str]) -> Iterator[tuple[str, Record | Exception]]:
        """The file's name, and the record in it or what is the matter with it."""
        for name, content in self._place.read_all([each + ENDING for each in ids]):
            if isinstance(content, Exception):
                yield name, TrainatomyError(f"could not be read: {content}")
                continue
            try:
                yield name, self._parsed(name, content)
            except TrainatomyError as error:
                yield name, error

    @staticmethod
    def _parsed(name: str, content: bytes) -> Record:
        return replace(from_document(content), id=name.removesuffix(ENDING))


def _rescued(name: str, document: bytes) -> str:
    """Keep what was measured where there is room for it; says where, or that there is none."""
    try:
        folder = Path(tempfile.gettempdir())
        where = Place(str(folder), {}).write(name, document)
    except (OSError, TrainatomyError):
        return "Nor could the record be kept in the folder for temporary files."
    return f"The record was kept as {where}: move it to your records later."
