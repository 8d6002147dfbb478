"""Call functions in processes that are forked from a server, pickled on the way there and back.

They do not see the GPU: a process that has initialised CUDA changes what the driver counts for an idle one by 3 MiB.
"""

from __future__ import annotations

import pickle
import traceback
from base64 import b64decode, b64encode
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from trainatomy.measurement.process.job import NVML_CHECK, Reporter, Task

if TYPE_CHECKING:
    from trainatomy.measurement.process.pool import Answer

_WITHOUT_GPU = {"CUDA_VISIBLE_DEVICES": "", NVML_CHECK: "1"}
CALL = "trainatomy.measurement.process.calls:call"


def calling(like: Task, function: Callable[..., Any], *arguments: Any) -> Task:
    """Return a task that calls a function where ``like`` would run."""
    return replace(
        like,
        name="call",
        function=CALL,
        arguments={"call": _packed((function, arguments))},
        prepare="",
        ranks=1,
        environment=_WITHOUT_GPU,
    )


def call(arguments: Mapping[str, Any], reporter: Reporter) -> dict[str, Any]:
    """Call the function, and return its result or the error that it raised."""
    function, given = _unpacked(arguments["call"])
    try:
        return {"outcome": _packed((function(*given), None))}
    except Exception as error:
        error.add_note(traceback.format_exc())
        return {"outcome": _packed((None, error))}


def returned(answers: Sequence[Answer]) -> Any:
    """Return what the function returned, or raise its error."""
    (answer,) = answers
    if answer.result is None:
        raise answer.died()
    value, error = _unpacked(answer.result["outcome"])
    if error is not None:
        raise error
    return value


def _packed(value: Any) -> str:
    return b64encode(pickle.dumps(value)).decode("ascii")


def _unpacked(text: str) -> Any:
    return pickle.loads(b64decode(text))
