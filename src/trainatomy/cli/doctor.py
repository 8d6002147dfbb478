"""``trainatomy doctor``: what is wrong with this machine.

``trainatomy data``: time the DataLoader of a training alone.
"""

from __future__ import annotations

from typing import Annotated, Any

import typer

from trainatomy.cli.options import CalibrationFile, Debug, Json, in_run
from trainatomy.cli.output import progress, quiet_libraries, show, show_json
from trainatomy.cli.workloads import one_workload, with_workload_options
from trainatomy.errors import UnhealthyMachine, WorkloadError
from trainatomy.reporters.json import to_json
from trainatomy.reporters.text.script import loader_page

Gpu = Annotated[
    list[int] | None,
    in_run("--gpu", "Check this GPU only, numbered as in nvidia-smi; repeatable.", min=0, metavar="N"),
]
Bandwidth = Annotated[
    bool,
    in_run(
        "--bandwidth/--no-bandwidth",
        "Measure copies, and clocks under load: a second for each GPU that is not in use (default: on).",
    ),
]
WatchPid = Annotated[
    int | None, in_run("--watch-pid", "Watch this running training instead of measuring.", metavar="PID", min=1)
]
Seconds = Annotated[
    float | None,
    in_run("--seconds", "How long to watch (default: 5 with --watch-pid, otherwise not at all).", metavar="N", min=0.1),
]


def doctor(
    gpu: Gpu = None,
    bandwidth: Bandwidth = True,
    watch_pid: WatchPid = None,
    seconds: Seconds = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Check this machine: what is wrong, what it costs (if that was ever measured), and how to fix it.

    It checks links between GPUs and to the host, power and heat, memory errors, driver and libraries, environment
    variables, other processes, and limits of the host. It never changes a setting. Without a GPU it
    checks software and host.

    The exit code is 0 if nothing or only notes were found, and 9 with errors or warnings.
    """
    with progress("checking this machine") as stage, quiet_libraries(debug=debug):
        from trainatomy.api.measuring import diagnose
        from trainatomy.reporters.doctor_sentences import verdict
        from trainatomy.reporters.text.doctor import doctor_page

        found = diagnose(gpus=gpu or (), bandwidth=bandwidth, seconds=seconds or 0.0, pid=watch_pid, stage=stage)
    if json:
        show_json(to_json(found))
    else:
        show(doctor_page(found))
    if not found.healthy:
        raise UnhealthyMachine(f"{verdict(found)} on this machine")


File = Annotated[
    str | None,
    typer.Argument(metavar="WORKLOAD.yaml", help="A file that describes the training.", show_default=False),
]
DatasetFunction = Annotated[
    str | None,
    in_run("--dataset", "Function that returns a dataset or a DataLoader.", metavar="FILE.py:FUNCTION"),
]
Workers = Annotated[
    str, in_run("--workers", "Numbers of worker processes to try (default: 0,1,2,4,8).", metavar="N,N,…")
]
Prefetch = Annotated[
    int, in_run("--prefetch-factor", "Batches that each worker makes ahead (default: 2).", metavar="N", min=1)
]
Pinned = Annotated[bool, in_run("--pin-memory/--no-pin-memory", "Copy batches to pinned memory, if there is a GPU.")]
Persistent = Annotated[
    bool, in_run("--persistent-workers/--no-persistent-workers", "Keep the workers from epoch to epoch.")
]
SecondsOfWorkers = Annotated[
    float, in_run("--seconds", "Seconds for each number of workers (default: 2).", metavar="SECONDS", min=0.1)
]
StepSeconds = Annotated[
    float | None,
    in_run("--step-seconds", "Duration of a training step (default: the predicted one).", metavar="SECONDS", min=1e-6),
]


@with_workload_options
def data(
    file: File = None,
    dataset: DatasetFunction = None,
    workers: Workers = "0,1,2,4,8",
    prefetch_factor: Prefetch = 2,
    pin_memory: Pinned = True,
    persistent_workers: Persistent = True,
    seconds: SecondsOfWorkers = 2.0,
    step_seconds: StepSeconds = None,
    calibration: CalibrationFile = None,
    json: Json = False,
    debug: Debug = False,
    **flags: Any,
) -> None:
    """Time the DataLoader of a training alone, and say how many workers its step needs.

    Batches come from the workload's `data.factory` or, with `--dataset`, from your own dataset or DataLoader. The time
    of the step is predicted. The command also says how much host memory and /dev/shm the workers use, and how long they
    take to start.
    """
    if file is not None and file.endswith(".py"):
        raise WorkloadError(
            f"{file}: the loader of a script cannot be timed apart from it; give the function that makes its dataset "
            f"or DataLoader: `trainatomy data WORKLOAD.yaml --dataset {file}:FUNCTION`. While the script trains, "
            "`trainatomy.watch` says how long each step waits for data."
        )
    has_workload = file is not None or any(value is not None for value in flags.values())
    if not has_workload and dataset is None:
        raise WorkloadError("data: name a workload, or a function with --dataset")
    workload = one_workload(file, flags) if has_workload else None
    with progress("timing the loader"), quiet_libraries(debug=debug):
        from trainatomy import api
        from trainatomy.training import factory

        what: Any = workload if dataset is None else factory.load(dataset, "--dataset")
        report = api.time_loader(
            what,
            workload=workload,
            workers=_numbers(workers),
            prefetch_factor=prefetch_factor,
            pin_memory=pin_memory,
            persistent_workers=persistent_workers,
            seconds=seconds,
            step_seconds=step_seconds,
            calibration=calibration,
        )
    if json:
        show_json(to_json(report))
    else:
        show(loader_page(report))


def _numbers(text: str) -> list[int]:
    try:
        return [int(word) for word in text.split(",")]
    except ValueError:
        raise WorkloadError(f"--workers: {text!r} is not a list of numbers such as 0,2,4") from None
