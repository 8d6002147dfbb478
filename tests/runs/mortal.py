"""Functions for workers: some end their process, as a machine that runs out of memory would."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import trainatomy.runs.executors as executors
from trainatomy.errors import TrainatomyError


def die_once(folder: Path, item: int) -> int:
    """Double a number; the first process that is to double 3 is killed."""
    with (folder / f"{item}").open("a") as log:
        log.write(f"{os.getpid()}\n")
    if item == 3 and len((folder / "3").read_text().split()) == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return 2 * item


def die(item: int) -> int:
    os.kill(os.getpid(), signal.SIGKILL)
    return item


def refuse(item: int) -> int:
    if item == 1:
        raise TrainatomyError("one is refused")
    raise KeyError("a bug")


def variables(item: str) -> str | None:
    """Return an environment variable of the worker."""
    return os.environ.get(item)


def expect(item: bool) -> bool:
    """Return whether another thread of this process predicts too."""
    return executors._one_at_a_time.locked() and item


def sampled(item: object) -> bool:
    """Return whether the profiler of the Dask worker looks at this thread."""
    from distributed import get_worker

    return threading.get_ident() in get_worker().active_threads
