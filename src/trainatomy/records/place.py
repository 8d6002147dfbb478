"""A folder of small files, on this machine or wherever fsspec reaches, in which a file is there whole or not at all."""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import fsspec
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

from trainatomy.errors import MissingLibrary, TrainatomyError

PUTS_WHOLE_FILES = frozenset({"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "oss", "oci", "memory"})
"""Filesystems on which a file that is written in one call appears when it is complete, and not before."""

_UNFINISHED = ".unfinished"
_ADVICE = {
    errno.ENOSPC: "make room, or name another folder with --records",
    errno.EDQUOT: "your quota is used up: make room, or name another folder with --records",
    errno.EACCES: "name a folder that you may write to with --records, or TRAINATOMY_RECORDS",
    errno.EPERM: "name a folder that you may write to with --records, or TRAINATOMY_RECORDS",
    errno.EROFS: "name a folder that you may write to with --records, or TRAINATOMY_RECORDS",
}


class Place:
    """The files directly in one folder.  ``options``: what fsspec's filesystem takes beside the path."""

    def __init__(self, path: str, options: dict[str, Any]) -> None:
        """Raises ``TrainatomyError`` for a filesystem that fsspec does not know, ``MissingLibrary`` for one whose
        library is not installed."""
        self.path = path
        try:
            filesystem, root = url_to_fs(path, **options)
        except ImportError as error:
            raise MissingLibrary(f"{path}: {error}") from None
        except ValueError as error:
            known = "a folder, or a URL of a filesystem that fsspec knows, such as s3://bucket/folder"
            raise TrainatomyError(f"{path!r} is no folder of records: {error}; name {known}") from None
        self.filesystem: fsspec.AbstractFileSystem = filesystem
        self.root: str = root.rstrip("/")
        self.is_local = isinstance(filesystem, LocalFileSystem)

    def where(self, name: str) -> str:
        """How a reader would name the file: as the folder was named."""
        return f"{self.path.rstrip('/')}/{name}"

    def exists(self) -> bool:
        """Whether the folder is there; on object stores, whether anything is in it."""
        with self._reaching("looked for"):
            self.filesystem.invalidate_cache()
            return bool(self.filesystem.isdir(self.root))

    def names(self, ending: str) -> tuple[str, ...]:
        """The files with that ending, in order; none where there is no folder.  Hidden ones are not ours."""
        with self._reaching("listed"):
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
        """The whole file, or ``None`` where there is none; raises ``TrainatomyError`` for other faults."""
        with self._reaching("read", name):
            try:
                content: bytes = self.filesystem.cat_file(f"{self.root}/{name}")
            except FileNotFoundError:
                return None
            return content

    def read_all(self, names: Sequence[str]) -> Iterator[tuple[str, bytes | Exception]]:
        """Each file, or what kept it from being read; several at a time where the filesystem can."""
        for start in range(0, len(names), 64):
            paths = {f"{self.root}/{name}": name for name in names[start : start + 64]}
            with self._reaching("read"):
                found = self.filesystem.cat(list(paths), on_error="return")
            for path, name in paths.items():
                yield name, found.get(path, FileNotFoundError(path))

    def write(self, name: str, data: bytes) -> str:
        """Write a file that appears whole or not at all, whenever this is stopped; returns where it is.

        Raises ``TrainatomyError``: no rights, no room, no connection.
        """
        with self._reaching("written", name):
            if self.is_local:
                _write_locally(Path(self.root), name, data)
            else:
                self._write_elsewhere(name, data)
        return self.where(name)

    def remove(self, name: str) -> None:
        """Remove a file of ours."""
        with self._reaching("removed", name):
            self.filesystem.rm_file(f"{self.root}/{name}")

    def _write_elsewhere(self, name: str, data: bytes) -> None:
        protocol = self.filesystem.protocol
        protocols = {protocol} if isinstance(protocol, str) else set(protocol)
        self.filesystem.makedirs(self.root, exist_ok=True)
        if protocols & PUTS_WHOLE_FILES:
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
    def _reaching(self, what: str, name: str | None = None) -> Iterator[None]:
        """Say what was asked of the filesystem when it refuses; its own exceptions may be of any type."""
        where = self.path if name is None else self.where(name)
        try:
            yield
        except Exception as error:
            number = error.errno if isinstance(error, OSError) else None
            advice = f"; {_ADVICE[number]}" if number in _ADVICE else ""
            reason = os.strerror(number) if number else f"{type(error).__name__}: {error}"
            raise TrainatomyError(f"{where} could not be {what}: {reason}{advice}") from error


def _write_locally(folder: Path, name: str, data: bytes) -> None:
    """Through another name in the same folder, which is renamed when the bytes are on the disk.

    POSIX renames in one step (``rename``, IEEE Std 1003.1): a reader sees the file whole or sees none.
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
    with suppress(OSError):  # some network filesystems know no fsync of folders
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _draft(name: str) -> str:
    return f".{name}.{os.getpid()}-{secrets.token_hex(4)}{_UNFINISHED}"
