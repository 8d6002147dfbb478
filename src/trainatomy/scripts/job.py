"""A script to run and what comes of it: the values that the command and the process of the script exchange.

Lines of a user's script, for messages and notes.
"""

from __future__ import annotations

import os
import shlex
import sys
import sysconfig
import traceback
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from trainatomy.requests.scripts import ScriptRequest
from trainatomy.scripts.command import Command, read_command

if TYPE_CHECKING:
    from trainatomy.catalog.calibrations import Calibration
    from trainatomy.results.prediction import Prediction
    from trainatomy.results.trace import Detail


INTERRUPTED = 130
"""Exit code after Ctrl-C, as in a shell."""
CRASH = "crash.txt"
"""File in the folder of outcomes that says where Python was when the process crashed."""


@dataclass(frozen=True, slots=True)
class Handover:
    """A command to which a script leaves the training, as launchers do.

    Attributes:
        words: The command as ``trainatomy run`` reads it.
        variables: What it adds to the environment.
        folder: The folder that it is started in.
    """

    words: tuple[str, ...]
    variables: Mapping[str, str]
    folder: str

    @property
    def text(self) -> str:
        """The command as it would be typed in a shell."""
        return shlex.join(self.words)


class HandedOver(BaseException):
    """A script leaves the training to another command; no ``except Exception`` of it catches this."""

    def __init__(self, handover: Handover) -> None:
        super().__init__(handover)
        self.handover = handover


@dataclass(frozen=True, slots=True)
class Job(ScriptRequest):
    """A script to run on a simulated GPU, as it is asked for.

    Attributes:
        command: The script, its arguments, and its launcher.
        gpus: Ids of GPUs; the script is run once for each.
        calibration: A calibration for the timing model, or its file.
        timed: Predict the time of a step; False predicts memory only.
        detail: Also return every allocation and operation.
        debug: Print the traceback of an exception that ends the script.
        handovers: Commands that led here from the one that was typed, ``typed``; the last is ``command``.
    """

    command: Command
    gpus: tuple[str, ...]
    calibration: Calibration | Path | str | None = None
    timed: bool = True
    detail: bool = False
    debug: bool = False
    handovers: tuple[Handover, ...] = ()
    typed: tuple[str, ...] = ()

    def handed_over(self, handover: Handover) -> Job:
        """Return the job of a command that this one leaves the training to, which gets its variables.

        Raises:
            WorkloadError: The command cannot be simulated.
        """
        command = read_command(handover.words)
        command = replace(command, variables=(*self.command.variables, *command.variables))
        typed = self.typed or self.command.typed
        return replace(self, command=command, handovers=(*self.handovers, handover), typed=typed)


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of a script on one GPU: a prediction, an error, or both if some steps were complete.

    ``exit_code`` is that of the error (``trainatomy.errors``), 0 without one. With a ``handover``, another command is
    to be run instead.
    """

    gpu: str
    prediction: Prediction | None = None
    message: str = ""
    exit_code: int = 0
    detail: Detail | None = None
    handover: Handover | None = None


def _folder_of(library: str) -> str:
    """Return the folder of a library without importing it: the process that waits for the script's needs no PyTorch."""
    spec = find_spec(library)
    assert spec is not None and spec.origin is not None
    return str(Path(spec.origin).parent)


_OURS = str(Path(__file__).resolve().parents[1])
_LIBRARIES = ("stdlib", "platstdlib", "purelib", "platlib")
_TORCH = _folder_of("torch")
_INSTALLED = tuple({*map(sysconfig.get_path, _LIBRARIES), str(Path(_TORCH).parent)})
_STANDARD = tuple({*map(sysconfig.get_path, _LIBRARIES[:2])})
_run: tuple[str, ...] = ()
_known: dict[str, bool] = {}


def is_users(filename: str) -> bool:
    """Return whether a file belongs to the user: neither to this package nor to an installed one."""
    found = _known.get(filename)
    if found is None:
        path = str(Path(filename).resolve())
        installed = path.startswith((_OURS, *_INSTALLED)) or "site-packages" in path
        found = _known[filename] = not filename.startswith("<") and not installed
    return found


def add_run(folder: str) -> None:
    """Let lines of an installed package be named: the one whose command or module is run."""
    global _run
    if folder:
        _run = (*_run, str(Path(folder).resolve()))


def _is_named(filename: str) -> bool:
    """Return whether lines of a file are named in messages: of the user's, or of the package that is run."""
    return is_users(filename) or (bool(_run) and str(Path(filename).resolve()).startswith(_run))


def add_libraries(folders: list[str]) -> None:
    """Let folders (those of PYTHONPATH) count as installed libraries; the script's own folder does not."""
    global _INSTALLED
    _INSTALLED = (*_INSTALLED, *(str(Path(folder).resolve()) for folder in folders))
    _known.clear()


def is_called_by_user() -> bool:
    """Return whether code of the user has called what replaces a function, perhaps through Python's own library."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and _is_of_python(frame.f_code.co_filename):
        frame = frame.f_back
    return frame is not None and is_users(frame.f_code.co_filename)


def callers() -> Iterator[str]:
    """Yield the names of the packages whose code is running, the innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield str(frame.f_globals.get("__name__", "")).partition(".")[0]
        frame = frame.f_back


def _is_of_python(filename: str) -> bool:
    return filename.startswith(_OURS) or (
        filename.startswith((*_STANDARD, "<frozen ")) and "site-packages" not in filename
    )


def is_of_platform(filename: str) -> bool:
    """Return whether a file is Python's, PyTorch's or ours, or none."""
    return filename.startswith(("<", _TORCH)) or _is_of_python(filename)


def libraries_in(environment: Mapping[str, str]) -> list[str]:
    """Return the folders of PYTHONPATH."""
    return [one for one in environment.get("PYTHONPATH", "").split(os.pathsep) if one]


def current_place(script: str = "") -> str:
    """Return ``train.py:31`` for the user's innermost frame, of ``script`` if it has one; "" if there is none."""
    frame: FrameType | None = sys._getframe(1)
    first = ""
    while frame is not None:
        name = frame.f_code.co_filename
        if _is_named(name):
            place = f"{Path(name).name}:{frame.f_lineno}"
            if not script or name == script:
                return place
            first = first or place
        frame = frame.f_back
    return first


def any_place_of(error: BaseException) -> str:
    """Return the user's innermost line in a traceback, or else that of a library: ``filelock/_api.py:231``."""
    place = place_of(error)
    if place:
        return place
    frames = [(frame.filename, frame.lineno or 0) for frame in traceback.extract_tb(error.__traceback__)]
    return line_of_library(frames[::-1])


def line_of_library(frames: Iterable[tuple[str, int]]) -> str:
    """Return the first line of an installed library in frames, the innermost first; else of Python's own.

    Lines of ours are left out.
    """
    known = [frame for frame in frames if not frame[0].startswith((_OURS, "<"))]
    installed = [(name, line) for name, line in known if not _is_of_python(name)]
    for name, line in [*installed, *known][:1]:
        path = Path(name)
        return f"{Path(*path.parts[-2:])}:{line}"
    return ""


def place_of(error: BaseException) -> str:
    """Return the user's innermost line in the traceback of an exception, ``train.py:31``; "" if there is none."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{Path(error.filename).name}:{error.lineno or 0}"
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_named(frame.filename)]
    return f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
