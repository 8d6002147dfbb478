"""The files that a script sees: those that it wrote, in a folder of their own, over those of the machine.

Nothing of the machine's changes. What the script removes is gone for it, and what it writes, it finds again.
"""

from __future__ import annotations

import errno
import os
import re
from contextlib import suppress
from typing import Any

from trainatomy.scripts.guard import absolute

_stat, _lstat, _readlink, _listdir, _mkdir = os.stat, os.lstat, os.readlink, os.listdir, os.mkdir
_symlink, _unlink, _open, _getcwd = os.symlink, os.unlink, open, os.getcwd
_OUTPUTS = (
    "/dev/null", "/dev/zero", "/dev/full", "/dev/tty", "/dev/pts/", "/dev/ptmx", "/dev/random", "/dev/urandom",
    "/dev/stdin", "/dev/stdout", "/dev/stderr", "/dev/fd/", "/proc/self/fd/",
)  # fmt: skip
"""Where writing leaves no file; ``/dev/shm`` is a folder like any other."""
_OPENED = re.compile(r"/(?:proc/self|dev)/fd/(?:[3-9]|\d{2,})(?=/|$)")
"""Files that are open already, but for the outputs."""
LARGEST_COPY = 2**26
"""Bytes of a file of the machine that is copied before a script changes it."""


