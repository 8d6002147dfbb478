"""Write, read, list and find the records of a folder.

Store small files in a folder, local or on any filesystem of fsspec, so that each appears whole or not at all.
"""

from __future__ import annotations

import errno
import os
import secrets
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import fsspec
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

from trainatomy.errors import MissingLibrary, TrainatomyError
from trainatomy.records.create import KEY_DIGITS, from_document, summarize, to_document
from trainatomy.records.query import ENDING, EVERYTHING, Query, resolve, split_path
from trainatomy.results.record import History, Record, Skipped, Summary

ATOMIC_FILESYSTEMS = frozenset({"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "oss", "oci", "memory"})
"""Filesystems on which a file that is written in one call appears only when it is complete."""

_UNFINISHED = ".unfinished"
_ADVICE = {
    errno.ENOSPC: "make room, or name another folder with --records",
    errno.EDQUOT: "the disk quota is used up: make room, or name another folder with --records",
    errno.EACCES: "name a writable folder with --records, or TRAINATOMY_RECORDS",
    errno.EPERM: "name a writable folder with --records, or TRAINATOMY_RECORDS",
    errno.EROFS: "name a writable folder with --records, or TRAINATOMY_RECORDS",
}


class Folder:
    """The files directly in one folder."""

    def __init__(self, path: str, options: dict[str, Any]) -> None:
        """Open the folder at ``path``, a path or URL; ``options``: further arguments of fsspec's filesystem.

        Raises:
            TrainatomyError: fsspec does not know the filesystem.
            MissingLibrary: The filesystem's library is not installed.
        """
        self.path = path
        try:
            filesystem, root = url_to_fs(path, **options)
        except ImportError as error:
            raise MissingLibrary(f"{path}: {error}") from None
        except ValueError as error:
            known = "a folder, or a URL of a filesystem that fsspec knows, such as s3://bucket/folder"
            raise TrainatomyError(f"{path!r} is not a folder of records: {error}; name {known}") from None
        self.filesystem: fsspec.AbstractFileSystem = filesystem
        self.root: str = root.rstrip("/")
        self.is_local = isinstance(filesystem, LocalFileSystem)

    def where(self, name: str) -> str:
        """Return the path of file ``name``, relative as the folder's own path."""
        return f"{self.path.rstrip('/')}/{name}"

    def exists(self) -> bool:
        """Return whether the folder exists; on object stores, whether it contains anything."""
        with self._translating_errors("looked up"):
            self.filesystem.invalidate_cache()
            return bool(self.filesystem.isdir(self.root))

    def names(self, ending: str) -> tuple[str, ...]:
        """Return the names of the visible files with that ending, sorted; none if there is no folder."""
        with self._translating_errors("listed"):
            self.filesystem.invalidate_cache()
            try:
                listed = self.filesystem.ls(self.root, detail=True)
            except FileNotFoundError:
                return ()
        if [entry["name"].rstrip("/") for entry in listed if entry["type"] == "file"] == [self.root]:
            raise TrainatomyError(
                f"{self.path} is a file: name the folder that it is in, or `trainatomy show` the file"
            )
        files = (entry["name"].rpartition("/")[2] for entry in listed if entry["type"] != "directory")
        return tuple(sorted(name for name in files if name.endswith(ending) and not name.startswith(".")))

    def read(self, name: str) -> bytes | None:
        """Return the content of a file, or ``None`` if it does not exist.

        Raises:
            TrainatomyError: It cannot be read.
        """
        with self._translating_errors("read", name):
            try:
                content: bytes = self.filesystem.cat_file(f"{self.root}/{name}")
            except FileNotFoundError:
                return None
            return content

    def read_all(self, names: Sequence[str]) -> Iterator[tuple[str, bytes | Exception]]:
        """Yield each file's name and content, or the error that reading it raised."""
        for start in range(0, len(names), 64):
            paths = {f"{self.root}/{name}": name for name in names[start : start + 64]}
            with self._translating_errors("read"):
                found = self.filesystem.cat(list(paths), on_error="return")
            for path, name in paths.items():
                yield name, found.get(path, FileNotFoundError(path))

    def write(self, name: str, data: bytes) -> str:
        """Write a file atomically, even if the process is killed, and return its path.

        Raises:
            TrainatomyError: No permission, no space, no connection.
        """
        with self._translating_errors("written", name):
            if self.is_local:
                _write_locally(Path(self.root), name, data)
            else:
                self._write_remotely(name, data)
        return self.where(name)

    def remove(self, name: str) -> None:
        """Remove a file."""
        with self._translating_errors("removed", name):
            self.filesystem.rm_file(f"{self.root}/{name}")

    def _write_remotely(self, name: str, data: bytes) -> None:
        protocol = self.filesystem.protocol
        protocols = {protocol} if isinstance(protocol, str) else set(protocol)
        self.filesystem.makedirs(self.root, exist_ok=True)
        if protocols & ATOMIC_FILESYSTEMS:
            self.filesystem.pipe_file(f"{self.root}/{name}", data)
            return
        draft = f"{self.root}/{_draft(name)}"
        try:
            self.filesystem.pipe_file(draft, data)
            self.filesystem.mv(draft, f"{self.root}/{name}")
        except BaseException:
            with suppress(Exception):
                self.filesystem.rm_file(draft)
            raise

    @contextmanager
    def _translating_errors(self, what: str, name: str | None = None) -> Iterator[None]:
        """Turn any exception of the filesystem into a ``TrainatomyError`` that names the attempted action."""
        where = self.path if name is None else self.where(name)
        try:
            yield
        except Exception as error:
            number = error.errno if isinstance(error, OSError) else None
            advice = f"; {_ADVICE[number]}" if number in _ADVICE else ""
            reason = os.strerror(number) if number else f"{type(error).__name__}: {error}"
            raise TrainatomyError(f"{where} could not be {what}: {reason}{advice}") from error


def _write_locally(folder: Path, name: str, data: bytes) -> None:
    """Write a draft in the same folder and rename it once its bytes are on the disk.

    POSIX renames are atomic (``rename``, IEEE Std 1003.1): a reader sees the whole file or none.
    """
    folder.mkdir(parents=True, exist_ok=True)
    draft = folder / _draft(name)
    try:
        with draft.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(folder / name)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    with suppress(OSError):  # some network filesystems cannot fsync folders
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _draft(name: str) -> str:
    return f".{name}.{os.getpid()}-{secrets.token_hex(4)}{_UNFINISHED}"


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


def store_of(place: Store | Path | str | None) -> Store:
    """Return a store, which may be given by its folder or URL."""
    return place if isinstance(place, Store) else Store(place)
