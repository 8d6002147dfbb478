"""Start the process of a script and wait for it: its time limit, Ctrl-C and SIGTERM end it, and it reports first."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType
from typing import IO, Any

_GRACE = {signal.SIGINT: 60.0, signal.SIGTERM: 8.0}
"""Seconds that a process has to report after a signal; ``docker stop`` waits 10 s before it kills everything."""


class Interrupted(KeyboardInterrupt):
    """This process was asked to end; ``signal`` is how."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.signal = signal.Signals(number)


def start(words: Sequence[str], output: IO[Any] | int, environment: Mapping[str, str], **options: Any) -> Any:
    """Start a process in a group of its own, so that a signal reaches it once: from ``wait``.

    SIGINT is blocked in it until it calls ``listen``, if it does.
    """
    return subprocess.Popen(
        words,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        env=environment,
        process_group=0,
        **options,
    )


@contextlib.contextmanager
def held_interrupts() -> Iterator[None]:
    """Let SIGINT wait until the block ends, also in processes that it starts, until they ``listen``."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def listen() -> None:
    """Receive SIGINT from now on, also one that waits already."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def wait(
    process: subprocess.Popen[bytes], seconds: float, *, ask: Callable[[], object], answers_in: float
) -> int | None:
    """Wait for a process; Ctrl-C or SIGTERM lets it report what it has, and a second one ends it.

    Args:
        process: A process that was started by ``start``.
        seconds: Its time limit.
        ask: Called before it is killed: a dry run writes where it is, a launcher ends its processes.
        answers_in: Seconds after that.

    Returns:
        Its exit code; None: it did not end in time and was killed.
    """
    limit, was_interrupted = seconds, False
    with _terms_interrupt():
        while True:
            try:
                return process.wait(limit)
            except KeyboardInterrupt as error:
                if was_interrupted:
                    send(process, signal.SIGKILL)
                    raise
                send(process, signal.SIGINT)
                limit = _GRACE[error.signal if isinstance(error, Interrupted) else signal.SIGINT]
                was_interrupted = True
            except subprocess.TimeoutExpired:
                ask()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(answers_in)
                send(process, signal.SIGKILL)
                process.wait()
                return -signal.SIGINT if was_interrupted else None


def send(process: subprocess.Popen[bytes], number: int) -> None:
    """Send a signal to a process that has not ended, and to what it started."""
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)


@contextlib.contextmanager
def _terms_interrupt() -> Iterator[None]:
    """Let SIGTERM interrupt the block, where nothing else handles it and this is the main thread."""
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise Interrupted(number)

    signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
