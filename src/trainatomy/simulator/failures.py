"""Errors of library code while a step is executed: which operation of which module failed, where, and what to do."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import torch
from torch import nn

from trainatomy.errors import SimulationError, TrainatomyError
from trainatomy.simulator.bounds import OutOfRange
from trainatomy.simulator.recorder import Recorder
from trainatomy.training.factory import has_users_frame

_DISPATCH = Recorder.__torch_dispatch__.__code__
_TORCH = Path(torch.__file__).parent
_PREPARATIONS = ("torch/distributed/fsdp/", "accelerate/utils/fsdp_utils.py")
"""Code that spreads a model, by parts of its paths."""
_OURS = Path(__file__).parents[1]
_BATCH_ERRORS = (TypeError, KeyError, ValueError, IndexError, AttributeError, RuntimeError)
"""Errors that a model raises for a batch that lacks something, or has a wrong shape."""
_MAX_MESSAGE = 500


@contextmanager
def explained_failures(
    model_name: str, path_of: Callable[[nn.Module], str], stage: Callable[[], str], *, own_batch: bool = True
) -> Iterator[None]:
    """Turn an exception of library code into a ``SimulationError`` that names module, operation and line.

    trainatomy's own errors, running out of memory and exceptions of the user's code pass unchanged.

    Args:
        model_name: Name of the model for the message.
        path_of: Returns the path of a module in the model.
        stage: Returns the current stage of the loop ("optimizer", ...).
        own_batch: True if trainatomy made the batch, so that the user could provide another.
    """
    try:
        yield
    except (TrainatomyError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        if has_users_frame(error):
            raise
        raise _explained(error, model_name, path_of, stage(), own_batch) from error


def _explained(
    error: Exception, model_name: str, path_of: Callable[[nn.Module], str], stage: str, own_batch: bool
) -> SimulationError:
    """Return the error to raise in place of ``error``."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    operation = next((str(f.f_locals["name"]) for f in frames if f.f_code is _DISPATCH and "name" in f.f_locals), None)
    modules = [found for frame in frames if (found := _module_of(frame)) is not None]
    module = path_of(modules[-1]) if modules else None
    text = _message(error)[:_MAX_MESSAGE]
    where = f"{operation} in {module or 'the training loop'}" if operation else module or "the training loop"
    return SimulationError(
        f"{model_name} cannot be executed: {where} raised {type(error).__name__}: {text}\n"
        f"  {_innermost_line(error)}\n{_advice(error, frames, operation, module is not None, stage, own_batch)}",
        operation=operation,
        module=module,
    )


def _advice(
    error: Exception, frames: list[FrameType], operation: str | None, in_module: bool, stage: str, own_batch: bool
) -> str:
    """Return advice for this kind of error."""
    if isinstance(error, ImportError):
        library = f" (pip install {error.name})" if error.name else ""
        return f"Install the library that is missing{library}."
    if isinstance(error, OutOfRange):
        return (
            "A sequence may be longer than a table of positions (data.sequence_length), or a token or class outside of "
            "those that the model has (model.config, data.factory)."
        )
    if isinstance(error, (OverflowError, ZeroDivisionError)):
        return "A number of the workload is too large or too small for this computation."
    if not in_module and (stage == "optimizer" or any(_runs_optimizer(frame) for frame in frames)):
        return (
            "The optimizer cannot run in this loop with these parameters or settings.  Choose another optimizer "
            "(train.optim) or change its arguments (train.optim_args)."
        )
    if "find_unused_parameters" in str(error):
        return (
            "DDP waits for the gradient of a parameter that gets none in this step; a run on GPUs ends so, too.  Set "
            "parallel.find_unused_parameters (with the Trainer train.ddp_find_unused_parameters)."
        )
    if isinstance(error, ValueError) and "/trl/" in _innermost_line(error):
        return "TRL refuses these settings (sections trl and train); a run on a GPU ends so, too."
    if any(map(_prepares, frames)) and not operation:
        return (
            "PyTorch cannot spread this model over GPUs in this way; a run on GPUs with the releases that are "
            "installed here ends so, too.  Wrapping other layers may help "
            "(train.fsdp_config: {transformer_layer_cls_to_wrap: [...]})."
        )
    report = (
        "If this step works on a GPU, please report a bug in trainatomy; `trainatomy measure` runs the step meanwhile."
    )
    if in_module and isinstance(error, _BATCH_ERRORS):
        batch = (
            "If the generated batch lacks something that the model needs, name a function that makes one: data.factory."
            if own_batch
            else "Check that data.factory returns what this model's forward takes."
        )
        return f"{batch}  {report}"
    return report


def _prepares(frame: FrameType) -> bool:
    """Return whether a frame runs code that spreads a model over GPUs."""
    path = Path(frame.f_code.co_filename).as_posix()
    return any(part in path for part in _PREPARATIONS)


def _message(error: Exception) -> str:
    """Return the first line of an error's text; of one in a thread of DataParallel, the last: the original error."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    if not lines:
        return "no message"
    return lines[-1] if lines[0].startswith("Caught ") and " in replica " in lines[0] else lines[0]


def _runs_optimizer(frame: FrameType) -> bool:
    """Return whether a frame runs a method of an optimizer."""
    return isinstance(frame.f_locals.get("self"), torch.optim.Optimizer)


def _module_of(frame: FrameType) -> nn.Module | None:
    """Return the module whose method a frame runs."""
    found = frame.f_locals.get("self")
    return found if isinstance(found, nn.Module) else None


def _innermost_line(error: Exception) -> str:
    """Return the innermost line of a library other than PyTorch and trainatomy, else the innermost of all."""
    lines = list(traceback.extract_tb(error.__traceback__))
    theirs = [one for one in lines if not any(Path(one.filename).is_relative_to(folder) for folder in (_TORCH, _OURS))]
    line = (theirs or lines)[-1]
    return f"{line.filename}:{line.lineno}, in {line.name}"
