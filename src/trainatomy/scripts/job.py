"""A script to run and what comes of it: the values that the command and the process of the script exchange."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from trainatomy.scripts.command import Command

if TYPE_CHECKING:
    from trainatomy.results.detail import Detail
    from trainatomy.results.prediction import Prediction


INTERRUPTED = 130
"""Exit code after Ctrl-C, as in a shell."""
CRASH = "crash.txt"
"""File in the folder of outcomes that says where Python was when the process crashed."""


@dataclass(frozen=True, slots=True)
class Job:
    """A script to run on a simulated GPU.

    Attributes:
        command: The script, its arguments, and its launcher.
        gpus: Ids of GPUs; the script is run once for each.
        steps, time_limit, network, samples, lengths, data: See ``session.Settings``.
        torch: Version of PyTorch to simulate; None for the installed one.
        compiled: Whether ``torch.compile`` is simulated; None: where the script names it and its compiler is there.
        detail: Also return every allocation and operation.
        debug: Print the traceback of an exception that ends the script.
        timed, timeline, calibration: See ``runs.options.PredictOptions``.
    """

    command: Command
    gpus: tuple[str, ...]
    steps: int = 3
    time_limit: float = 300.0
    network: bool = False
    samples: int = 512
    lengths: int = 256
    data: str | None = None
    timed: bool = True
    timeline: bool = False
    calibration: Any = None
    torch: str | None = None
    detail: bool = False
    compiled: bool | None = None
    debug: bool = False


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of a script on one GPU: a prediction, an error, or both if some steps were complete.

    ``exit_code`` is that of the error (``trainatomy.errors``), 0 without one.
    """

    gpu: str
    prediction: Prediction | None = None
    message: str = ""
    exit_code: int = 0
    notes: tuple[str, ...] = field(default=())
    detail: Detail | None = None
