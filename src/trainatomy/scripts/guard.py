"""Refuse what reaches the functions of Python in C without having been redirected or decided on.

A library may have kept ``os.remove`` or ``_io.FileIO`` from before. Python's audit events tell what is about to be
done, so that nothing is, and the script's line is named. Connections are refused here alone. Code in C that asks the
system itself raises no such events: the kernel refuses it (``wall``), and where it cannot, the C functions are not
handed out.

The kernel's wall around the process of a script, for what does not go through Python's functions.

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
import socket
import struct
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from trainatomy.errors import SimulationError
from trainatomy.scripts.job import current_place

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
_ABSTRACT_SOCKETS, _SIGNAL_CALLS = 1 << 0, 1 << 1
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
    scopes = _ABSTRACT_SOCKETS | _SIGNAL_CALLS if version >= _SCOPES_SINCE and not network else 0
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


WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_PATHS = {
    "open": (0,),
    "os.truncate": (0,),
    "os.remove": (0,),
    "os.rename": (0, 1),
    "os.mkdir": (0,),
    "os.rmdir": (0,),
    "os.link": (1,),
    "os.symlink": (1,),
    "os.chmod": (0,),
    "os.chown": (0,),
    "os.utime": (0,),
    "os.setxattr": (0,),
    "os.removexattr": (0,),
    "sqlite3.connect": (0,),
}
"""Arguments of events that are paths which change, by the event."""
_FOLDERS_GIVEN = {"os.remove": 1, "os.mkdir": 2, "os.rmdir": 1, "os.symlink": 2, "os.chmod": 2, "os.utime": 3}
"""Position of an argument that is an open folder, to which the path is relative."""
_PROCESSES = frozenset(
    {"os.fork", "os.forkpty", "os.posix_spawn", "os.exec", "os.spawn", "os.system", "subprocess.Popen", "pty.spawn"}
)
_SIGNALS = frozenset({"os.kill", "os.killpg"})
_CONNECTIONS = {"socket.connect": 1, "socket.sendto": 1, "socket.sendmsg": 1}
"""Position of the address."""
_LOOKUPS = frozenset({"socket.getaddrinfo", "socket.gethostbyname", "socket.gethostbyaddr"})
_LOCAL = ("localhost", "127.0.0.1", "::1", "")
_SYMBOLS = frozenset({"ctypes.dlsym", "ctypes.dlsym/handle"})
_EVENTS = _PATHS.keys() | _PROCESSES | _SIGNALS | _CONNECTIONS.keys() | _LOOKUPS | _SYMBOLS
_OF_C = {
    "starts another process": frozenset(
        "system popen fork vfork forkpty daemon clone execl execle execlp execv execve execvp execvpe fexecve "
        "posix_spawn posix_spawnp".split()
    ),
    "changes a file": frozenset(
        "creat fopen freopen open openat open64 fopen64 creat64 truncate truncate64 unlink unlinkat remove rename "
        "renameat renameat2 rmdir mkdir mkdirat mkfifo mknod link linkat symlink symlinkat chmod chown".split()
    ),
    "sends a signal to another process": frozenset({"kill", "killpg"}),
    "uses the network": frozenset({"connect", "sendto", "sendmsg"}),
}
"""Functions of the C library by what they do. The first is refused always, the others where there is no wall."""
_state = threading.local()
_active: Callable[[str, tuple[Any, ...]], None] | None = None
_is_hooked = False


@contextlib.contextmanager
def passing() -> Iterator[None]:
    """Let this thread do anything in the block."""
    depth = getattr(_state, "passes", 0)
    _state.passes = depth + 1
    try:
        yield
    finally:
        _state.passes = depth


@contextlib.contextmanager
def guarded(is_allowed: Callable[[str], bool], script: str, *, everywhere: bool, network: bool) -> Iterator[None]:
    """Refuse what other functions have let through, until the block ends.

    Args:
        is_allowed: Tells whether a path may be written to.
        script: File of the script, whose line is named.
        everywhere: In all threads, of which others than this one may outlive the block; else in this one, as the others
            are not the script's.
        network: Whether connections are let through.
    """
    global _active, _is_hooked
    own, is_over = threading.get_ident(), False

    def check(event: str, arguments: tuple[Any, ...]) -> None:
        if network and (event in _CONNECTIONS or event in _LOOKUPS):
            return
        is_meant = not is_over if threading.get_ident() == own else everywhere
        if is_meant and not getattr(_state, "passes", 0):
            with passing():
                _check(event, arguments, is_allowed, script)

    if not _is_hooked:  # a hook stays as long as the process
        sys.addaudithook(_hook)
        _is_hooked = True
    before, _active = _active, check
    try:
        yield
    finally:
        is_over = True
        if not everywhere:
            _active = before


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    if _active is not None and event in _EVENTS:
        _active(event, arguments)


def _check(event: str, arguments: tuple[Any, ...], is_allowed: Callable[[str], bool], script: str) -> None:
    if event in _PROCESSES:
        raise _refusal(script, "starts another process", f"by {event}")
    if event in _SYMBOLS:
        refused = list(_OF_C)[: 1 if is_there() else None]
        if does := next((does for does in refused if arguments[1] in _OF_C[does]), None):
            raise _refusal(script, does, f"by the C function {arguments[1]}")
        return
    if event in _SIGNALS:
        number, own = arguments[0], os.getpid() if event == "os.kill" else os.getpgrp()
        if arguments[1] != 0 and number != own and not _is_child(number):
            raise _refusal(script, "sends a signal to another process", f"to {number}")
        return
    if event in _LOOKUPS:
        if arguments[0] is not None and str(arguments[0]) not in _LOCAL:
            raise _offline(arguments[0])
        return
    if event in _CONNECTIONS:
        opened, address = arguments[0], arguments[_CONNECTIONS[event]]
        if opened.family != socket.AF_UNIX:  # nor to this machine: the kernel knows only ports
            raise _offline(address[0] if isinstance(address, tuple) else address)
        if address and not is_allowed(absolute(address, None)):  # of a daemon, which works for whoever asks
            raise _offline(os.fsdecode(address))
        return
    if event == "open" and not arguments[2] & WRITES:
        return
    paths = _PATHS[event]
    folder = arguments[_FOLDERS_GIVEN[event]] if event in _FOLDERS_GIVEN else -1
    for path in (arguments[position] for position in paths):
        if not isinstance(path, str | bytes | os.PathLike):
            continue
        changed = os.fsdecode(path)
        if event == "sqlite3.connect":
            changed = in_database(changed)[1]
            if not changed:
                continue
        if not is_allowed(absolute(changed, folder)):
            raise _refusal(script, "changes a file", f"{changed}, by {event} of a function that is not redirected")


def _is_child(process: int) -> bool:
    """Return whether a process was started by this one."""
    try:
        os.waitid(os.P_PID, process, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except (OSError, AttributeError):
        return False
    return True


def in_database(name: str) -> tuple[str, str, str]:
    """Divide what SQLite opens, a path or ``file:runs.db?mode=ro``, into what precedes the path, it, and what follows.

    What it keeps in memory has no path.
    """
    if ":memory:" in name or "mode=memory" in name:
        return name, "", ""
    if not name.startswith("file:"):
        return "", name, ""
    path, mark, query = name.removeprefix("file:").partition("?")
    return "file:", unquote(path.removeprefix("//localhost").removeprefix("//")), mark + query


def absolute(path: Any, folder: int | None) -> str:
    """Return the absolute path of one that may be relative to an open folder."""
    text = os.fsdecode(path)
    if isinstance(folder, int) and folder >= 0 and not text.startswith(os.sep):
        return os.path.join(os.readlink(f"/proc/self/fd/{folder}"), text)  # noqa: PTH115, PTH118
    return os.path.abspath(text)  # noqa: PTH100


def _offline(host: object) -> OSError:
    return ConnectionRefusedError(f"the network is off in a dry run ({host}); switch it on with --network")


def _refusal(script: str, does: str, how: str) -> SimulationError:
    place = current_place(script) or "the script"
    return SimulationError(f"{place} {does} ({how}), which nothing in a dry run may do.\nLeave it out for the dry run")
