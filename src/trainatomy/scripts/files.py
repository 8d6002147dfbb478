"""Functions of Python that change or find files, with paths as a script sees them (``overlay``).

Nothing of the user's changes, and the script finds again what it wrote. What code in C opens by itself is redirected
function by function (``standins.foreign_files``), and refused by the kernel elsewhere (``wall``).
"""

from __future__ import annotations

import builtins
import errno
import io
import mmap
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from importlib import import_module
from typing import Any

from trainatomy.scripts.guard import WRITES, absolute, passing
from trainatomy.scripts.imports import replace_everywhere
from trainatomy.scripts.overlay import LARGEST_COPY, Overlay

_open, _os_open, _stat, _getcwd = builtins.open, os.open, os.stat, os.getcwd
_ANONYMOUS = getattr(os, "O_TMPFILE", 0)
_READING = ("stat", "lstat", "statvfs", "readlink", "getxattr", "listxattr", "pathconf")
_MAKING = ("mkfifo", "mknod")
_OF_LINKS = ("lstat", "readlink")
_CHANGING = ("chmod", "lchmod", "chown", "lchown", "utime", "setxattr", "removexattr", "chflags", "lchflags")


class RedirectedFiles(Overlay):
    """The files that a script writes, and the functions by which it does."""

    def install(self, stack: ExitStack) -> None:
        """Redirect until ``stack`` closes."""
        self._lent: set[tuple[int, int]] = set()
        self._os = {name: getattr(os, name) for name in dir(os) if callable(getattr(os, name))}
        self._rmtree = shutil.rmtree
        stack.callback(self._os["chdir"], _getcwd())
        replacements: dict[str, Callable[..., Any]] = {
            **{name: self._reading(self._os[name]) for name in _READING if name in self._os},
            **{name: self._changing(self._os[name]) for name in _CHANGING if name in self._os},
            "open": self._os_opened,
            "access": self._access,
            "listdir": self._list,
            "scandir": self._scan,
            "chdir": self._chdir,
            "getcwd": self._cwd,
            "getcwdb": lambda: os.fsencode(self._cwd()),
            "mkdir": self._mkdir,
            **{name: self._making(self._os[name]) for name in _MAKING if name in self._os},
            "truncate": self._truncate,
            "remove": self._remove,
            "unlink": self._remove,
            "rmdir": self._rmdir,
            "rename": self._rename,
            "replace": self._rename,
            "symlink": self._symlink,
            "link": self._link,
        }
        swapped = [(self._os[name], replacement) for name, replacement in replacements.items()]
        swapped += [(builtins.open, self._opened), (io.open_code, self._reading(io.open_code))]
        swapped += [(shutil.rmtree, self._remove_tree), (mmap.mmap, self._mapping())]
        with suppress(ImportError):  # shared memory is a file in a folder like any other
            shared: Any = import_module("_posixshmem")
            swapped += [
                (shared.shm_open, lambda path, *rest, **more: self._os_opened(f"/dev/shm{path}", *rest, **more)),
                (shared.shm_unlink, lambda path: self._remove(f"/dev/shm{path}")),
            ]
        replace_everywhere(stack, swapped)
        for supported in (os.supports_dir_fd, os.supports_fd, os.supports_follow_symlinks, os.supports_effective_ids):
            also = {new for original, new in swapped if original in supported}
            supported |= also
            stack.callback(supported.difference_update, also)

    # -- opening -------------------------------------------------------------------------------------------------------

    def _opened(self, file: Any, mode: str = "r", *rest: Any, **more: Any) -> Any:
        opener = more.get("opener", rest[5] if len(rest) > 5 else None)
        if not isinstance(file, str | bytes | os.PathLike) or not isinstance(mode, str):
            return _open(file, mode, *rest, **more)
        if opener is not None:  # it opens what it likes, as that of temporary files does, by another function
            with passing():
                return _open(file, mode, *rest, **more)
        if not set(mode) & set("wax+"):
            return _open(self.to_read(file), mode, *rest, **more)
        keeps = "w" not in mode and "x" not in mode
        if keeps and "a" not in mode and self._is_lent(file):
            return _open(self.to_read(file), mode.replace("+", ""), *rest, **more)
        self._check_file(file)
        target = self.to_write(file, keeps=keeps, creates="r" not in mode, is_new="x" in mode)
        return _open(target, mode, *rest, **more)

    def _os_opened(self, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        if _ANONYMOUS and flags & _ANONYMOUS == _ANONYMOUS:
            return _os_open(self._folder, flags, mode)
        if not flags & WRITES:
            return _os_open(self.to_read(path, dir_fd), flags, mode, dir_fd=dir_fd)
        keeps = not flags & os.O_TRUNC
        if keeps and not flags & os.O_APPEND and self._is_lent(path, dir_fd):
            return _os_open(self.to_read(path, dir_fd), flags & ~WRITES, mode, dir_fd=dir_fd)
        self._check_file(path, dir_fd)
        is_new = bool(flags & os.O_CREAT and flags & os.O_EXCL)
        target = self.to_write(path, dir_fd, keeps=keeps, creates=bool(flags & os.O_CREAT), is_new=is_new)
        return _os_open(target, flags, mode)

    def _is_lent(self, path: Any, folder: int | None = None) -> bool:
        """Return whether a file of the machine is too large to be copied, and remember that it was opened to change it.

        It is opened for reading, and a mapping of it is the script's own.
        """
        wanted = absolute(path, folder)
        if self.is_ours(wanted) or (self.found(wanted) or wanted) != wanted or not self.is_below(wanted):
            return False
        found = _stat(wanted)
        if found.st_size <= LARGEST_COPY:
            return False
        self.note(wanted)
        self._lent.add((found.st_dev, found.st_ino))
        return True

    def _check_file(self, path: Any, folder: int | None = None) -> None:
        wanted = absolute(path, folder)
        if not self.is_ours(wanted) and os.path.isdir(wanted):  # noqa: PTH112
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)

    def _mapping(self) -> type:
        """Return ``mmap.mmap`` whose changes of a large file stay in this process."""
        original, lent = mmap.mmap, self._lent

        class Mapping(original):  # type: ignore[valid-type, misc]
            def __new__(cls, fileno: int, length: int, *rest: Any, **more: Any) -> Any:
                if lent and fileno >= 0 and more.get("access") != mmap.ACCESS_READ:
                    found = os.fstat(fileno)
                    if (found.st_dev, found.st_ino) in lent:
                        rest, more = (), {"access": mmap.ACCESS_COPY, "offset": more.get("offset", 0)}
                return super().__new__(cls, fileno, length, *rest, **more)

        Mapping.__name__ = Mapping.__qualname__ = "mmap"
        return Mapping

    # -- finding -------------------------------------------------------------------------------------------------------

    def _reading(self, original: Callable[..., Any]) -> Callable[..., Any]:
        follows = original.__name__ not in _OF_LINKS

        def read(path: Any, *rest: Any, **more: Any) -> Any:
            if isinstance(path, str | bytes | os.PathLike):
                path = self.to_read(path, more.get("dir_fd"), follows=follows and more.get("follow_symlinks", True))
            found = original(path, *rest, **more)
            return self.named(found) if isinstance(found, str) else found

        return read

    def _access(self, path: Any, *rest: Any, **more: Any) -> bool:
        try:
            return bool(self._os["access"](self.to_read(path, more.get("dir_fd")), *rest, **more))
        except FileNotFoundError:
            return False

    def _list(self, path: Any = None) -> Any:
        if not self._any or isinstance(path, int):
            return self._os["listdir"](path)
        given = "." if path is None else path
        wanted = self.real(absolute(given, None))
        if self.is_ours(wanted) or (self.found(wanted) is None and not self._gone):
            return self._os["listdir"](self.to_read(given))
        self.to_read(given)  # raises where it was removed
        names = self.names(wanted)
        return [os.fsencode(name) for name in names] if isinstance(path, bytes) else names

    def _scan(self, path: Any = None) -> Any:
        if not self._any or isinstance(path, int | bytes):
            return self._os["scandir"](path)
        given = "." if path is None else os.fspath(path)
        wanted = self.real(absolute(given, None))
        if self.is_ours(wanted) or (self.found(wanted) is None and not self._gone):
            return self._os["scandir"](self.to_read(given))
        self.to_read(given)
        return _Entries(self._entries(given, wanted))

    def _entries(self, given: str, wanted: str) -> Iterator[_Entry]:
        """Yield what the script finds in a folder: its own entries, and those of the machine that they do not hide."""
        names = dict.fromkeys(self.names(wanted))
        for folder in (self.found(wanted), wanted if self.is_below(wanted) else None):
            with self._os["scandir"](folder) if folder is not None else _Entries(iter(())) as entries:
                for entry in entries:
                    if entry.name in names:
                        del names[entry.name]
                        yield _Entry(entry, os.path.join(given, entry.name))  # noqa: PTH118

    def _chdir(self, path: Any) -> None:
        self._os["chdir"](path if isinstance(path, int) else self.to_read(path))

    def _cwd(self) -> str:
        return self.named(_getcwd())

    # -- changing ------------------------------------------------------------------------------------------------------

    def _changing(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that changes what the script wrote, and leaves files of the user as they are."""

        def change(path: Any, *rest: Any, **more: Any) -> Any:
            if isinstance(path, int):
                return original(path, *rest, **more)
            folder = more.pop("dir_fd", None)
            wanted = absolute(path, folder)
            target = wanted if self.is_ours(wanted) else self.found(wanted)
            if target is not None:
                return original(target, *rest, **more)
            self.to_read(path, folder)
            if not self.is_below(wanted):
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
            return self.note(wanted)

        return change

    def _making(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def make(path: Any, *rest: Any, dir_fd: int | None = None, **more: Any) -> None:
            original(self.to_write(path, dir_fd, is_new=True), *rest, **more)

        return make

    def _mkdir(self, path: Any, mode: int = 0o777, *, dir_fd: int | None = None) -> None:
        wanted = absolute(path, dir_fd)
        if self.is_ours(wanted):
            return self._os["mkdir"](wanted, mode)
        if self.is_there(wanted):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
        if not self.is_there(os.path.dirname(wanted)):  # noqa: PTH120
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        self._any = True
        return self._make(self._above(wanted))

    def _truncate(self, path: Any, length: int) -> None:
        given = path if isinstance(path, int) else self.to_write(path, keeps=True, creates=False)
        self._os["truncate"](given, length)

    def _remove(self, path: Any, *, dir_fd: int | None = None) -> None:
        wanted = absolute(path, dir_fd)
        target = wanted if self.is_ours(wanted) else self.found(wanted)
        if target is not None:
            self._os["remove"](target)
        elif not self.is_below(wanted):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        elif os.path.isdir(wanted) and not os.path.islink(wanted):  # noqa: PTH112, PTH114
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        self._hide(wanted)

    def _rmdir(self, path: Any, *, dir_fd: int | None = None) -> None:
        wanted = absolute(path, dir_fd)
        if self.is_ours(wanted):
            return self._os["rmdir"](wanted)
        if self._list(wanted):
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), path)
        if (target := self.found(wanted)) is not None:
            self._os["rmdir"](target)
        return self._hide(wanted)

    def _remove_tree(self, path: Any, *rest: Any, **more: Any) -> None:
        wanted = absolute(path, more.get("dir_fd"))
        target = self.found(wanted)
        if self.is_ours(wanted) or (target is None and not self.is_below(wanted)):
            self._rmtree(path, *rest, **more)
            return
        if target is not None:
            self._rmtree(target, ignore_errors=True)
        self._hide(wanted)

    def _hide(self, wanted: str) -> None:
        """Let a removed path of the machine be gone, and one that was only the script's be forgotten."""
        if self.is_ours(wanted):
            return
        if self.is_below(wanted):
            self.remove(wanted)
        else:
            self.writes.pop(wanted, None)

    def _rename(
        self, source: Any, target: Any, *, src_dir_fd: int | None = None, dst_dir_fd: int | None = None
    ) -> None:
        wanted = absolute(source, src_dir_fd)
        known = wanted if self.is_ours(wanted) else self.found(wanted)
        if known is None and not self.is_below(wanted):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), source, None, target)
        place = self.to_write(target, dst_dir_fd)
        if known is None:
            self.copy(wanted, place)  # the user's own stays where it is
        else:
            self._move(known, place)
            self._forget_links()
        self._hide(wanted)

    def _move(self, source: str, target: str) -> None:
        try:
            self._os["rename"](source, target)
        except OSError as error:
            if error.errno != errno.EXDEV:  # Linux before 5.19 moves nothing to another folder behind the wall
                raise
            self.copy(source, target)
            (self._rmtree if os.path.isdir(source) else self._os["remove"])(source)  # noqa: PTH112

    def _symlink(self, source: Any, target: Any, *rest: Any, dir_fd: int | None = None, **more: Any) -> None:
        wanted = absolute(target, dir_fd)
        goal = os.path.join(os.path.dirname(wanted), os.fsdecode(source))  # noqa: PTH118, PTH120
        goal = os.path.normpath(goal)
        place = self.to_write(target, dir_fd, is_new=True)
        self._os["symlink"](self.found(goal) or goal, place)
        self._has_links = True
        self._forget_links()

    def _link(
        self, source: Any, target: Any, *, src_dir_fd: int | None = None, dst_dir_fd: int | None = None, **_: Any
    ) -> None:
        wanted = absolute(source, src_dir_fd)
        known = wanted if self.is_ours(wanted) else self.found(wanted)
        place = self.to_write(target, dst_dir_fd, is_new=True)
        if known is None:
            self.copy(wanted, place)
        else:
            self._os["link"](known, place)


class _Entry:
    """An ``os.DirEntry`` with the path by which the script knows it."""

    def __init__(self, entry: Any, path: str) -> None:
        self._entry, self.name, self.path = entry, entry.name, path

    def __fspath__(self) -> str:
        return self.path

    def __getattr__(self, name: str) -> Any:
        return getattr(self._entry, name)

    def __repr__(self) -> str:
        return f"<DirEntry {self.name!r}>"


class _Entries:
    """What ``os.scandir`` returns: an iterator that can be closed."""

    def __init__(self, entries: Iterator[_Entry]) -> None:
        self._entries = entries

    def __iter__(self) -> _Entries:
        return self

    def __next__(self) -> _Entry:
        return next(self._entries)

    def __enter__(self) -> _Entries:
        return self

    def __exit__(self, *_: object) -> None: ...

    def close(self) -> None:
        """Do nothing."""
