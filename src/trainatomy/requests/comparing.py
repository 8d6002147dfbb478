"""The request of a comparison: several training runs, predicted or measured."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from trainatomy.catalog.calibrations import Calibration
from trainatomy.errors import WorkloadError
from trainatomy.option import in_output, option, shared_fields
from trainatomy.records.store import Store
from trainatomy.requests.measuring import PLACE
from trainatomy.requests.predicting import (
    CALIBRATION,
    EXECUTOR,
    JOBS,
    TRUST_REMOTE_CODE,
    PredictRequest,
)


@dataclass(frozen=True, slots=True)
class CompareRequest:
    """How to predict several training runs and, with ``measure``, to run them on this machine's GPU.

    Attributes:
        measure: Run each of them in fresh processes; ``repeat``, ``store``, ``group``, ``fresh`` and ``time_limit``
            need it.
        repeat: Runs per training.
        effective_batch_size: Samples of an optimizer step on all GPUs, the same for all of them: accumulation steps are
            set to this number over batch size × data-parallel ranks.
        store: Where records are kept: a store, a folder or its URL (default: TRAINATOMY_RECORDS, or
            ./trainatomy-records). Runs that are on record are not repeated, so an interrupted comparison continues
            where it stopped.
        group: Name that the records share; derived from the workloads by default.
        fresh: Run everything again, whatever is on record.
        time_limit: Seconds for each run.
        timeline: See ``predict``.
        calibration: See ``predict``.
        trust_remote_code: See ``predict``.
        jobs: Processes that predict in parallel: by default this one or, with ``executor``, all that it has. A script
            that asks for several must start its own work behind ``if __name__ == "__main__"``.
        executor: Where to predict in place of local processes: ``"dask"`` or ``"ray"`` (started on this machine), the
            address of a cluster (``dask://HOST:PORT``, ``tcp://…``, ``ray://…``), a ``distributed.Client``, or an
            executor of ``concurrent.futures``. Predictions whose worker dies are repeated.
        keep: Folder (or its URL, for any filesystem that fsspec knows) in which each prediction is kept as soon as it
            is made, and from which an interrupted comparison continues. Workers of ``executor`` must reach it too.
        layouts: See ``predict``.
        keep_gpus: Predict for the workloads' own GPUs instead of this machine's.
        title: The beginning of a derived group name.
        samples: Number of samples that times are given for.
        command: The command line, for the records.
    """

    measure: bool = option(False, "Also run each training on this machine's GPU, one by one in fresh processes.")
    repeat: int = option(1, "With --measure: runs per training; median and spread are shown.", metavar="N", min=1)
    effective_batch_size: int | None = option(
        None,
        "Samples per optimizer step on all GPUs, the same in all rows: sets the accumulation steps.",
        metavar="N",
        min=1,
    )
    store: Store | Path | str | None = option(None, PLACE)
    group: str | None = in_output(
        None,
        "With --measure: name that the records share, under which an interrupted comparison continues.",
        metavar="NAME",
    )
    fresh: bool = option(False, "With --measure: run everything again, whatever is on record.")
    time_limit: float | None = option(
        None, "With --measure: stop a run after this many seconds.", metavar="SECONDS", min=0
    )
    timeline: bool = False
    calibration: Calibration | None = option(None, CALIBRATION)
    trust_remote_code: bool = option(False, TRUST_REMOTE_CODE)
    jobs: int | None = option(None, JOBS)
    executor: object = option(None, EXECUTOR)
    keep: Path | str | None = option(
        None,
        "Keep each prediction in this folder or URL as soon as it is made; an interrupted comparison continues there.",
        metavar="PLACE",
        words=str | None,
    )
    layouts: bool | Literal["scarce"] = True
    keep_gpus: bool = False
    title: str = "comparison"
    samples: int | None = None
    command: str = ""

    @property
    def predicting(self) -> PredictRequest:
        """How each of them is predicted."""
        return PredictRequest(**shared_fields(PredictRequest, self))

    def check(self) -> None:
        """Raise ``WorkloadError`` for a number of runs that is not positive."""
        if self.repeat < 1:
            raise WorkloadError(f"repeat: {self.repeat} is not a number of runs; give 1 or more")

    def changed(self) -> list[str]:
        """Return the names of what makes sense for runs only and differs from its default."""
        names = ("repeat", "store", "group", "fresh", "time_limit")
        return [name for name in names if getattr(self, name) != getattr(CompareRequest(), name)]
