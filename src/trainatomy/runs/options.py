"""Options for predicting and running training runs: one value each, for the command line and for Python."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trainatomy.errors import WorkloadError

if TYPE_CHECKING:
    from pathlib import Path

    from trainatomy.catalog.calibrations import Calibration
    from trainatomy.records.store import Store
    from trainatomy.workload.schema import Workload

COMPARED_PACES = (0.5, 0.75, 1.25, 1.5, 2.0, 3.0, 4.0, 6.0, 9.0)
"""Paces of the host for which a training that is measured is predicted: between them the time is interpolated."""


@dataclass(frozen=True, slots=True)
class PredictOptions:
    """Options for predicting a training.

    Attributes:
        timeline: Include memory by component over the step.
        timed: Predict the time of a step; False predicts memory only, which is somewhat faster.
        trust_remote_code: Run the code that comes with a model on the hub.
        calibration: A calibration for the timing model; None for the one that ships.
        ranks: Ranks of a training on several GPUs whose memory is predicted besides that of rank 0.
        host_paces: CPU times as multiples of the assumed host's, for each of which the step is predicted too.
        layouts: Try other addresses of segments; False is somewhat faster, for one of many candidates.
    """

    timeline: bool = False
    timed: bool = True
    trust_remote_code: bool = False
    calibration: Calibration | None = None
    ranks: tuple[int, ...] = ()
    host_paces: tuple[float, ...] = ()
    layouts: bool = True

    def check(self, workloads: Sequence[Workload]) -> None:
        """Raise ``WorkloadError`` where the calibration does not apply to the workloads' GPUs."""
        load_calibration(self.calibration, workloads)

    def keywords(self, workload: Workload) -> dict[str, Any]:
        """Return the keywords of ``trainatomy.predict``; a calibration does not apply to the libraries of 2022."""
        return {
            "timeline": self.timeline,
            "trust_remote_code": self.trust_remote_code,
            "calibration": None if workload.era == "2022" else self.calibration,
            **({} if self.timed else {"timed": False}),
            **({"ranks": self.ranks} if self.ranks else {}),
            **({"host_paces": self.host_paces} if self.host_paces else {}),
            **({} if self.layouts else {"layouts": False}),
        }


@dataclass(frozen=True, slots=True)
class RunOptions:
    """Options for running training runs on this machine's GPU.

    Attributes:
        repeat: Runs per training.
        store: Where records are kept: a store, a folder or its URL.
        group: Name that the records of a comparison share; None derives it from the workloads.
        fresh: Run everything again, whatever is on record.
        time_limit: Seconds for a run.
        keep_gpus: Predict for the workloads' own GPUs instead of this machine's.
        title: The beginning of a derived group name.
        samples: Number of samples that times are given for.
        command: The command line, for the records.
    """

    repeat: int = 1
    store: Store | Path | str | None = None
    group: str | None = None
    fresh: bool = False
    time_limit: float | None = None
    keep_gpus: bool = False
    title: str = "comparison"
    samples: int | None = None
    command: str = ""

    def check(self) -> None:
        """Raise ``WorkloadError`` for a number of runs that is not positive."""
        if self.repeat < 1:
            raise WorkloadError(f"repeat: {self.repeat} is not a number of runs; give 1 or more")

    def changed(self) -> list[str]:
        """Return the names of options that make sense for runs only and differ from their defaults."""
        names = ("repeat", "store", "group", "fresh", "time_limit")
        return [name for name in names if getattr(self, name) != getattr(RunOptions(), name)]


def load_calibration(calibration: Calibration | Path | str | None, workloads: Sequence[Workload]) -> Calibration | None:
    """Load a calibration and check that it applies to the workloads' GPUs.

    Raises:
        WorkloadError: It cannot be read, it is of another GPU, or all workloads emulate the libraries of 2022.
    """
    from trainatomy.catalog.calibrations import resolve_calibration

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


def refuse_era(workloads: Sequence[Workload]) -> None:
    """Raise ``WorkloadError`` for workloads that emulate old libraries: only the installed ones can be measured."""
    for workload in workloads:
        if workload.era is not None:
            raise WorkloadError(
                f"{workload.where('era')}: a measurement runs the installed libraries; era {workload.era} can be "
                "predicted, but not measured",
                key="era",
            )
