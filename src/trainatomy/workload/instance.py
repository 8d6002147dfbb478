"""A cloud's machine as the description of a training's GPUs: what its name says of ``gpu`` and ``parallel``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import AfterValidator
from pydantic_core import PydanticCustomError

from trainatomy.catalog.gpus import find_gpu
from trainatomy.catalog.instances import find_instance
from trainatomy.errors import WorkloadError
from trainatomy.units import many
from trainatomy.workload.section import Problem, Text

if TYPE_CHECKING:
    from trainatomy.workload.schema import Workload


def _known(name: str) -> str:
    """Return the name as it is listed; refuse an unknown one, with the nearest names."""
    try:
        return find_instance(name).id
    except WorkloadError as error:
        raise PydanticCustomError("instance", "{reason}", {"reason": str(error)}) from None


InstanceName = Annotated[Text, AfterValidator(_known)]
"""The name of a machine in ``catalog/instances.yaml``."""


def with_instance(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the mapping of a workload with the GPUs of the machine that it names; what it says itself stays."""
    parallel = raw.get("parallel") or {}
    try:
        found = find_instance(raw["instance"]) if isinstance(raw.get("instance"), str) else None
    except WorkloadError:
        return raw  # validation says so
    if found is None or not isinstance(parallel, Mapping):
        return raw
    gpu = raw.get("gpu", found.gpu)
    gpu = {"base": found.gpu, **gpu} if isinstance(gpu, Mapping) else gpu
    is_part = ":" in str(gpu["base"] if isinstance(gpu, Mapping) else gpu)  # a process sees one MIG instance
    filled = {"gpus": 1 if is_part else found.gpus, **parallel}
    link = parallel.get("link") or {}
    if found.network and parallel.get("nodes", 1) != 1 and isinstance(link, Mapping):
        filled["link"] = {"inter": found.network, **link}
    return {**raw, "parallel": filled, "gpu": gpu}


def state_instance(workload: Workload, mapping: dict[str, Any]) -> None:
    """State in the mapping of a workload the number of GPUs, which the name of its machine would fill in otherwise."""
    if workload.instance is not None:
        mapping["parallel"] = {**mapping.get("parallel", {}), "gpus": workload.parallel.gpus}


def without_instance(mapping: dict[str, Any]) -> None:
    """Remove the name of a machine from a raw mapping, whose number of GPUs stays."""
    filled = with_instance(mapping)
    if "gpus" in (parallel := filled.get("parallel") or {}):
        mapping["parallel"] = {**(mapping.get("parallel") or {}), "gpus": parallel["gpus"]}
    mapping.pop("instance", None)


def instance_problems(workload: Workload) -> list[Problem]:
    """Return where the GPUs of a workload are not those of the machine that it names."""
    if workload.instance is None:
        return []
    found = find_instance(workload.instance)
    named = workload.gpu if isinstance(workload.gpu, str) else workload.gpu.base
    problems = []
    if find_gpu(named).card != found.gpu:
        problems.append(Problem(("gpu",), f"is {named}, and {found.id} has {found.gpu}: leave out one of the two"))
    if (gpus := workload.parallel.gpus) > found.gpus:
        has = f"is {gpus}, and {found.id} has {many(found.gpus, 'GPU')}"
        problems.append(Problem(("parallel", "gpus"), f"{has}: use fewer, or several machines (parallel.nodes)"))
    return problems
