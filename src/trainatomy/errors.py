"""The exceptions that trainatomy raises on purpose, with the exit code of each.

    TrainatomyError            1   the request cannot be carried out
    ├── WorkloadError          2   the workload is invalid: unknown key, contradiction, unknown name
    │   └── NotSimulated           a framework's configuration asks for what is not simulated
    ├── FactoryError           3   the user's own code (a factory, a model's forward) raised
    ├── SimulationError        4   an operation cannot be executed without data
    ├── MissingLibrary         5   an optional library is not installed
    ├── NetworkError           6   the hub cannot be reached and no shipped architecture has that name
    ├── DeviceError            7   no GPU for `measure`, or its worker process died
    ├── DoesNotFit             8   `--check`: the training does not fit on the GPU
    └── UnhealthyMachine       9   `doctor` found errors or warnings

Ctrl-C exits with 130, a broken pipe with 141.  A message names the request, the finding and the remedy.
"""

from __future__ import annotations


class TrainatomyError(Exception):
    """Base class of all errors that a user can cause or fix."""

    exit_code = 1


class WorkloadError(TrainatomyError):
    """The workload is invalid; the message names the key and, for a file, the line.

    Attributes:
        key: Dotted path of the offending key, such as ``train.optim``, where one key is to blame.
    """

    exit_code = 2

    def __init__(self, message: str = "", *, key: str | None = None) -> None:
        super().__init__(message)
        self.key = key


class FactoryError(TrainatomyError):
    """The user's own code raised; the message carries the user's frame, not ours."""

    exit_code = 3


class SimulationError(TrainatomyError):
    """An operation needs data that a run without a GPU does not have.

    Attributes:
        operation: Name of the operation, such as ``aten::nonzero``, where it is known.
        module: Path of the module that called it, where it is known.
    """

    exit_code = 4

    def __init__(self, message: str = "", *, operation: str | None = None, module: str | None = None) -> None:
        super().__init__(message)
        self.operation = operation
        self.module = module


class MissingLibrary(TrainatomyError):
    """An optional library is needed; the message holds the command that installs it.

    Attributes:
        library: Name of the library, where it is known.
    """

    exit_code = 5

    def __init__(self, message: str = "", *, library: str | None = None) -> None:
        super().__init__(message)
        self.library = library


class NetworkError(TrainatomyError):
    """The hub cannot be reached, and no architecture that ships as data has the requested name."""

    exit_code = 6


class DeviceError(TrainatomyError):
    """A GPU is needed and there is none, or the process that used it failed."""

    exit_code = 7


class NotSimulated(WorkloadError):
    """A configuration of another framework is right, and asks for what is not simulated."""


class DoesNotFit(TrainatomyError):
    """The training does not fit on the GPU (raised only where a check was requested)."""

    exit_code = 8


class UnhealthyMachine(TrainatomyError):
    """`trainatomy doctor` found errors or warnings on this machine."""

    exit_code = 9
