"""Every error that trainatomy raises on purpose, and the exit code of each.

    TrainatomyError            1   something was asked that cannot be done
    ├── WorkloadError          2   the description is wrong: unknown key, contradiction, unknown name
    ├── FactoryError           3   the user's own code (a factory, a model's forward) raised
    ├── SimulationError        4   an operation cannot be executed without data
    ├── MissingLibrary         5   an optional library is not installed
    ├── NetworkError           6   the hub cannot be reached and no shipped architecture has that name
    ├── DeviceError            7   no GPU for `measure`, or its worker died
    └── DoesNotFit             8   `--check`: the training does not fit the card

Ctrl-C exits with 130, a broken pipe with 141.  A message says what was asked, what was found, what to do.
"""

from __future__ import annotations


class TrainatomyError(Exception):
    """Root of all errors that a user can cause or mend."""

    exit_code = 1


class WorkloadError(TrainatomyError):
    """The description of the training is wrong; names the key and, for a file, the line."""

    exit_code = 2


class FactoryError(TrainatomyError):
    """The user's own code raised; carries the user's frame, not ours."""

    exit_code = 3


class SimulationError(TrainatomyError):
    """An operation needs data that does not exist in a run without a GPU; names operation and module."""

    exit_code = 4


class MissingLibrary(TrainatomyError):
    """An optional library is needed; the message holds the command that installs it."""

    exit_code = 5


class NetworkError(TrainatomyError):
    """The hub cannot be reached, and no architecture that ships as data has the name asked for."""

    exit_code = 6


class DeviceError(TrainatomyError):
    """A GPU was needed and is not there, or the process that used it failed."""

    exit_code = 7


class DoesNotFit(TrainatomyError):
    """The training does not fit the card (only raised where a check was asked for)."""

    exit_code = 8
