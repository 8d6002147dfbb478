"""Division of a training among GPUs: machines, degrees of parallelism, and PyTorch's own options.

The degrees carry the names of accelerate's ``ParallelismConfig``.
"""

from __future__ import annotations

import os
from math import prod
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field
from pydantic_core import PydanticCustomError

from trainatomy.catalog.gpus import GPU
from trainatomy.catalog.links import Links, find_link, is_through_host, links_of
from trainatomy.errors import WorkloadError
from trainatomy.results.prediction import copies_of_weights
from trainatomy.workload.section import Amount, Count, Names, Problem, Section, Text

Strategy = Literal["ddp", "fsdp2", "fsdp1", "zero1", "dp"]
Half = Literal["float32", "float16", "bfloat16"]
PipelineSchedule = Literal["GPipe", "1F1B", "LoopedBFS", "Interleaved1F1B", "InterleavedZeroBubble"]
"""Schedules by their names in PyTorch (``torch.distributed.pipelining.schedules.get_schedule_class``)."""

NVLS_VARIABLE = "NCCL_NVLS_ENABLE"

LOOPED = frozenset({"LoopedBFS", "Interleaved1F1B", "InterleavedZeroBubble"})
"""Schedules with several stages on each rank."""


class MixedPrecisionSpec(Section):
    """The dtypes of FSDP: ``MixedPrecisionPolicy`` of version 2, ``MixedPrecision`` of version 1."""

    param_dtype: Half | None = Field(default=None, description="dtype of gathered weights and of the computation")
    reduce_dtype: Half | None = Field(default=None, description="dtype in which gradients are reduced")


def _known_link(name: str) -> str:
    """Refuse an unknown link, with the nearest names."""
    try:
        return find_link(name)
    except WorkloadError as error:
        raise PydanticCustomError("link", "{reason}", {"reason": str(error)}) from None


def _speed_as_text(value: Any) -> Any:
    """Return bytes per second as text: YAML reads ``25.0e+9`` as a number."""
    return f"{value:g}" if isinstance(value, int | float) and not isinstance(value, bool) else value


LinkName = Annotated[Text, BeforeValidator(_speed_as_text), AfterValidator(_known_link)]
"""The name of a link in ``catalog/links.yaml``, or a speed."""


class LinkSpec(Section):
    """The links between the GPUs of a training, where they are not the usual ones."""

    intra: LinkName | None = Field(
        default=None,
        description="between the GPUs of a machine: a name such as `nvlink4`, `pcie5` or `pcie5-host` (through host "
        'memory; `host`: over this GPU\'s PCIe), or bytes per second of each GPU, as `"50 GB/s"` or `"400 Gb/s"` '
        "(default: the usual one)",
    )
    inter: LinkName | None = Field(
        default=None,
        description="between machines: a name such as `infiniband-ndr`, `efa-400` or `ethernet-100`, or bytes per "
        "second of each GPU (default: InfiniBand as fast as machines with these GPUs usually have)",
    )
    nvls: bool | None = Field(
        default=None,
        description="whether NCCL may let NVSwitch reduce and multicast (NVLS), where the link can: `false` is "
        "`NCCL_NVLS_ENABLE=0` (default: what that variable says, otherwise yes)",
    )


