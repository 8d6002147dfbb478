"""What goes wrong in code that is not ours while a step is executed: which operation of which module, on which line."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import torch
from torch import nn

from trainatomy.errors import SimulationError, TrainatomyError
from trainatomy.simulator.recorder import Recorder
from trainatomy.training.factory import has_users_frame

_OPERATION = Recorder.__torch_dispatch__.__code__


@contextmanager
def failures(what: str, path_of: Callable[[nn.Module], str]) -> Iterator[None]:
    """Turn an exception of a library's code into a ``SimulationError`` with module, operation and line.

    Our own errors, running out of memory and exceptions of the user's own code pass.  ``path_of``: the name of a module
    in the model.
    """
    try:
        yield
    except (TrainatomyError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        if has_users_frame(error):
            raise
        raise SimulationError(f"{what} cannot be executed: {_told(error, path_of)}") from error


def _told(error: Exception, path_of: Callable[[nn.Module], str]) -> str:
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    operation = next((f"{f.f_locals['name']} in " for f in frames if f.f_code is _OPERATION), "")
    modules = [found for frame in frames if (found := _module(frame)) is not None]
    module = path_of(modules[-1]) if modules else "the training loop"
    text = next(iter(str(error).splitlines()), "no message")[:300]
    return (
        f"{operation}{module} raised {type(error).__name__}: {text}\n  {_line(error)}\n"
        "If its batch lacks something, name a function that makes one: data.factory.  If a step with this batch works "
        "on a GPU, this is a bug of trainatomy's, and `trainatomy measure` runs it."
    )


def _module(frame: FrameType) -> nn.Module | None:
    """The module whose method a frame runs."""
    found = frame.f_locals.get("self")
    return found if isinstance(found, nn.Module) else None


def _line(error: Exception) -> str:
    """The innermost line of a library that is not PyTorch and not ours; else the innermost of all."""
    places = list(traceback.extract_tb(error.__traceback__))
    aside = (Path(torch.__file__).parent, Path(__file__).parents[1])
    theirs = [p for p in places if not any(Path(p.filename).is_relative_to(folder) for folder in aside)]
    place = (theirs or places)[-1]
    return f"{place.filename}:{place.lineno}, in {place.name}"