class Overlay:
    """Paths as a script sees them.

    Attributes:
        writes: The paths that it changed, in order, as it named them.
    """

    def __init__(self, folder: str, part: str) -> None:
        self._folder = os.path.abspath(folder) + os.sep  # noqa: PTH100
        self._root = os.path.join(self._folder, "written", part)  # noqa: PTH118
        self._any = self._exists(self._root)  # by a command before this one
        self._gone: set[str] = set()
        self._has_links = self._any
        self._real_folders: dict[str, str] = {}
        self.writes: dict[str, None] = {}

    def note(self, path: Any) -> None:
        """List a path that is not written."""
        with suppress(TypeError):
            self.writes.setdefault(os.path.abspath(os.fsdecode(path)))  # noqa: PTH100

    def is_ours(self, path: str) -> bool:
        """Return whether a path may be written to."""
        path = self._by_number(path)
        return path.startswith((self._folder, *_OUTPUTS)) or path + os.sep == self._folder

    def _by_number(self, path: str) -> str:
        """Return the path of an open file or folder that another one begins with the number of."""
        if (opened := _OPENED.match(path)) is not None:
            with suppress(OSError):
                goal = _readlink(opened[0])
                return goal + path[opened.end() :] if self._exists(goal) else path
        return path

    def found(self, path: Any, folder: int | None = None) -> str | None:
        """Return where a path is that the script wrote; None if it did not.

        Args:
            path: The path.
            folder: An open folder to which it is relative.
        """
        if not self._any or not isinstance(path, str | bytes | os.PathLike):
            return None
        target = self._above(absolute(path, folder))
        return target if self._exists(target) else None

    def to_read(self, path: Any, folder: int | None = None, *, follows: bool = True) -> Any:
        """Return the path to give to a function that reads, and follows links or not.

        Raises:
            FileNotFoundError: The script has removed it.
        """
        if not self._any:
            return path
        wanted = absolute(path, folder)
        if self.is_ours(wanted):
            return path
        target = self.found(wanted)
        if target is not None and follows and (goal := self._goal(target)) is not None and self.is_below(goal):
            return self.to_read(goal)
        if target is None:
            if self._is_gone(wanted):
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
            if not self._has_links and (folder is not None or not self._is_inside()):
                return path
            target = self._place(wanted)
        return os.fsencode(target) if isinstance(path, bytes) else target

    def to_write(
        self, path: Any, folder: int | None = None, *, keeps: bool = False, creates: bool = True, is_new: bool = False
    ) -> str:
        """Return where to write instead of ``path``, whose folder exists; list the path.

        Args:
            path: The path.
            folder: An open folder to which it is relative.
            keeps: Whether what it holds is kept: a file of the machine is copied before.
            creates: Whether it may be missing.
            is_new: Whether it must be.

        Raises:
            OSError: As the function that writes would.
        """
        wanted = absolute(path, folder)
        if self.is_ours(wanted):
            return wanted
        target = self._above(wanted := self._by_number(wanted))
        is_written = self._exists(target)
        if is_written and (goal := self._goal(target)) is not None:
            if self.is_below(goal):  # through a link to a file of the machine's
                return self.to_write(goal, keeps=keeps, creates=creates)
            _unlink(target)  # a large file that was renamed
        is_there = is_written or self.is_below(wanted)
        if is_new and is_there:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
        if not creates and not is_there:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        self.note(wanted)
        self._any = True
        self._make(os.path.dirname(target))  # noqa: PTH120
        if keeps and is_there and not is_written:
            self._copy_to_change(wanted, target)
        return target

    def is_below(self, path: str) -> bool:
        """Return whether there is a file of the machine's that the script has not removed."""
        return self._exists(self._place(path)) and not self._is_gone(path)

    def is_there(self, path: str) -> bool:
        """Return whether the script finds something at an absolute path."""
        return self.found(path) is not None or self.is_below(path)

    def remove(self, path: str) -> None:
        """Let a path of the machine be gone for the script."""
        self.note(path)
        self._any = True
        self._gone.add(self._place(path))
        self._forget_links()

    def names(self, path: str) -> list[str]:
        """Return what the script finds in a folder, by an absolute path without links."""
        target = self.found(path)
        names = dict.fromkeys(_listdir(target) if target is not None else ())
        if self.is_below(path):
            names |= dict.fromkeys(each for each in _listdir(path) if not self._is_gone(os.path.join(path, each)))  # noqa: PTH118
        return list(names)

    def copy(self, source: str, target: str) -> None:
        """Copy a file or folder of the machine's; to large files, a link is made."""
        found = _stat(source)
        if os.path.isdir(source):  # noqa: PTH112
            self._make(target)
            for name in _listdir(source):
                self.copy(os.path.join(source, name), os.path.join(target, name))  # noqa: PTH118
        elif found.st_size > LARGEST_COPY:
            _symlink(source, target)
        else:
            self._copy_to_change(source, target)

    def _copy_to_change(self, source: str, target: str) -> None:
        """Copy a file; one that is too large for that gets as many zeros, to which the script appends."""
        with _open(source, "rb") as content, _open(target, "wb") as copy:
            if (size := os.fstat(content.fileno()).st_size) > LARGEST_COPY:
                copy.truncate(size)
            else:
                copy.write(content.read())

    def named(self, path: str) -> str:
        """Return the path by which the script knows one in the folder of what it wrote."""
        return (path[len(self._root) :] or os.sep) if self._is_in_root(path) else path

    def _above(self, path: str) -> str:
        """Return where an absolute path is, if the script writes it."""
        return path if self._is_in_root(path) else self._root + self._place(path)

    def _place(self, path: str) -> str:
        """Return an absolute path whose folders are no links."""
        folder, name = os.path.split(path)
        return os.path.join(self.real(folder), name)  # noqa: PTH118

    def real(self, folder: str) -> str:
        """Return the absolute path of a folder without links."""
        known = self._real_folders.get(folder)
        if known is None:
            parent, name = os.path.split(folder)
            known = os.path.join(self.real(parent), name) if name else folder  # noqa: PTH118
            self._real_folders[folder] = known  # ends a circle of links
            for link in (self._root + known, known):
                with suppress(OSError):
                    goal = os.path.normpath(os.path.join(os.path.dirname(link), _readlink(link)))  # noqa: PTH118, PTH120
                    known = self._real_folders[folder] = self.real(self.named(goal))
                    break
        return known

    def _forget_links(self) -> None:
        self._real_folders.clear()

    def _goal(self, target: str) -> str | None:
        """Return what a link that the script made leads to, if that is a path of the machine's."""
        with suppress(OSError):
            goal = os.path.normpath(os.path.join(os.path.dirname(target), _readlink(target)))  # noqa: PTH118, PTH120
            return None if self._is_in_root(goal) else goal
        return None

    def _is_gone(self, path: str) -> bool:
        if not self._gone:
            return False
        place = self._place(path)
        while place not in self._gone:
            parent = os.path.dirname(place)  # noqa: PTH120
            if parent == place:
                return False
            place = parent
        return True

    def _is_in_root(self, path: str) -> bool:
        return path == self._root or path.startswith(self._root + os.sep)

    def _is_inside(self) -> bool:
        """Return whether the process is in a folder that the script made, where relative paths find only its own."""
        return self._is_in_root(_getcwd())

    def _exists(self, path: str) -> bool:
        try:
            _lstat(path)
        except (OSError, ValueError):
            return False
        return True

    def _make(self, folder: str) -> None:
        missing = []
        while not self._exists(folder):
            missing.append(folder)
            folder = os.path.dirname(folder)  # noqa: PTH120
        for each in reversed(missing):
            _mkdir(each)
