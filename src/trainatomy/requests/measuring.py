"""Requests that use this machine: its GPU, its links, its host."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from trainatomy.catalog.calibrations import Calibration
from trainatomy.errors import WorkloadError
from trainatomy.option import Option, option, output_file, whole_numbers
from trainatomy.records.store import Store
from trainatomy.requests.predicting import CALIBRATION, TRUST_REMOTE_CODE

RECORDS = Option(
    "Folder or URL for records of measured runs (default: TRAINATOMY_RECORDS, or ./trainatomy-records).",
    name="--records",
    panel="Output",
    metavar="PATH",
)
PLACE = replace(RECORDS, words=str | None)
"""Where records are kept: a store, a folder or its URL."""


@dataclass(frozen=True, slots=True)
class MeasureRequest:
    """How to measure a training on this machine's GPU, beside its prediction.

    Attributes:
        components: Make the recorded run, which attributes memory to components.
        trace: File for the allocation trace of the recorded run.
        time_limit: Seconds for everything.
        store: Where records are kept: a store, a folder or its URL.
        calibration: See ``predict``.
        trust_remote_code: See ``predict``.
        keep_gpus: Predict for the workload's own GPU instead of this machine's.
        command: The command line, for the record.
    """

    components: bool = option(True, "Make a second, recorded run, which attributes memory to components.")
    trace: Path | None = output_file(None, "File for the allocation trace of the recorded run.", metavar="FILE")
    time_limit: float | None = option(None, "Stop after this many seconds.", metavar="SECONDS", min=0)
    store: Store | Path | str | None = option(None, PLACE)
    calibration: Calibration | None = option(None, CALIBRATION)
    trust_remote_code: bool = option(False, TRUST_REMOTE_CODE)
    keep_gpus: bool = False
    command: str = ""


@dataclass(frozen=True, slots=True)
class CalibrateRequest:
    """How to calibrate the timing model on this machine's GPU.

    Attributes:
        time_limit: Seconds; measurements that do not fit are left out.
        gpus: GPUs between which collectives are measured, each in a process of its own.
        force: Calibrate even if the machine is busy with other work, which makes its CPU seem slow.
    """

    time_limit: float = option(
        120.0, "Stop measuring after this many seconds (default: 120).", metavar="SECONDS", min=1
    )
    gpus: int = option(1, "Also measure collectives between this many GPUs of this machine (default: 1, none).", min=1)
    force: bool = option(False, "Calibrate even if the machine is busy with other work, which makes its CPU seem slow.")


@dataclass(frozen=True, slots=True)
class LoaderRequest:
    """How to time a DataLoader.

    Attributes:
        workers: Numbers of worker processes to try.
        prefetch_factor: Batches that each worker makes ahead.
        pin_memory: Copy batches to pinned memory, where there is a GPU.
        persistent_workers: Keep the workers from epoch to epoch.
        seconds: Seconds for each number of workers.
        step_seconds: Duration of the step, in place of the predicted one.
        calibration: See ``predict``.
    """

    workers: tuple[int, ...] = option(
        (0, 1, 2, 4, 8),
        "Numbers of worker processes to try (default: 0,1,2,4,8).",
        metavar="N,N,…",
        words=str | None,
        read=partial(whole_numbers, "--workers"),
    )
    prefetch_factor: int = option(2, "Batches that each worker makes ahead (default: 2).", metavar="N", min=1)
    pin_memory: bool = option(True, "Copy batches to pinned memory, if there is a GPU.")
    persistent_workers: bool = option(True, "Keep the workers from epoch to epoch.")
    seconds: float = option(2.0, "Seconds for each number of workers (default: 2).", metavar="SECONDS", min=0.1)
    step_seconds: float | None = option(
        None, "Duration of a training step (default: the predicted one).", metavar="SECONDS", min=1e-6
    )
    calibration: Calibration | None = option(None, CALIBRATION)

    def check(self) -> None:
        """Raise ``WorkloadError`` for numbers that are none of workers, batches or seconds."""
        wrong = any(count < 0 for count in self.workers)
        if wrong or not self.workers or self.prefetch_factor < 1 or self.seconds <= 0:
            raise WorkloadError("workers, prefetch_factor, seconds: give numbers of workers from 0, and others above 0")


@dataclass(frozen=True, slots=True)
class DiagnoseRequest:
    """How to look at this machine.

    Attributes:
        gpus: Numbers of the GPUs to look at, as in nvidia-smi; all if empty.
        bandwidth: Measure copies, and clocks under load (about a second for each GPU); not on GPUs that are in use.
        pid: Process of a running training to watch.
        seconds: Watch it for so long; 5 s if ``pid`` is given and this is left out.
        died: How a training died: its exit code, its last lines, a line of the kernel's log, ``memory.events``, or the
            file that holds any of them.
    """

    gpus: tuple[int, ...] = option(
        (), "Check this GPU only, numbered as in nvidia-smi; repeatable.", name="--gpu", metavar="N", min=0
    )
    bandwidth: bool = option(
        True, "Measure copies, and clocks under load: a second for each GPU that is not in use (default: on)."
    )
    pid: int | None = option(
        None, "Watch this running training instead of measuring.", name="--watch-pid", metavar="PID", min=1
    )
    seconds: float = option(
        0.0,
        "How long to watch (default: 5 with --watch-pid, otherwise not at all).",
        metavar="N",
        min=0.1,
        words=float | None,
    )
    died: str = option(
        "",
        "Say which limit a training died of: its exit code (`-9`, `137`), its last lines, a line of the kernel's "
        "log, memory.events, or a file with any of them.",
        metavar="TEXT|FILE",
    )
