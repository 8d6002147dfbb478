"""Refuse what reaches the functions of Python in C without having been redirected or decided on.

A library may have kept ``os.remove`` or ``_io.FileIO`` from before. Python's audit events tell what is about to be
done, so that nothing is, and the script's line is named. Code in C that asks the system itself raises no such events.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

from trainatomy.errors import SimulationError
from trainatomy.scripts.places import current_place

_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
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
_ALSO = frozenset({"ctypes.dlsym", "os.kill"})
_OF_C = frozenset(
    "system popen fork vfork forkpty daemon clone execl execle execlp execv execve execvp execvpe fexecve posix_spawn "
    "posix_spawnp".split()
)
"""Functions of the C library that start processes."""
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
def guarded(is_allowed: Callable[[str], bool], script: str, *, everywhere: bool) -> Iterator[None]:
    """Refuse what other functions have let through, until the block ends.

    Args:
        is_allowed: Tells whether a path may be written to.
        script: File of the script, whose line is named.
        everywhere: In all threads; else in this one, as the others are not the script's.
    """
    global _active, _is_hooked
    own = threading.get_ident()

    def check(event: str, arguments: tuple[Any, ...]) -> None:
        if not getattr(_state, "passes", 0) and (everywhere or threading.get_ident() == own):
            with passing():
                _check(event, arguments, is_allowed, script)

    if not _is_hooked:  # a hook stays as long as the process
        sys.addaudithook(_hook)
        _is_hooked = True
    before, _active = _active, check
    try:
        yield
    finally:
        _active = before


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    if _active is not None and (event in _PATHS or event in _PROCESSES or event in _ALSO):
        _active(event, arguments)


def _check(event: str, arguments: tuple[Any, ...], is_allowed: Callable[[str], bool], script: str) -> None:
    if event in _PROCESSES:
        raise _refusal(script, "starts another process", f"by {event}")
    if event == "ctypes.dlsym":
        if arguments[1] in _OF_C:
            raise _refusal(script, "starts another process", f"by the C function {arguments[1]}")
        return
    if event == "os.kill":
        if arguments[1] != 0 and arguments[0] != os.getpid() and not _is_child(arguments[0]):
            raise _refusal(script, "sends a signal to another process", f"to {arguments[0]}")
        return
    if event == "open" and not arguments[2] & _WRITES:
        return
    paths = _PATHS[event]
    folder = arguments[_FOLDERS_GIVEN[event]] if event in _FOLDERS_GIVEN else -1
    for path in (arguments[position] for position in paths):
        if not isinstance(path, str | bytes | os.PathLike) or _is_in_memory(event, os.fsdecode(path)):
            continue
        if not is_allowed(absolute(path, folder)):
            raise _refusal(
                script, "changes a file", f"{os.fsdecode(path)}, by {event} of a function that is not redirected"
            )


def _is_child(process: int) -> bool:
    """Return whether a process was started by this one."""
    try:
        os.waitid(os.P_PID, process, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except (OSError, AttributeError):
        return False
    return True


def _is_in_memory(event: str, path: str) -> bool:
    return event == "sqlite3.connect" and (path == "" or ":memory:" in path or "mode=memory" in path)


def absolute(path: Any, folder: int | None) -> str:
    """Return the absolute path of one that may be relative to an open folder."""
    text = os.fsdecode(path)
    if isinstance(folder, int) and folder >= 0 and not text.startswith(os.sep):
        return os.path.join(os.readlink(f"/proc/self/fd/{folder}"), text)  # noqa: PTH115, PTH118
    return os.path.abspath(text)  # noqa: PTH100


def _refusal(script: str, does: str, how: str) -> SimulationError:
    place = current_place(script) or "the script"
    return SimulationError(f"{place} {does} ({how}), which nothing in a dry run may do.\nLeave it out for the dry run")
