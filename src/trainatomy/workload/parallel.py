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

_LOOPED = frozenset({"LoopedBFS", "Interleaved1F1B", "InterleavedZeroBubble"})
"""Schedules with several stages on each rank."""
CP_STRATEGY = "needs strategy: fsdp2, as accelerate runs it"
_PIPELINE_OPTIONS = ("pp_schedule", "pp_microbatches", "pp_stages_per_rank")

_OPTIONS: dict[str, frozenset[str]] = {
    "gradient_as_bucket_view": frozenset({"ddp", "zero1"}),
    "static_graph": frozenset({"ddp"}),
    "find_unused_parameters": frozenset({"ddp", "zero1"}),
    "bucket_cap_mb": frozenset({"ddp", "zero1"}),
    "broadcast_buffers": frozenset({"ddp", "zero1"}),
    "reshard_after_forward": frozenset({"fsdp2", "fsdp1"}),
    "mp_policy": frozenset({"fsdp2", "fsdp1"}),
    "offload_policy": frozenset({"fsdp2"}),
    "transformer_layer_cls_to_wrap": frozenset({"fsdp2", "fsdp1"}),
}
"""The strategies that each option belongs to."""


def belongs_to(option: str, strategy: str) -> bool:
    """Return whether a strategy has an option; options of no strategy in particular belong to all."""
    return strategy in _OPTIONS.get(option, {strategy})


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
        description="how `loop: pytorch` spreads the training over data-parallel ranks: `ddp` (the default), `fsdp2`, "
        "`fsdp1`, `zero1` (DDP with `ZeroRedundancyOptimizer`) or `dp` (`DataParallel`: one process with all GPUs); "
        "with `loop: trainer`, `train.fsdp` says it, and `dp` is what the Trainer does without a launcher",
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
    reshard_after_forward: bool | Count | None = Field(
        default=None, description="FSDP: free gathered weights after forward; a number: keep them sharded that far"
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
        return self.pp_stages_per_rank or (2 if self.schedule in _LOOPED else 1)

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

    def contradictions(self) -> list[Problem]:
        """Refuse degrees that do not multiply to the number of GPUs, and options of another strategy."""
        return [*self._contexts(), *self._degrees(), *self._options(), *self._pipeline()]

    def _contexts(self) -> list[Problem]:
        """Refuse what context parallelism cannot be combined with."""
        if self.cp_size == 1:
            reason = "belongs to context parallelism: set parallel.cp_size"
            return [Problem(("cp_comm_strategy",), reason)] if self.cp_comm_strategy != "allgather" else []
        problems = []
        if self.strategy not in (None, "fsdp2"):  # whose default is that of the loop
            problems.append(Problem(("cp_size",), f"{CP_STRATEGY}; the strategy is {self.strategy}"))
        names = [name for name in ("tp_size", "pp_size") if getattr(self, name) > 1]
        return problems + [Problem((name,), "is not simulated together with cp_size") for name in names]

    def _pipeline(self) -> list[Problem]:
        """Refuse options without a pipeline, and what cannot be combined with one."""
        if self.pp_size == 1:
            reason = "belongs to a pipeline: set parallel.pp_size"
            return [Problem((name,), reason) for name in _PIPELINE_OPTIONS if getattr(self, name) is not None]
        problems = []
        if self.enable_expert_parallel:
            problems.append(Problem(("enable_expert_parallel",), "is not simulated together with pp_size"))
        if self.sync_each_batch:
            reason = "does not belong to a pipeline, whose schedule reduces gradients after the last micro-batch"
            problems.append(Problem(("sync_each_batch",), reason))
        if self.data_parallel_size > 1 and (self.strategy or "ddp") not in ("ddp", "fsdp2"):
            problems.append(Problem(("strategy",), "is ddp or fsdp2 for the ranks of a pipeline's stage"))
        if self.replicas > 1 and self.strategy == "fsdp2":
            problems.append(Problem(("dp_replicate_size",), "is not simulated together with pp_size"))
        if self.schedule not in _LOOPED and self.stages_per_rank > 1:
            reason = f"is 1 with {self.schedule}; {', '.join(sorted(_LOOPED))} have several stages on each rank"
            problems.append(Problem(("pp_stages_per_rank",), reason))
        if self.schedule == "InterleavedZeroBubble" and (self.data_parallel_size > 1 or self.strategy == "fsdp2"):
            reason = "in PyTorch 2.13 does not reduce all gradients over data-parallel ranks: use Interleaved1F1B"
            problems.append(Problem(("pp_schedule",), f"{self.schedule} {reason}"))
        if self.schedule in _LOOPED and self.stages_per_rank == 1:
            problems.append(Problem(("pp_stages_per_rank",), f"is at least 2 with {self.schedule}"))
        return problems

    def _degrees(self) -> list[Problem]:
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

    def _options(self) -> list[Problem]:
        strategy = self.strategy or "ddp"
        problems: list[Problem] = []
        for name, strategies in _OPTIONS.items():
            if getattr(self, name) != type(self).model_fields[name].default and strategy not in strategies:
                named = ", ".join(sorted(strategies))
                problems.append(Problem((name,), f"belongs to strategy {named}, but the strategy is {strategy}"))
        if strategy in ("ddp", "zero1") and self.tp_size > 1 and self.data_parallel_size > 1:
            reason = f"cannot be combined with {strategy}: DDP does not take sharded parameters"
            problems.append(Problem(("tp_size",), reason))
        if strategy == "dp":
            one = "DataParallel is one process on one machine, with the whole model on each GPU"
            problems += [
                Problem((name,), f"{one}: leave it out, or use ddp")
                for name in ("nodes", "tp_size", "cp_size", "pp_size")
                if getattr(self, name) > 1
            ]
        if self.enable_expert_parallel and self.tp_size == 1:
            reason = "shares experts over the ranks of parallel.tp_size, as in transformers: set it"
            problems.append(Problem(("enable_expert_parallel",), reason))
        if self.enable_expert_parallel and self.sequence_parallel:
            problems.append(Problem(("sequence_parallel",), "belongs to matrices that are shared, not to experts"))
        if self.sequence_parallel and self.tp_size == 1:
            problems.append(Problem(("sequence_parallel",), "belongs to tensor parallelism: set parallel.tp_size"))
        if strategy == "fsdp1" and (self.tp_size > 1 or self.replicas > 1):
            problems.append(Problem(("strategy",), "fsdp1 shards over all GPUs here: use fsdp2 for tp or replicas"))
        if strategy == "fsdp1" and type(self.reshard_after_forward) is int:
            problems.append(Problem(("reshard_after_forward",), "is true or false for fsdp1; fsdp2 takes a number"))
        return [*problems, *self._on_one_gpu()]

    def _on_one_gpu(self) -> list[Problem]:
        """Refuse options of FSDP that would change the training, where one GPU trains without FSDP."""
        names = ("mp_policy", "offload_policy") if self.world_size == 1 else ()
        reason = "needs several GPUs: one GPU trains without FSDP; set parallel.gpus or leave it out"
        return [Problem((name,), reason) for name in names if getattr(self, name) is not None]

    def ungrouped(self, strategy: str) -> list[Problem]:
        """Refuse groups of ranks where every data-parallel rank holds all weights."""
        problems: list[Problem] = []
        if self.dp_shard_size not in (None, 1):
            problems.append(Problem(("dp_shard_size",), f"belongs to FSDP, but the strategy is {strategy}"))
        if self.dp_replicate_size not in (None, self.data_parallel_size):
            reason = f"is {self.data_parallel_size} with {strategy}, which copies weights to every rank: leave it out"
            problems.append(Problem(("dp_replicate_size",), reason))
        return problems
