"""Writes of a script: they go to a folder that is removed afterwards, and are listed.

Files that a script opens for writing, folders that it makes and files that it removes or renames are redirected, so
that it finds again what it wrote, and nothing of the user's changes.  Code in C that writes without Python's functions
is not seen; the savers of PyTorch, safetensors and the tokenizers are replaced one by one (``standins``).
"""

from __future__ import annotations

import builtins
import io
import os
import shutil
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any
from unittest import mock

_DEVICES = ("/dev/", "/proc/", "/sys/")
_LARGEST_COPY = 2**26
"""Bytes of a file that is copied before a script appends to the copy."""
_stat, _open = os.stat, builtins.open


class RedirectedFiles:
    """The files that a script writes, below ``folder`` in one of the name ``part``.

    Attributes:
        writes: The paths that it meant, in order.
    """

    def __init__(self, folder: str, part: str) -> None:
        self._root = os.path.join(folder, "written", part)  # noqa: PTH118
        self._allowed = (os.path.abspath(folder) + os.sep,)  # noqa: PTH100
        self._any = False
        self.writes: dict[str, None] = {}

    def install(self, stack: ExitStack) -> None:
        """Redirect until ``stack`` closes."""
        self._originals = {name: getattr(os, name) for name in ("mkdir", "remove", "rmdir", "rename", "listdir")}
        self._scandir, self._rmtree = os.scandir, shutil.rmtree
        for owner in (builtins, io):
            stack.enter_context(mock.patch.object(owner, "open", self._opened))
        replacements: dict[str, Callable[..., Any]] = {
            "mkdir": self._mkdir,
            "stat": self._following(os.stat),
            "lstat": self._following(os.lstat),
            "statvfs": self._following(os.statvfs),
            "access": self._accessible(os.access),
            "chmod": self._changing(os.chmod),
            "chown": self._changing(os.chown),
            "utime": self._changing(os.utime),
            "listdir": self._listdir,
            "scandir": self._scan,
            "remove": self._remove,
            "unlink": self._remove,
            "rmdir": self._remove,
            "rename": self._rename,
            "replace": self._rename,
            "symlink": lambda source, target, *rest, **more: self.note(target),
            "link": lambda source, target, *rest, **more: self.note(target),
        }
        for name, replacement in replacements.items():
            stack.enter_context(mock.patch.object(os, name, replacement))
        stack.enter_context(mock.patch.object(shutil, "rmtree", self._remove_tree))

    def made(self, name: str) -> str:
        """Return the path of a file or folder of ours, which the script does not write."""
        return os.path.join(os.path.dirname(self._root), name)  # noqa: PTH118, PTH120

    def note(self, path: Any) -> None:
        """List a path that is not written."""
        with suppress(TypeError):
            self.writes.setdefault(os.path.abspath(os.fsdecode(path)))  # noqa: PTH100

    def redirected(self, path: Any) -> str:
        """Return where to write instead of ``path``, whose folder exists; list the path."""
        wanted = os.path.abspath(os.fsdecode(path))  # noqa: PTH100
        if self.is_ours(wanted):
            return wanted
        self.note(wanted)
        target = self._mapped(wanted)
        self._make(os.path.dirname(target))  # noqa: PTH120
        self._any = True
        return target

    def found(self, path: Any) -> str | None:
        """Return where a path is that the script wrote; None if it did not."""
        if not self._any or not isinstance(path, str | bytes | os.PathLike):
            return None
        target = self._mapped(os.path.abspath(os.fsdecode(path)))  # noqa: PTH100
        try:
            _stat(target)
        except OSError:
            return None
        return target

    def _mapped(self, path: str) -> str:
        return self._root + path

    def is_ours(self, path: str) -> bool:
        """Return whether a path may be written to."""
        return path.startswith((*self._allowed, *_DEVICES)) or path + os.sep in self._allowed

    def _make(self, folder: str) -> None:
        missing = []
        while True:
            try:
                _stat(folder)
                break
            except FileNotFoundError:
                missing.append(folder)
                folder = os.path.dirname(folder)  # noqa: PTH120
        for one in reversed(missing):
            self._originals["mkdir"](one)

    def _opened(self, file: Any, mode: str = "r", *rest: Any, **more: Any) -> Any:
        if isinstance(file, int) or not isinstance(mode, str):
            return _open(file, mode, *rest, **more)
        if not set(mode) & set("wax+"):
            return _open(self.found(file) or file, mode, *rest, **more)
        known = self.found(file)
        target = self.redirected(file)
        wanted = os.fsdecode(file)
        if known is None and target != wanted and ("a" in mode or "+" in mode) and "w" not in mode:
            with suppress(OSError):
                if _stat(wanted).st_size <= _LARGEST_COPY:
                    with _open(wanted, "rb") as source, _open(target, "wb") as copy:
                        copy.write(source.read())
        return _open(target, mode, *rest, **more)

    def _following(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def stat(path: Any, *rest: Any, **more: Any) -> Any:
            try:
                return original(path, *rest, **more)
            except FileNotFoundError:
                target = self.found(path)
                if target is None:
                    raise
                return original(target)

        return stat

    def _changing(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that changes what the script wrote, and leaves files of the user as they are."""

        def change(path: Any, *rest: Any, **more: Any) -> Any:
            if isinstance(path, int) or self.is_ours(os.path.abspath(os.fsdecode(path))):  # noqa: PTH100
                return original(path, *rest, **more)
            target = self.found(path)
            return self.note(path) if target is None else original(target, *rest, **more)

        return change

    def _accessible(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def access(path: Any, *rest: Any, **more: Any) -> bool:
            return bool(original(path, *rest, **more)) or self.found(path) is not None

        return access

    def _mkdir(self, path: Any, *rest: Any, **more: Any) -> None:
        wanted = os.path.abspath(os.fsdecode(path))  # noqa: PTH100
        if self.is_ours(wanted) or more.get("dir_fd") is not None:
            return self._originals["mkdir"](path, *rest, **more)
        if self._exists(wanted):
            raise FileExistsError(17, "File exists", wanted)
        if not self._exists(os.path.dirname(wanted)):  # noqa: PTH120
            raise FileNotFoundError(2, "No such file or directory", wanted)
        self._any = True
        return self._make(self._mapped(wanted))

    def _exists(self, path: str) -> bool:
        try:
            _stat(path)
        except OSError:
            return self.found(path) is not None
        return True

    def _listdir(self, path: Any = ".") -> Any:
        target = self.found(path)
        if target is None:
            return self._originals["listdir"](path)
        names = dict.fromkeys(self._originals["listdir"](target))
        with suppress(OSError):
            names |= dict.fromkeys(self._originals["listdir"](path))
        return list(names)

    def _scan(self, path: Any = ".") -> Any:
        try:
            return self._scandir(path)
        except FileNotFoundError:
            target = self.found(path)
            if target is None:
                raise
            return self._scandir(target)

    def _remove(self, path: Any, *rest: Any, **more: Any) -> None:
        if more.get("dir_fd") is not None or self.is_ours(os.path.abspath(os.fsdecode(path))):  # noqa: PTH100
            wanted = path
        elif (target := self.found(path)) is not None:
            wanted = target
        elif self._exists(os.fsdecode(path)):
            return self.note(path)
        else:
            wanted = path
        name = "rmdir" if Path(os.fsdecode(wanted)).is_dir() and more.get("dir_fd") is None else "remove"
        self._originals[name](wanted, *rest, **more)
        return None

    def _remove_tree(self, path: Any, *rest: Any, **more: Any) -> None:
        if self.is_ours(os.path.abspath(os.fsdecode(path))):  # noqa: PTH100
            self._rmtree(path, *rest, **more)
        elif (target := self.found(path)) is not None:
            self._rmtree(target, ignore_errors=True)
        else:
            self.note(path)

    def _rename(self, source: Any, target: Any, **more: Any) -> None:
        known = self.found(source)
        wanted = os.fsdecode(source) if known is None else known
        place = self.redirected(target)
        if known is None and not self.is_ours(os.path.abspath(wanted)):  # noqa: PTH100
            shutil.copy(wanted, place)  # the user's own file stays where it is
            return
        self._originals["rename"](wanted, place, **more)