class ParallelSpec(Section):
    """The GPUs of a training, and how it is spread over them."""

    gpus: Count = Field(default=1, description="GPUs of each machine that the training uses")
    nodes: Count = Field(default=1, description="machines")
    strategy: Strategy | None = Field(
        default=None,
        description=(
            "how `loop: pytorch` spreads the training over data-parallel ranks (default: `ddp`); `zero1`: DDP with "
            "`ZeroRedundancyOptimizer`; `dp`: `DataParallel`, one process with all GPUs. With `loop: trainer`, "
            "`train.fsdp` says it, and `dp` is what the Trainer does without a launcher"
        ),
    )
    dp_replicate_size: Count | None = Field(
        default=None, description="ranks that hold copies of the same weights (default: what the other degrees leave)"
    )
    dp_shard_size: Count | None = Field(
        default=None, description="ranks that FSDP shards weights over (default: what the other degrees leave)"
    )
    tp_size: Count = Field(default=1, description="ranks that share each layer (tensor parallelism)")
    enable_expert_parallel: bool = Field(
        default=False,
        description="with tp_size: ranks share the experts of each layer instead of each matrix, by the model's plan "
        "(transformers' `DistributedConfig`)",
    )
    sequence_parallel: bool = Field(
        default=False,
        description="with tp_size: norms and what is between the layers work on shards of the sequence "
        "(PyTorch's `SequenceParallel`)",
    )
    cp_size: Count = Field(default=1, description="ranks that share each sequence (context parallelism)")
    cp_comm_strategy: Literal["allgather", "alltoall"] = Field(
        default="allgather", description="how context parallelism passes keys and values around (accelerate's name)"
    )
    pp_size: Count = Field(default=1, description="ranks that share the layers, each with its own (a pipeline)")
    pp_schedule: PipelineSchedule | None = Field(
        default=None,
        description="order of a pipeline's work, by PyTorch's names (default: `1F1B`; with several stages on each rank "
        "`Interleaved1F1B`)",
    )
    pp_microbatches: Count | None = Field(
        default=None,
        description="micro-batches that a pipeline divides a batch into (PyTorch's `n_microbatches`; default: one for "
        "each sample)",
    )
    pp_stages_per_rank: Count | None = Field(
        default=None, description="stages on each rank (default: 1; 2 with schedules that interleave them)"
    )
    gradient_as_bucket_view: bool = Field(default=False, description="DDP: gradients are views of its buckets")
    static_graph: bool = Field(default=False, description="DDP: the graph of a step never changes")
    find_unused_parameters: bool = Field(default=False, description="DDP: look for parameters without a gradient")
    bucket_cap_mb: Amount | None = Field(default=None, description="DDP: size of a bucket in MiB (default: 25)")
    broadcast_buffers: bool = Field(default=True, description="DDP: send buffers from rank 0 in each forward pass")
    reshard_after_forward: bool | Count | Literal["all_but_last"] | None = Field(
        default=None,
        description="FSDP: free gathered weights after forward; a number: keep them sharded that far; FSDP2: "
        "`all_but_last` keeps those of the last layer, which backward needs first",
    )
    mp_policy: MixedPrecisionSpec | None = Field(default=None, description="FSDP: mixed precision")
    transformer_layer_cls_to_wrap: Names = Field(
        default=(), description="FSDP: classes of the layers that are wrapped one by one (default: the model's own)"
    )
    offload_policy: Literal["cpu"] | None = Field(
        default=None, description="FSDP2: `cpu` keeps sharded weights, gradients and optimizer states in host memory"
    )
    sync_each_batch: bool = Field(
        default=False, description="reduce gradients after every micro-batch instead of the last one only"
    )
    link: LinkSpec = Field(default_factory=LinkSpec, description="the links between the GPUs")

    @property
    def world_size(self) -> int:
        """Number of GPUs; a process for each, unless ``DataParallel`` uses all of them in one."""
        return self.gpus * self.nodes

    @property
    def processes(self) -> int:
        """Number of processes: one with all GPUs for ``DataParallel``, else one for each GPU."""
        return 1 if self.strategy == "dp" else self.world_size

    @property
    def devices(self) -> int:
        """Number of GPUs that each process works on."""
        return self.world_size // self.processes

    @property
    def data_parallel_size(self) -> int:
        """Number of ranks, or of GPUs of ``DataParallel``, that process different samples."""
        return self.world_size // (self.tp_size * self.cp_size * self.pp_size)

    @property
    def schedule(self) -> PipelineSchedule:
        """Schedule of the pipeline."""
        return self.pp_schedule or ("Interleaved1F1B" if (self.pp_stages_per_rank or 1) > 1 else "1F1B")

    @property
    def stages_per_rank(self) -> int:
        """Stages of the pipeline on each rank."""
        return self.pp_stages_per_rank or (2 if self.schedule in LOOPED else 1)

    @property
    def stages(self) -> int:
        """Stages of the whole pipeline."""
        return self.pp_size * self.stages_per_rank

    @property
    def ranks_per_stage(self) -> int:
        """Number of ranks that hold the same stages of a pipeline, whole or in shards; they are neighbours."""
        return self.world_size // self.pp_size

    @property
    def replicas(self) -> int:
        """Number of copies of the weights that FSDP keeps: 1 unless its shards are in groups of ranks."""
        return copies_of_weights(self.data_parallel_size, self.dp_replicate_size, self.dp_shard_size)

    @property
    def without_peer_access(self) -> bool:
        """True if the description asks for a link through host memory, whatever the GPUs could do."""
        return self.link.intra is not None and is_through_host(self.link.intra)

    def links(self, gpu: GPU) -> Links | None:
        """Return the links between the GPUs, None for a training on one."""
        if self.world_size == 1:
            return None
        return links_of(gpu, self.gpus, self.nodes, self.link.intra, self.link.inter, nvls=self.uses_nvls)

    @property
    def uses_nvls(self) -> bool:
        """True if NCCL may use NVSwitch's multicast, by the description or by NCCL's own variable."""
        return os.environ.get(NVLS_VARIABLE, "").strip() != "0" if self.link.nvls is None else self.link.nvls

    @property
    def nccl_environment(self) -> dict[str, str]:
        """The variables that make NCCL communicate as described."""
        without = {"NCCL_P2P_DISABLE": "1"} if self.without_peer_access else {}
        return without | ({NVLS_VARIABLE: "0"} if self.link.nvls is False else {})

    def degree_problems(self) -> list[Problem]:
        """Refuse degrees that do not multiply to the number of GPUs."""
        given = {
            name: size
            for name in ("dp_replicate_size", "dp_shard_size", "tp_size", "cp_size", "pp_size")
            if (size := getattr(self, name)) not in (None, 1)
        }
        product, total = prod(given.values()), self.world_size
        both = self.dp_replicate_size is not None and self.dp_shard_size is not None
        if product == total or (not both and total % product == 0):
            return []
        shown = " × ".join(f"{name} {size}" for name, size in given.items()) or "dp_replicate_size 1 × dp_shard_size 1"
        count = f"{self.gpus} GPUs" + (f" × {self.nodes} nodes" if self.nodes > 1 else "")
        relation = "is not" if both or product > total else "does not divide"
        return [Problem((next(iter(given), "gpus"),), f"{shown} = {product} {relation} {total} ({count})")]
