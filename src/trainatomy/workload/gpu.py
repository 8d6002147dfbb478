"""The GPU of a workload: one that ships as data, or one of those with some facts changed.

A cloud's machine as the description of a training's GPUs: what its name says of ``gpu`` and ``parallel``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, Tag
from pydantic_core import PydanticCustomError

from trainatomy.catalog.gpus import GPU, find_gpu, gpu_from_mapping, gpus, power_of
from trainatomy.catalog.instances import find_instance
from trainatomy.errors import WorkloadError
from trainatomy.units import bytes_in, many
from trainatomy.workload.section import Amount, Count, Index, Problem, Section, Text

if TYPE_CHECKING:
    from trainatomy.workload.schema import Workload


def _known_instance(name: str) -> str:
    """Return the name as it is listed; refuse an unknown one, with the nearest names."""
    try:
        return find_instance(name).id
    except WorkloadError as error:
        raise PydanticCustomError("instance", "{reason}", {"reason": str(error)}) from None


InstanceName = Annotated[Text, AfterValidator(_known_instance)]
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


def _bytes(value: Any) -> Any:
    """Convert ``80 GiB`` to bytes; a number without a unit is bytes already."""
    if not isinstance(value, str):
        return value
    if (found := bytes_in(value)) is None:
        raise PydanticCustomError("size", 'must be bytes, or a size such as "80 GiB" (KiB, MiB, GiB or TiB)')
    return found


def _capability(value: Any) -> Any:
    """Return a compute capability as a string; YAML reads ``9.0`` as a number."""
    text = str(value) if isinstance(value, float) else value
    if not isinstance(text, str) or not re.fullmatch(r"\d+\.\d", text):
        raise PydanticCustomError("capability", "must be a compute capability such as 9.0")
    return text


def _known(name: str) -> str:
    """Refuse an unknown GPU, with the nearest names."""
    try:
        find_gpu(name)
    except WorkloadError as error:
        raise PydanticCustomError("gpu", "{reason}", {"reason": str(error)}) from None
    return name


GPUName = Annotated[Text, AfterValidator(_known)]
"""The id or an alias of a GPU that ships as data."""


class RatesSpec(Section):
    """Peak rates of a GPU that is described, dense (without sparsity)."""

    fp64: Amount | None = Field(default=None, description="FLOP/s in fp64, without tensor cores")
    fp32: Amount | None = Field(default=None, description="FLOP/s in fp32, without tensor cores")
    tf32: Amount | None = Field(default=None, description="FLOP/s of tensor cores in TF32")
    fp16: Amount | None = Field(default=None, description="FLOP/s of tensor cores in fp16 with fp32 accumulation")
    bf16: Amount | None = Field(default=None, description="FLOP/s of tensor cores in bf16")
    fp8: Amount | None = Field(default=None, description="FLOP/s of tensor cores in fp8")


class GPUOverride(Section):
    """A known GPU with some facts changed, or one's own described by its differences from a known one."""

    base: GPUName = Field(default="h200", description="the GPU to start from")
    memory_bytes: Annotated[Count, BeforeValidator(_bytes)] | None = Field(
        default=None, description='memory that CUDA offers: bytes, or a size such as `"80 GiB"`'
    )
    context_bytes: Annotated[Index, BeforeValidator(_bytes)] | None = Field(
        default=None,
        description="memory of the process outside PyTorch's allocator (CUDA context, kernels): bytes or a size",
    )
    multiprocessors: Count | None = Field(default=None, description="number of streaming multiprocessors")
    capability: Annotated[str, BeforeValidator(_capability)] | None = Field(
        default=None, description="compute capability, such as `9.0`"
    )
    bandwidth_bytes_per_second: Annotated[Amount, Field(gt=0)] | None = Field(
        default=None, description="memory bandwidth of the data sheet"
    )
    power_limit_watts: Annotated[Amount, Field(gt=0)] | None = Field(
        default=None,
        description="power limit in watts, as `nvidia-smi -pl` sets it; it counts on GPUs of the Hopper generation",
    )
    rates_flop_per_second: RatesSpec | None = Field(
        default=None, description="peak rates by precision, dense; those not given are the base's"
    )

    def contradictions(self) -> list[Problem]:
        """Refuse a context that fills the memory, and a power limit of a GPU whose power is not known."""
        found = []
        if self.memory_bytes is not None and (self.context_bytes or 0) >= self.memory_bytes:
            found.append(Problem(("context_bytes",), "is as large as the GPU's memory"))
        if self.power_limit_watts is not None and power_of(self.resolve_gpu()) is None:
            known = ", ".join(gpu.id for gpu in gpus() if power_of(gpu) is not None)
            found.append(
                Problem(("power_limit_watts",), f"is simulated where power was measured: start from one of {known}")
            )
        return found

    def resolve_gpu(self) -> GPU:
        """Return the GPU with these changes."""
        changes = self.model_dump(exclude_none=True, exclude={"base", "context_bytes"})
        if self.context_bytes is not None:
            changes["context"] = {era: _context(self.context_bytes) for era in find_gpu(self.base).contexts}
        if self.rates_flop_per_second is not None:
            changes["rates_flop_per_second"] = self.rates_flop_per_second.model_dump(exclude_none=True)
        return gpu_from_mapping(changes, self.base)


def _context(size: int) -> dict[str, Any]:
    """Return a context that does not grow when kernels are loaded."""
    return {"first_tensor_bytes": size, "loads_bytes": {}, "environment": "given by the user"}


def _kind(value: Any) -> str:
    return "changed" if isinstance(value, Mapping | GPUOverride) else "named"


GPUChoice = Annotated[Annotated[GPUName, Tag("named")] | Annotated[GPUOverride, Tag("changed")], Discriminator(_kind)]
"""A GPU by name, or a mapping that changes one."""


@lru_cache
def resolve_gpu(choice: str | GPUOverride) -> GPU:
    """Return the GPU that a workload names, with the workload's changes."""
    return find_gpu(choice) if isinstance(choice, str) else choice.resolve_gpu()
