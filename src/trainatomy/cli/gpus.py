"""``trainatomy gpus``: the GPUs that ship as data.

``trainatomy models``: the model architectures that ship as data.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from trainatomy import api
from trainatomy.catalog.architectures import architectures
from trainatomy.catalog.gpus import find_gpu as find
from trainatomy.catalog.gpus import gpus as all_gpus
from trainatomy.catalog.instances import find_instance, instances, is_instance
from trainatomy.cli.options import DEBUG, JSON, command
from trainatomy.cli.output import progress, quiet_libraries, show, show_json, show_result
from trainatomy.cli.unused_imports import skip_unused_imports
from trainatomy.option import option
from trainatomy.reporters.json import architectures_to_json, gpus_to_json, instances_to_json, to_json
from trainatomy.reporters.text.gpus import (
    architectures_table,
    catalog_table,
    gpu_page,
    gpus_for_page,
    instance_page,
    instances_table,
)
from trainatomy.requests.comparing import CompareRequest
from trainatomy.requests.predicting import JOBS
from trainatomy.runs.pools import start_importing
from trainatomy.units import many
from trainatomy.workload.reading import read
from trainatomy.workload.schema import Workload


@dataclass(frozen=True, slots=True)
class GpusCommand:
    """GPUs to list, and a training to predict on each."""

    gpu: str | None = option(
        None,
        "Show one GPU, MIG instance (h200:3g.71gb) or cloud machine (p5.48xlarge), with the sources of figures.",
        name="",
        metavar="GPU",
    )
    instances: bool = option(False, "List the machines of clouds instead, with their prices.")
    workload: str | None = option(
        None,
        "Predict this training on every GPU: where it fits, how tightly, how fast.",
        name="--for",
        metavar="WORKLOAD.yaml",
    )
    jobs: int | None = option(None, JOBS)
    json: bool = option(False, JSON)
    debug: bool = option(False, DEBUG)


@command
def gpus(request: GpusCommand) -> None:
    """List the known GPUs, or show one with the source of every figure.

    With `--for`, predict a training as it is on each of them; `trainatomy compare --gpu all` does so for one that
    options describe, and `trainatomy fit --gpu all` also finds the best settings for each.
    """
    if request.instances or (request.gpu is not None and is_instance(request.gpu)):
        _show_instances(request)
        return
    chosen = all_gpus() if request.gpu is None else (find(request.gpu),)
    if request.workload is not None:
        _show_for(read(request.workload, {}), {each.name: {"gpu": each.id} for each in chosen}, request)
    elif request.json:
        show_json(gpus_to_json(chosen))
    else:
        show(catalog_table(chosen) if request.gpu is None else gpu_page(chosen[0]))


def _show_instances(request: GpusCommand) -> None:
    """List the machines of clouds, or show one."""
    chosen = tuple(instances().values()) if request.gpu is None else (find_instance(request.gpu),)
    if request.workload is not None:
        _show_for(read(request.workload, {}), {each.id: {"instance": each.id} for each in chosen}, request)
    elif request.json:
        show_json(instances_to_json(chosen))
    else:
        show(instances_table(chosen) if request.gpu is None else instance_page(chosen[0]))


def _show_for(workload: Workload, places: Mapping[str, Mapping[str, str]], request: GpusCommand) -> None:
    """Predict a training on several GPUs or machines, by their names, which say what changes in the workload."""
    doing = f"simulating {workload.display_name} on {many(len(places), 'machine' if request.instances else 'GPU')}"
    jobs = api.jobs_for(len(places), request.jobs)
    hidden = skip_unused_imports([workload], trust_remote_code=False)
    with quiet_libraries(debug=request.debug), progress(doing):
        start_importing(jobs, hidden, deepspeed=workload.train.deepspeed is not None)
        workloads = [workload.replace({**changes, "name": name}) for name, changes in places.items()]
        how = CompareRequest(jobs=jobs, layouts=True if request.json else "scarce")
        comparison = api.predict_comparison(workloads, how)
    show_result(to_json, gpus_for_page, comparison, json=request.json)


@dataclass(frozen=True, slots=True)
class ModelsCommand:
    """Architectures to list."""

    json: bool = option(False, JSON)
    debug: bool = option(False, DEBUG)


@command
def models(request: ModelsCommand) -> None:
    """List the model architectures that need no network, by their name on the Hugging Face hub."""
    entries = architectures()
    show_result(architectures_to_json, architectures_table, entries, json=request.json)
