"""Choose the source of the workspaces of convolutions: cuDNN's library or the rules."""

from __future__ import annotations

import os
from collections.abc import Collection
from functools import cache

from trainatomy.catalog.gpus import GPU, device_text
from trainatomy.errors import MissingLibrary, WorkloadError
from trainatomy.operators.allocation.cudnn.backend import BackendError, Mode, cudnn_library
from trainatomy.operators.allocation.cudnn.heuristics import Heuristics, mode_of
from trainatomy.workload.schema import Workload


def heuristics_of(workload: Workload, gpu: GPU) -> Heuristics | None:
    """Return cuDNN's heuristics for a GPU as the workload wants them; None: the rules choose.

    The software of 2022 called convolutions by cuDNN's older interface, which needs a GPU.

    Raises:
        MissingLibrary: ``software.cudnn: library``, and the library is not installed or too old.
        WorkloadError: ``software.cudnn: library``, and the library cannot answer for this GPU or this software.
    """
    wanted = workload.software.cudnn
    if wanted == "rules":
        return None
    try:
        if workload.era is not None:
            raise BackendError("the software of 2022 calls cuDNN by its older interface")
        return _heuristics_on(gpu)
    except (BackendError, MissingLibrary) as error:
        if wanted == "auto":
            return None
        if isinstance(error, MissingLibrary):
            raise
        where = workload.where("software", "cudnn")
        message = f"{where}: cuDNN's library cannot choose for {gpu.name}: {error}; software.cudnn: rules can"
        raise WorkloadError(message, key="software.cudnn") from None


def chosen_alike(own: Heuristics | None, gpu: GPU, others: Collection[GPU]) -> Collection[GPU]:
    """Return those of several GPUs for which cuDNN's library chooses if it does for ``gpu``, else rules.

    ``own``: the heuristics of ``gpu``.
    """
    if own is None and device_text(gpu) is not None:
        return others  # for none: rules are wanted, or the library is not installed
    return [each for each in others if (device_text(each) is None) == (own is None)]


def installed_heuristics(gpu: GPU) -> Heuristics | None:
    """Return cuDNN's heuristics for a GPU where its library is installed and can answer; None: the rules choose."""
    try:
        return _heuristics_on(gpu)
    except (BackendError, MissingLibrary):
        return None


def _heuristics_on(gpu: GPU) -> Heuristics:
    """Return cuDNN's heuristics for a GPU.

    Raises:
        BackendError: cuDNN does not run on it.
        MissingLibrary: The library is not installed or too old.
    """
    text = device_text(gpu)
    if text is None:
        raise BackendError(f"it does not run on compute capability {'.'.join(map(str, gpu.capability))}")
    return _heuristics(text, mode_of(os.environ))


@cache
def _heuristics(text: str, mode: Mode) -> Heuristics:
    """Return the heuristics for a GPU, with the answers that they gave before."""
    return Heuristics(cudnn_library(), text, mode)
