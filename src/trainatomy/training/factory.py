"""Load and call the user's own functions (``package.module:build``, ``path/to/file.py:build``).

Errors in them are reported with the user's file, line and function, not ours.

Find the loss in the output of a model.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from trainatomy.errors import FactoryError, TrainatomyError, WorkloadError
from trainatomy.workload.document import suggestion

if TYPE_CHECKING:
    from types import ModuleType


def loss_of(outputs: Any, *, several: bool = False) -> Tensor:
    """Return the loss: the output itself, its ``"loss"``, its ``.loss`` or its first element.

    Args:
        outputs: What the model's forward returned.
        several: The outputs of several GPUs were gathered, so that there is a loss of each.

    Raises:
        FactoryError: There is no loss, or it is not a single number.
    """
    loss = _find(outputs)
    if not isinstance(loss, Tensor) or (loss.numel() != 1 and not several):
        found = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
        raise FactoryError(
            f"the model's forward returned {found} as its loss: it must return the loss (one number), a dict with "
            '"loss", or an object with .loss'
        )
    return loss


def _find(outputs: Any) -> Any:
    if isinstance(outputs, Tensor):
        return outputs
    if isinstance(outputs, Mapping):
        return outputs.get("loss")
    if hasattr(outputs, "loss"):
        return outputs.loss
    return outputs[0] if isinstance(outputs, tuple | list) and outputs else outputs


@contextmanager
def returning_loss(model: nn.Module) -> Iterator[None]:
    """Make ``model`` return ``{"loss": …}``, as the Trainer expects; a dict with a loss is returned unchanged."""

    def rewrap(module: nn.Module, arguments: Any, outputs: Any) -> Any:
        return outputs if isinstance(outputs, dict) and "loss" in outputs else {"loss": loss_of(outputs)}

    handle = model.register_forward_hook(rewrap)
    try:
        yield
    finally:
        handle.remove()


_OURS = Path(__file__).resolve().parents[1]
_LIBRARIES = ("stdlib", "platstdlib", "purelib", "platlib")
_INSTALLED = tuple(Path(place).resolve() for place in {*map(sysconfig.get_path, _LIBRARIES), torch.__path__[0]})


def load(reference: str, key: str) -> Callable[..., Any]:
    """Return the function that ``reference`` names.

    Args:
        reference: ``package.module:function`` or ``path/to/file.py:function``.
        key: The workload's key, such as ``model.factory``, for messages.

    Raises:
        WorkloadError: The file, module or function does not exist.
        FactoryError: Importing it failed.
    """
    place, _, name = reference.rpartition(":")
    module = _file(place, key) if place.endswith(".py") else _module(place, key)
    function = module
    for part in name.split("."):
        if not hasattr(function, part):
            names = [entry for entry in vars(module) if not entry.startswith("_")]
            raise WorkloadError(f"{key}: {place} has no {name!r}{suggestion(name, names)}", key=key)
        function = getattr(function, part)
    if not callable(function):
        raise WorkloadError(f"{key}: {reference} is not a function but a {type(function).__name__}", key=key)
    if place.partition(".")[0] in sys.stdlib_module_names:
        raise WorkloadError(f"{key}: {reference} belongs to Python itself: name a function of your own", key=key)
    return function


def call(
    function: Callable[..., Any], what: str, arguments: tuple[Any, ...], keywords: Mapping[str, Any] | None = None
) -> Any:
    """Call a user's factory; raise ``FactoryError`` if its signature does not take the arguments or if it fails.

    Args:
        function: The factory.
        what: How messages name it, such as ``model.factory: models.py:build``.
        arguments: The positional arguments of the call.
        keywords: Its other arguments, which the user names.
    """
    keywords = keywords or {}
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # a builtin or an extension's function
        signature = None
    if signature is not None:
        try:
            signature.bind(*arguments, **keywords)
        except TypeError:
            wanted = "one argument, the batch size" if arguments else "no arguments"
            if keywords:
                named = ", ".join(keywords)
                wanted = f"the batch size and {named}" if arguments else named
            raise FactoryError(f"{what} is called with {wanted}, but its signature is {signature}") from None
    with user_code(what):
        return function(*arguments, **keywords)


def _file(place: str, key: str) -> ModuleType:
    path = Path(place).expanduser().resolve()
    if not path.is_file():
        raise WorkloadError(f"{key}: there is no file {path}", key=key)
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
                message = f"{key}: there is no module {place!r} (looked in {Path.cwd()} too)"
                raise WorkloadError(message, key=key) from None
            raise


@contextmanager
def _importable(folder: Path) -> Iterator[None]:
    """Put ``folder`` on the import path, so that the user's module can import modules beside it."""
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        if str(folder) in sys.path:
            sys.path.remove(str(folder))


@contextmanager
def user_code(what: str) -> Iterator[None]:
    """Turn an exception raised in the user's code into a ``FactoryError`` that names the user's file and line.

    Our own errors, out-of-memory errors and exceptions without a frame of the user's pass unchanged.  ``sys.exit`` in
    the user's code is an error too: nothing was predicted.
    """
    try:
        yield
    except (TrainatomyError, torch.OutOfMemoryError):
        raise
    except SystemExit as error:
        frame = _users_frame(error)
        where = "" if frame is None else f"\n  {frame.filename}:{frame.lineno}, in {frame.name}"
        raise FactoryError(f"{what} called sys.exit({_exit_argument(error)}){where}") from error
    except Exception as error:
        frame = _users_frame(error)
        if frame is None:
            raise
        raise FactoryError(_message(what, error, frame)) from error


def _exit_argument(error: SystemExit) -> str:
    return "" if error.code is None else repr(error.code)


def has_users_frame(error: BaseException) -> bool:
    """Return whether the user's own code is in the traceback of an exception."""
    return _users_frame(error) is not None


def _users_frame(error: BaseException) -> traceback.FrameSummary | None:
    """Return the innermost frame that is neither in our package nor in an installed one."""
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
