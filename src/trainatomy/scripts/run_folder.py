"""The temporary folder of a run: removed when it ends, or by a later run if its process was killed."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

_PREFIX = "trainatomy-run-"
_HELD = "held"
"""File that the process of a run keeps locked as long as it lives."""


@contextlib.contextmanager
def run_folder() -> Iterator[str]:
    """Yield a new temporary folder; those that killed runs have left are removed before."""
    _remove_abandoned()
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
    try:
        with (folder / "new").open("w") as file:
            with contextlib.suppress(OSError):
                _lock(file)
                (folder / "new").rename(folder / _HELD)  # no other run finds it before it is locked
            yield str(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _remove_abandoned() -> None:
    """Remove the user's folders whose file nobody has locked."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            if folder.stat().st_uid == os.getuid():
                with (folder / _HELD).open("r+") as file:
                    _lock(file)
                    shutil.rmtree(folder, ignore_errors=True)


def _lock(file: IO[str]) -> None:
    """Lock an open file, as long as the process keeps it open.

    Raises:
        OSError: Another process has locked it, or files cannot be locked there.
    """
    if sys.platform == "win32":
        raise OSError("files are not locked on Windows")
    import fcntl

    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
