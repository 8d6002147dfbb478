"""What is predicted: a training; requests that predict it, and the options that all predictions share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from trainatomy.catalog.calibrations import Calibration, resolve_calibration
from trainatomy.errors import WorkloadError
from trainatomy.option import Option, in_output, option, whole_numbers
from trainatomy.units import bytes_in
from trainatomy.workload.schema import Workload

if TYPE_CHECKING:
    import torch
    from torch import nn

Batch = Mapping[str, Any] | Callable[[int], Mapping[str, Any]]
COMPARED_PACES = (0.5, 0.75, 1.25, 1.5, 2.0, 3.0, 4.0, 6.0, 9.0)
"""Paces of the host for which a training that is measured is predicted: between them the time is interpolated."""

TRUST_REMOTE_CODE = Option("Run the code that comes with a model on the hub.")
CALIBRATION = Option(
    "Predict times with this file of `trainatomy calibrate` instead of what ships. It must come from the same GPU, "
    "or from one of the same compute capability.",
    metavar="FILE",
    words=Path | None,
    read=resolve_calibration,
)


def memory_size(option: str, word: str, given: str | int | None) -> int | str | None:
    """Return the bytes of a size such as ``64 GiB``, or the word that the option takes instead of one.

    Raises:
        WorkloadError: It is neither.
    """
    if given is None or (word and str(given).strip().lower() == word):
        return None if given is None else word
    if not (found := bytes_in(str(given))):
        also = f", or {word}" if word else ""
        raise WorkloadError(f'{option} {given}: must be a size such as "64 GiB" (KiB, MiB, GiB or TiB){also}')
    return found


def dataset_bytes(option: str, given: str | int | None) -> int | None:
    """Return the bytes of a size such as ``8 GiB``; raise ``WorkloadError`` if it is none."""
    found = memory_size(option, "", given)
    return found if isinstance(found, int) else None


HERE = "here"
HOST_MEMORY = Option(
    "Memory of each machine, such as `64 GiB`, or `here` for this one's: also say whether the training's processes "
    "fit in it (default: that of --instance).",
    metavar="SIZE|here",
    words=str | None,
    read=partial(memory_size, "--host-memory", HERE),
)
DATASET_MEMORY = Option(
    "Memory of a data set that lies in Python objects: each process holds it, and in time each of its workers.",
    metavar="SIZE",
    words=str | None,
    read=partial(dataset_bytes, "--dataset-memory"),
)
TIMELINE = Option("Show memory by component over the step.", panel="Output")
JOBS = Option("Processes that predict in parallel (default: one per core, up to 8).", metavar="N", min=1)
EXECUTOR = Option(
    "Predict on Dask or Ray instead of local processes: started on this machine, or the cluster at an address.",
    metavar="dask|ray|dask://HOST:PORT|tcp://HOST:PORT|ray://HOST:PORT",
    words=str | None,
)


@dataclass(frozen=True, slots=True)
class Training:
    """What is trained, and how: a workload or a live module, with the keywords that change it (see ``predict``).

    Attributes:
        what: A workload, or a live module.
        batch: Of a module.
        optimizer: In place of the workload's own.
        gpu: In place of the workload's own.
        settings: Settings by their name, in place of the workload's own.
    """

    what: Workload | nn.Module
    batch: Batch | None = None
    optimizer: str | type[torch.optim.Optimizer] | Callable[[Any], Any] | None = None
    gpu: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PredictRequest:
    """How to predict a training.

    Attributes:
        timeline: Include memory by component over the step.
        timed: Predict the time too. False predicts memory only, somewhat faster; ``Prediction.time`` is then None.
        calibration: A calibration of a machine (``trainatomy calibrate``) or its file, for the timing model. By
            default the calibration that ships for the GPU is used, or else its data sheet.
        trust_remote_code: Run the code that comes with a model on the hub.
        ranks: Ranks of a training on several GPUs whose memory to predict besides that of rank 0, each by executing
            it: ``Prediction.other_ranks``. A pipeline without them is billed by its fullest rank.
        host_memory: Memory of each machine in bytes or as ``"64 GiB"``, or ``"here"`` for this one (or its control
            group, with /dev/shm and disk): also say in ``Prediction.host_bill`` whether the processes fit in it. By
            default it is that of the workload's ``instance``.
        dataset_memory: Memory of a data set that lies in Python objects, in bytes or as ``"8 GiB"``, of which each
            worker gets a copy in time. By default it is mapped from files.
        host_paces: CPU times as multiples of the assumed host's (1.5: a host that takes half as long again), for each
            of which the step is predicted too: ``Prediction.time.at_paces``. Not for samples of different lengths.
        layouts: Replay the allocations with other addresses of segments, too, and those of float16 with first steps
            that gradient scaling skips, which takes a second or two: ``Prediction.memory.layouts`` and
            ``Prediction.memory.skipped_steps``. ``"scarce"``: only where less memory is free than reserved.
    """

    timeline: bool = option(False, TIMELINE)
    timed: bool = True
    calibration: Calibration | None = option(None, CALIBRATION)
    trust_remote_code: bool = option(False, TRUST_REMOTE_CODE)
    ranks: tuple[int, ...] = option(
        (),
        "On several GPUs, also execute these ranks, such as `1,7`, for their memory.",
        metavar="N,N",
        words=str | None,
        read=partial(whole_numbers, "--ranks"),
    )
    host_memory: int | str | None = option(None, HOST_MEMORY)
    dataset_memory: int | None = option(None, DATASET_MEMORY)
    host_paces: tuple[float, ...] = ()
    layouts: bool | Literal["scarce"] = True

    def check_calibration(self, workloads: Sequence[Workload]) -> None:
        """Raise ``WorkloadError`` where the calibration does not apply to the workloads' GPUs."""
        load_calibration(self.calibration, workloads)

    def of_era(self, workload: Workload) -> PredictRequest:
        """Return the request for a workload: no calibration applies to the libraries of 2022."""
        return replace(self, calibration=None) if workload.era == "2022" else self


@dataclass(frozen=True, slots=True)
class OpsRequest:
    """How to break a step down into its operations.

    Attributes:
        top: How many of the heaviest operations and modules to list.
        measured: Add a profile of this machine's GPU.
        calibration: See ``predict``.
        trust_remote_code: See ``predict``.
    """

    top: int = in_output(
        15, "How many of the heaviest operations and modules to show (default: 15).", metavar="N", min=1
    )
    measured: bool = option(False, "Add a profile of this machine's GPU.", name="--measure")
    calibration: Calibration | None = option(None, CALIBRATION)
    trust_remote_code: bool = option(False, TRUST_REMOTE_CODE)


def load_calibration(calibration: Calibration | Path | str | None, workloads: Sequence[Workload]) -> Calibration | None:
    """Load a calibration and check that it applies to the workloads' GPUs.

    Raises:
        WorkloadError: It cannot be read, it is of another GPU, or all workloads emulate the libraries of 2022.
    """
    found = resolve_calibration(calibration)
    if found is None:
        return None
    of_today = [workload for workload in workloads if workload.era != "2022"]
    if not of_today:
        raise WorkloadError(
            f"calibration {found.source}: it was measured with today's libraries and does not apply to those of 2022; "
            "remove the calibration, or predict for today's libraries"
        )
    for workload in of_today:
        found.check(workload.resolve_gpu())
    return found
