"""The kernel's wall around the process of a script, for what does not go through Python's functions.

Linux's Landlock (5.13 and newer, no privileges needed) refuses the process and everything it starts to write outside
given folders, to execute other files than given ones and, from 6.7 on, to connect to other machines. Reading stays
allowed everywhere. Where there is no Landlock, only what goes through Python is kept back (``files``, ``guard``,
``standins.commands``).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import shutil
import struct
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

_CREATE, _ADD, _RESTRICT = 444, 445, 446
"""System calls of Landlock, which have the same numbers on all processors but Alpha."""
_ASK_VERSION = 1
_PATH_BENEATH = 1
_SET_NO_NEW_PRIVILEGES = 38
"""Option of ``prctl``."""
_EXECUTE, _WRITE, _TRUNCATE = 1 << 0, 1 << 1, 1 << 14
_CHANGE_FOLDERS = sum(1 << bit for bit in range(4, 13))
"""Removing and making files, folders, links, sockets, FIFOs and devices."""
_MOVE_BETWEEN_FOLDERS = 1 << 13
_OF_FILES = _EXECUTE | _WRITE | _TRUNCATE
_CONNECT = 1 << 1
_ABSTRACT_SOCKETS, _SIGNALS = 1 << 0, 1 << 1
_SINCE = {_MOVE_BETWEEN_FOLDERS: 2, _TRUNCATE: 3}
"""Landlock's version from which on a right exists."""
_CONNECT_SINCE, _SCOPES_SINCE = 4, 6
_DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/tty", "/dev/pts", "/dev/ptmx", "/dev/shm")
"""Where writing changes nothing that stays; PyTorch's and Python's semaphores are made in ``/dev/shm``."""
_HEAD_BYTES = 4096
_LOADER = re.compile(rb"\0(/[\w./+-]*/ld[\w.+-]*\.so[\w.]*)\0")
_SHEBANG = re.compile(rb"#!\s*(\S+)")
_WRAPPED = re.compile(rb"^\s*exec\s+[\"']?(/[\w./+-]+)", re.MULTILINE)


def is_there() -> bool:
    """Return whether the kernel has Landlock."""
    return _version() >= 1


def _version() -> int:
    """Return Landlock's version; 0 or less without it."""
    if not sys.platform.startswith("linux"):
        return 0
    return int(ctypes.CDLL(None).syscall(_CREATE, None, ctypes.c_size_t(0), _ASK_VERSION))


def put_up(folders: Iterable[str], programs: Iterable[str], *, network: bool) -> bool:
    """Keep this thread, and what it starts from now on, from writing elsewhere and executing anything else.

    Args:
        folders: Folders to write to, beside devices and what stdout and stderr are.
        programs: Names or paths of programs that may be executed.
        network: Whether it may connect to other machines.

    Returns:
        False where there is no Landlock.
    """
    version = _version()
    if version < 1:
        return False
    system = ctypes.CDLL(None)
    rights = _EXECUTE | _WRITE | _CHANGE_FOLDERS
    rights |= sum(right for right, since in _SINCE.items() if version >= since)
    connect = _CONNECT if version >= _CONNECT_SINCE and not network else 0
    scopes = _ABSTRACT_SOCKETS | _SIGNALS if version >= _SCOPES_SINCE and not network else 0
    described = struct.pack("QQQ", rights, connect, scopes)
    rules = system.syscall(_CREATE, described, ctypes.c_size_t(len(described)), 0)
    if rules < 0:
        return False
    try:
        for path in (*folders, *_DEVICES):
            _allow(system, rules, path, rights & ~_EXECUTE)
        for path in {file for name in programs for file in executed(name)}:
            _allow(system, rules, path, _EXECUTE)
        for output in (1, 2):
            _allow_opened(system, rules, output, rights & (_WRITE | _TRUNCATE))
        if system.prctl(_SET_NO_NEW_PRIVILEGES, 1, 0, 0, 0) != 0:
            return False
        return bool(system.syscall(_RESTRICT, rules, 0) == 0)
    finally:
        os.close(rules)


def _allow(system: Any, rules: int, path: str, rights: int) -> None:
    with contextlib.suppress(OSError):
        opened = os.open(path, os.O_PATH | os.O_CLOEXEC)
        try:
            _allow_opened(system, rules, opened, rights if os.path.isdir(path) else rights & _OF_FILES)  # noqa: PTH112
        finally:
            os.close(opened)


def _allow_opened(system: Any, rules: int, opened: int, rights: int) -> None:
    """Allow something with an open file or folder; a pipe has no place in a file system, and needs no rule."""
    system.syscall(_ADD, rules, _PATH_BENEATH, struct.pack("=Qi", rights, opened), 0)


def executed(program: str) -> Iterator[str]:
    """Yield the files that the kernel executes for a program.

    Beside its own, these are the interpreter or loader that it names, and what a script that only wraps it executes.
    """
    path = shutil.which(program)
    if path is None:
        return
    yield path
    try:
        with Path(path).open("rb") as file:
            head = file.read(_HEAD_BYTES)
    except OSError:
        return
    if (interpreter := _SHEBANG.match(head)) is not None:
        named = [interpreter[1], *_WRAPPED.findall(head)]
    else:
        named = _LOADER.findall(head) if head.startswith(b"\x7fELF") else []
    for each in named:
        if os.fsdecode(each) != path:
            yield from executed(os.fsdecode(each))


def end_forks() -> None:
    """Let every later ``fork`` of this process, by whatever library, give a child that ends at once.

    Python's ``subprocess`` and ``posix_spawn`` do not fork so, and go on.
    """
    with contextlib.suppress(AttributeError, OSError):
        system = ctypes.CDLL(None)
        end = ctypes.cast(system._exit, ctypes.c_void_p)
        if sys.platform.startswith("linux"):
            system.__getattr__("__register_atfork")(None, None, end, None)
        else:
            system.pthread_atfork(None, None, end)
