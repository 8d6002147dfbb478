"""``trainatomy doctor``: what is wrong with this machine.

``trainatomy data``: time the DataLoader of a training alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from trainatomy import api
from trainatomy.cli.options import DEBUG, FILE, JSON, command
from trainatomy.cli.output import progress, quiet_libraries, show_result
from trainatomy.cli.workloads import one_workload, workload_command
from trainatomy.errors import UnhealthyMachine, WorkloadError
from trainatomy.option import option
from trainatomy.reporters.doctor_sentences import verdict
from trainatomy.reporters.json import to_json
from trainatomy.reporters.text.doctor import doctor_page
from trainatomy.reporters.text.script import loader_page
from trainatomy.requests.measuring import DiagnoseRequest, LoaderRequest


@dataclass(frozen=True, slots=True)
class DoctorCommand(DiagnoseRequest):
    """A look at this machine that is shown."""

    json: bool = option(False, JSON)
    debug: bool = option(False, DEBUG)


@command
def doctor(request: DoctorCommand) -> None:
    """Check this machine: what is wrong, what it costs (if that was ever measured), and how to fix it.

    It checks links between GPUs and to the host, power and heat, memory errors, driver and libraries, environment
    variables, other processes, and limits of the host. It never changes a setting. Without a GPU it
    checks software and host.

    The exit code is 0 if nothing or only notes were found, and 9 with errors or warnings.
    """
    with progress("checking this machine") as stage, quiet_libraries(debug=request.debug):
        found = api.diagnose(request=request, stage=stage)
    show_result(to_json, doctor_page, found, json=request.json)
    if not found.healthy:
        raise UnhealthyMachine(f"{verdict(found)} on this machine")


@dataclass(frozen=True, slots=True)
class DataCommand(LoaderRequest):
    """Times of a DataLoader that are shown."""

    FIRST = ("dataset",)

    file: str | None = option(None, FILE)
    dataset: str | None = option(None, "Function that returns a dataset or a DataLoader.", metavar="FILE.py:FUNCTION")
    json: bool = option(False, JSON)
    debug: bool = option(False, DEBUG)
    flags: Mapping[str, Any] = field(default_factory=dict)


@workload_command
def data(request: DataCommand) -> None:
    """Time the DataLoader of a training alone, and say how many workers its step needs.

    Batches come from the workload's `data.factory` or, with `--dataset`, from your own dataset or DataLoader. The time
    of the step is predicted. The command also says how much host memory and /dev/shm the workers use, and how long they
    take to start.
    """
    file, dataset = request.file, request.dataset
    if file is not None and file.endswith(".py"):
        raise WorkloadError(
            f"{file}: the loader of a script cannot be timed apart from it; give the function that makes its dataset "
            f"or DataLoader: `trainatomy data WORKLOAD.yaml --dataset {file}:FUNCTION`. While the script trains, "
            "`trainatomy.watch` says how long each step waits for data."
        )
    has_workload = file is not None or any(value is not None for value in request.flags.values())
    if not has_workload and dataset is None:
        raise WorkloadError("data: name a workload, or a function with --dataset")
    workload = one_workload(file, request.flags) if has_workload else None
    with progress("timing the loader"), quiet_libraries(debug=request.debug):
        what: Any = workload if dataset is None else api.load_dataset(dataset)
        report = api.time_loader(what, workload=workload, request=request)
    show_result(to_json, loader_page, report, json=request.json)
