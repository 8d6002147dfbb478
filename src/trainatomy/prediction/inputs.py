"""Inputs of a prediction besides the simulation: emulated libraries, CUDA context, NCCL, and their sources."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from trainatomy.analysis.outside_allocator import (
    local_memory_bytes,
    nccl_bytes,
    nccl_source,
    one_process_bytes,
    page_table_bytes,
)
from trainatomy.catalog.gpus import is_measured
from trainatomy.catalog.links import Links
from trainatomy.results.prediction import Basis, Fact

if TYPE_CHECKING:
    from trainatomy.simulator.simulation import Simulation
    from trainatomy.workload.schema import Workload


class EmulatedSoftware(NamedTuple):
    """The libraries that a prediction emulates.

    ``context`` is the key of the GPU's CUDA context (``GPU.contexts``); ``current`` is whether the timing model was
    fitted to these libraries.
    """

    context: str
    current: bool


def emulated_software(workload: Workload) -> EmulatedSoftware:
    """Return the libraries that the workload's ``era`` stands for: the installed ones, or those of January 2022.

    CUDA 11 loads all kernels with the context; later versions load them lazily.  A GPU that is newer than CUDA 11 has
    no such context, and the lazy one stands in.
    """
    if workload.era != "2022":
        return EmulatedSoftware("lazy", current=True)
    eager = "eager-cuda-11" in workload.resolve_gpu().contexts
    return EmulatedSoftware("eager-cuda-11" if eager else "lazy", current=False)


def context_bytes(workload: Workload, simulation: Simulation) -> int:
    """Return the bytes of the CUDA context with what libraries, local memory and pages of pinned memory take.

    HIP's is not known, nor what it takes beside: nothing is counted, unless the user gives the context's size.
    """
    gpu = workload.resolve_gpu()
    loaded = gpu.context(emulated_software(workload).context).holding(simulation.libraries)
    if gpu.is_amd:
        return loaded
    pages = page_table_bytes(sum(one.bytes for one in simulation.trace.pinned))
    return loaded + local_memory_bytes(simulation.stack_bytes, gpu) + pages


def nccl_bytes_of(workload: Workload, simulation: Simulation) -> int:
    """Return the bytes that NCCL holds in the simulated process; 0 on one GPU."""
    parallel, communicators = workload.parallel, simulation.communicators
    links = parallel.links(workload.resolve_gpu())
    if parallel.processes == 1:
        return one_process_bytes(links, parallel.world_size)
    return nccl_bytes(communicators, simulation.trace.rank, links, parallel.world_size, simulation.communicator_copies)


def facts_of(workload: Workload, simulation: Simulation) -> tuple[Fact, ...]:
    """Return the inputs that a prediction rests on; their titles and sentences are in ``reporters.labels``."""
    gpu, software = workload.resolve_gpu(), emulated_software(workload)
    context, nccl = context_bytes(workload, simulation), nccl_bytes_of(workload, simulation)
    allocator = f"PyTorch {'.'.join(map(str, simulation.torch_version))}"
    memory_source = gpu.source("memory_bytes")
    context_source = gpu.source(f"contexts.{software.context}.first_tensor_bytes")
    chosen_by = () if "convolution" not in simulation.libraries else (_cudnn_fact(workload, simulation),)
    return (
        Fact("simulated_steps", "", "computed", "meta tensors", simulation.steps, "steps"),
        Fact("allocations", "", "computed", "meta tensors", len(simulation.trace.origins), "allocations"),
        Fact("allocator", workload.allocator or "default settings", "computed", allocator),
        Fact("gpu_memory", "", _basis(memory_source), _citation(memory_source), gpu.memory_bytes, "bytes"),
        Fact("context", "", _basis(context_source), _citation(context_source), context, "bytes"),
        *chosen_by,
        *_link_facts(workload.parallel.links(gpu), nccl),
    )


def _cudnn_fact(workload: Workload, simulation: Simulation) -> Fact:
    """Return who chose the algorithms of convolutions and their workspaces."""
    if simulation.cudnn is None:
        return Fact("convolutions", "rules", "assumed", "random calls on an H200, cuDNN 9.19")
    measured = is_measured(workload.resolve_gpu())
    return Fact("convolutions", "library", "computed" if measured else "assumed", simulation.cudnn)


def _link_facts(links: Links | None, nccl: int) -> tuple[Fact, ...]:
    """Return the inputs of a training on several GPUs."""
    if links is None:
        return ()
    found = [Fact("link", links.intra.name, "computed", links.intra.source)]
    if links.inter is not None:
        found.append(Fact("network", links.inter.name, "assumed" if links.assumed else "computed", links.inter.source))
    return (*found, Fact("nccl", "", "assumed", nccl_source(), nccl, "bytes"))


def _basis(source: str) -> Basis:
    return "assumed" if source.startswith(("assumed", "unknown")) else "measured"


def _citation(source: str) -> str:
    return source.removeprefix("assumed: ")
