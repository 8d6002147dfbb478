"""Write, read, list and find the records of a folder."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from trainatomy.errors import TrainatomyError
from trainatomy.records.create import KEY_DIGITS, summarize
from trainatomy.records.document import from_document, to_document
from trainatomy.records.folder import Folder
from trainatomy.records.query import EVERYTHING, Query
from trainatomy.records.reference import ENDING, resolve, split_path
from trainatomy.results.record import History, Record, Skipped, Summary

VARIABLE = "TRAINATOMY_RECORDS"
DEFAULT_FOLDER = "trainatomy-records"
_PROBE = ".trainatomy-can-write"


def default_folder() -> str:
    """Return the folder that TRAINATOMY_RECORDS names in the environment, else ``./trainatomy-records``."""
    return os.environ.get(VARIABLE) or DEFAULT_FOLDER


class Store:
    """The records in a folder of any filesystem that fsspec knows: ``runs``, ``s3://bucket/runs``.

    The id of a record is the name of its file.  Files that are damaged or no records are reported by ``history`` and
    otherwise ignored.
    """

    def __init__(self, path: str | os.PathLike[str] | None = None, **options: Any) -> None:
        """Open the store at ``path``.

        Args:
            path: Path or URL (default: ``default_folder()``).
            **options: Further arguments of fsspec's filesystem.

        Raises:
            TrainatomyError: The filesystem is unknown.
            MissingLibrary: The filesystem's library is not installed.
        """
        self.path = os.fspath(path) if path else default_folder()
        self._options = options
        self._folder = Folder(self.path, options)

    def exists(self) -> bool:
        """Return whether the folder exists."""
        return self._folder.exists()

    def check(self) -> None:
        """Check that the folder is writable, before hours of measuring; raise ``TrainatomyError`` if it is not."""
        self._folder.write(_PROBE, b"")
        self._folder.remove(_PROBE)

    def write(self, record: Record) -> str:
        """Write a record atomically and return its path.

        Raises:
            TrainatomyError: The folder cannot be written or the disk is full.  The record is then kept in the folder
                for temporary files, if possible, and the message says so.
        """
        document, name = to_document(record), record.id + ENDING
        try:
            return self._folder.write(name, document)
        except TrainatomyError as error:
            raise TrainatomyError(f"{error}\n{_keep_temporarily(name, document)}") from error

    def read(self, which: str | os.PathLike[str]) -> Record:
        """Return one record.

        Args:
            which: Id, prefix of the id or of the hash in it, path of a file, or ``last``, ``last~1`` (the one before),
                and so on.

        Raises:
            TrainatomyError: There is no such record, several match, or it cannot be read.
        """
        text = os.fspath(which)
        if (path := split_path(text)) is not None:
            folder, name = Folder(path[0], self._options), path[1]
        else:
            folder, name = self._folder, resolve(text, self._ids(), self.path) + ENDING
        content = folder.read(name)
        if content is None:
            raise TrainatomyError(f"There is no file {folder.where(name)}")
        try:
            return self._parsed(name, content)
        except TrainatomyError as error:
            raise TrainatomyError(f"{folder.where(name)}: {error}") from None

    def history(self, query: Query = EVERYTHING) -> History:
        """Return the records that match ``query``, oldest first, and the files that could not be read, with reasons."""
        found, skipped = [], []
        for name, record in self._records(self._ids()):
            if isinstance(record, Record):
                if query.matches(record):
                    found.append(summarize(record, self._folder.where(name)))
            else:
                skipped.append(Skipped(self._folder.where(name), str(record)))
        return History(self.path, query.newest(sorted(found, key=lambda row: (row.created, row.id))), tuple(skipped))

    def list(self, query: Query = EVERYTHING) -> tuple[Summary, ...]:
        """Return the records that match ``query``, oldest first."""
        return self.history(query).records

    def find(self, key: str, group: str = "", repeat: int = 0) -> Record | None:
        """Return the newest record of a requested run (``create.key_of``), or ``None``."""
        mine = [each for each in self._ids() if each.rpartition("-")[2][:KEY_DIGITS] == key[:KEY_DIGITS]]
        found = [record for _, record in self._records(mine) if isinstance(record, Record)]
        same = [record for record in found if (record.key, record.group, record.repeat) == (key, group, repeat)]
        return max(same, key=lambda record: (record.created, record.id), default=None)

    def _ids(self) -> tuple[str, ...]:
        return tuple(name.removesuffix(ENDING) for name in self._folder.names(ENDING))

    def _records(self, ids: Sequence[str]) -> Iterator[tuple[str, Record | Exception]]:
        """Yield each file's name, and its record or the error that reading it raised."""
        for name, content in self._folder.read_all([each + ENDING for each in ids]):
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


def _keep_temporarily(name: str, document: bytes) -> str:
    """Write the document to the folder for temporary files; return a sentence that says where, or that it failed."""
    try:
        folder = Path(tempfile.gettempdir())
        where = Folder(str(folder), {}).write(name, document)
    except (OSError, TrainatomyError):
        return "The record could not be kept in the folder for temporary files either."
    return f"The record was kept as {where}: move it to your records later."
