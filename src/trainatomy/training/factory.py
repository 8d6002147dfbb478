"""Load and call the user's own functions (``package.module:build``, ``path/to/file.py:build``).

What goes wrong in them is told in the user's terms: their file, line and function, not ours.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
import sysconfig
import traceback
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from trainatomy.errors import FactoryError, TrainatomyError, WorkloadError
from trainatomy.workload.nearest import suggestion

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import ModuleType

_OURS = Path(__file__).resolve().parents[1]
_LIBRARIES = ("stdlib", "platstdlib", "purelib", "platlib")
_INSTALLED = tuple(Path(place).resolve() for place in {*map(sysconfig.get_path, _LIBRARIES), torch.__path__[0]})


def load(reference: str, key: str) -> Callable[..., Any]:
    """The function that ``reference`` names.

    ``key`` is the workload's key (``model.factory``).  Raises ``WorkloadError`` where file, module or function do not
    exist, ``FactoryError`` where importing them raises.
    """
    place, _, name = reference.rpartition(":")
    module = _file(place, key) if place.endswith(".py") else _module(place, key)
    function = module
    for part in name.split("."):
        if not hasattr(function, part):
            names = [entry for entry in vars(module) if not entry.startswith("_")]
            raise WorkloadError(f"{key}: {place} has no {name!r}{suggestion(name, names)}")
        function = getattr(function, part)
    if not callable(function):
        raise WorkloadError(f"{key}: {reference} is not a function but a {type(function).__name__}")
    return function


def _file(place: str, key: str) -> ModuleType:
    path = Path(place).expanduser().resolve()
    if not path.is_file():
        raise WorkloadError(f"{key}: there is no file {path}")
    name = f"_trainatomy_factory_{hashlib.sha256(str(path).encode()).hexdigest()[:12]}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None  # a path that ends in .py always has a loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickling look a class's module up by name
    with user_code(f"{key}: importing {place}"), _importable(path.parent):
        spec.loader.exec_module(module)
    return module


def _module(place: str, key: str) -> ModuleType:
    with user_code(f"{key}: importing {place}"), _importable(Path.cwd()):
        try:
            return importlib.import_module(place)
        except ModuleNotFoundError as error:
            if error.name is not None and (place == error.name or place.startswith(f"{error.name}.")):
                raise WorkloadError(f"{key}: there is no module {place!r} (looked in {Path.cwd()} too)") from None
            raise


@contextmanager
def _importable(folder: Path) -> Iterator[None]:
    """Let the user's module import its neighbours, as ``python file.py`` would."""
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        if str(folder) in sys.path:
            sys.path.remove(str(folder))


@contextmanager
def user_code(what: str) -> Iterator[None]:
    """Turn an exception that comes out of the user's code into a ``FactoryError`` with the user's frame.

    Our own errors and running out of memory pass unchanged, and so does an exception with no frame of the user's in it.
    """
    try:
        yield
    except (TrainatomyError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        frame = _users_frame(error)
        if frame is None:
            raise
        raise FactoryError(_message(what, error, frame)) from error


def has_users_frame(error: BaseException) -> bool:
    """Whether the user's own code took part in an exception."""
    return _users_frame(error) is not None


def _users_frame(error: BaseException) -> traceback.FrameSummary | None:
    """The innermost frame that lies neither in our package nor in an installed one."""
    if isinstance(error, SyntaxError) and error.filename and _is_users(error.filename):
        return traceback.FrameSummary(error.filename, error.lineno or 0, "<module>", line=(error.text or "").strip())
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_users(frame.filename)]
    return frames[-1] if frames else None


def _is_users(filename: str) -> bool:
    if filename.startswith("<"):
        return False
    path = Path(filename).resolve()
    return not path.is_relative_to(_OURS) and not any(path.is_relative_to(folder) for folder in _INSTALLED)


def _message(what: str, error: BaseException, frame: traceback.FrameSummary) -> str:
    text = str(error) or "no message"
    line = f"\n    {frame.line}" if frame.line else ""
    return f"{what} raised {type(error).__name__}: {text}\n  {frame.filename}:{frame.lineno}, in {frame.name}{line}"
