"""A script to run and what comes of it: the values that the command and the process of the script exchange."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from trainatomy.scripts.command import Command, read_command

if TYPE_CHECKING:
    from trainatomy.results.detail import Detail
    from trainatomy.results.prediction import Prediction


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
        looks_ahead: See ``session.Settings``.
        timed, timeline, calibration: See ``runs.options.PredictOptions``.
        handovers: Commands that led here from the one that was typed, ``typed``; the last is ``command``.
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
    looks_ahead: bool = True
    handovers: tuple[Handover, ...] = ()
    typed: tuple[str, ...] = ()

    def handed_over(self, handover: Handover) -> Job:
        """Return the job of a command that this one leaves the training to.

        Raises:
            WorkloadError: The command cannot be simulated.
        """
        command = read_command(handover.words)
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
