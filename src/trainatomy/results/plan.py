"""A training's division among GPUs, and its throughput by their number, as plain values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from trainatomy.results.prediction import Prediction, RankPrediction

_SPREADING = ("parallel", "name")
_SPREADING_TRAIN = (
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "fsdp",
    "fsdp_config",
    "deepspeed",
    "ddp_find_unused_parameters",
    "ddp_bucket_cap_mb",
    "ddp_broadcast_buffers",
    "ddp_static_graph",
)
"""Keys of a workload that say how a training is spread over GPUs, not what is trained."""


class GroupUse(NamedTuple):
    """Something that a process group is used for.

    Attributes:
        kind: Kind of collective, such as ``all_reduce``, or ``send`` or ``recv``.
        peer: The other rank of a message; None for collectives.
    """

    kind: str
    peer: int | None = None


Communicators = Mapping[tuple[int, ...], frozenset[GroupUse]]
"""What the communicators that a rank is in are used for, by their ranks."""


@dataclass(frozen=True, slots=True)
class Plan:
    """A plan of parallelism.

    Attributes:
        strategy: ``ddp``, ``dp`` (DataParallel), ``zero1``, ``fsdp1``, ``fsdp2``, or ``deepspeed0`` to ``deepspeed3``
            by the stage of ZeRO; empty for a training on one GPU, or with tensor parallelism alone.
        gpus: GPUs of each machine.
        nodes: Machines.
        replicas: Copies of the weights that FSDP shards (HSDP); 1 if it shards over all data-parallel ranks.
        tp_size: Ranks that share each layer.
        model_parallel_size: Ranks that process the same samples: all but data parallelism.
        pp_size: Ranks that share the layers.
        cp_size: Ranks that share each sequence.
    """

    strategy: str
    gpus: int = 1
    nodes: int = 1
    replicas: int = 1
    tp_size: int = 1
    model_parallel_size: int = 1
    pp_size: int = 1
    cp_size: int = 1

    @classmethod
    def of(cls, workload: Mapping[str, Any]) -> Plan:
        """Return the plan of a workload, given as a mapping with the keys of its file."""
        parallel = workload.get("parallel") or {}
        gpus, nodes, tp = (int(parallel.get(name, 1)) for name in ("gpus", "nodes", "tp_size"))
        pipeline = int(parallel.get("pp_size", 1))
        contexts = int(parallel.get("cp_size", 1))
        others = contexts * pipeline
        ranks = gpus * nodes // (tp * others)
        strategy = _strategy(workload, parallel) if ranks > 1 else ""
        sizes = parallel.get("dp_replicate_size"), parallel.get("dp_shard_size")
        replicas = copies_of_weights(ranks, *sizes) if strategy.startswith("fsdp") else 1
        return cls(strategy, gpus, nodes, replicas, tp, tp * others, pipeline, contexts)

    @property
    def world_size(self) -> int:
        """Number of GPUs."""
        return self.gpus * self.nodes

    @property
    def data_parallel_size(self) -> int:
        """Number of ranks that process different samples."""
        return self.world_size // self.model_parallel_size


def _strategy(workload: Mapping[str, Any], parallel: Mapping[str, Any]) -> str:
    """Return the name of the strategy: ``loop: pytorch`` names it, the Trainer has ``train.fsdp``."""
    if workload.get("loop", "trainer") == "pytorch" or parallel.get("strategy") == "dp":
        return str(parallel.get("strategy") or "ddp")
    train = workload.get("train") or {}
    if train.get("deepspeed"):
        return f"deepspeed{int(train['deepspeed'].get('zero_optimization', {}).get('stage', 0))}"
    if not train.get("fsdp"):
        return "ddp"
    return f"fsdp{fsdp_version(train.get('fsdp_config'))}"


DEFAULT_FSDP_VERSION = 2
"""The version of FSDP that the Trainer uses where ``fsdp_config`` names none (transformers 5.17)."""


def fsdp_version(config: Mapping[str, Any] | None) -> int:
    """Return the version of FSDP that the Trainer uses with an ``fsdp_config``."""
    given = config or {}
    return int(given.get("version") or given.get("fsdp_version") or DEFAULT_FSDP_VERSION)


def copies_of_weights(ranks: int, replicate: int | None, shard: int | None) -> int:
    """Return how many copies of the weights FSDP keeps: 1 unless it shards over groups of ranks.

    Args:
        ranks: Data-parallel ranks.
        replicate: Copies that were asked for (``dp_replicate_size``).
        shard: Ranks of a group that were asked for (``dp_shard_size``), which decides.
    """
    shards = shard or ranks // (replicate or 1)
    return max(ranks // max(shards, 1), 1)


def trained(workload: Mapping[str, Any]) -> dict[str, Any]:
    """Return a workload without what says how it is spread over GPUs: equal where the same is trained."""
    train = workload.get("train") or {}
    rest = {name: value for name, value in train.items() if name not in _SPREADING_TRAIN}
    return {name: value for name, value in workload.items() if name not in _SPREADING} | {"train": rest}


def fullest_rank(prediction: Prediction) -> RankPrediction:
    """Return the rank that needs the most device memory."""
    return max(prediction.ranks.values(), key=lambda rank: rank.memory.device_bytes)


@dataclass(frozen=True, slots=True)
class Scaling:
    """The throughput of a training on several GPUs.

    Attributes:
        plan: How it is spread.
        samples_per_second: Samples of all ranks per second.
        efficiency: Throughput per GPU relative to that of the fastest of the same training runs on the fewest GPUs;
            None for a training that is compared with no other.
    """

    plan: Plan
    samples_per_second: float
    efficiency: float | None = None

    @property
    def samples_per_second_per_gpu(self) -> float:
        """Throughput divided by the number of GPUs."""
        return self.samples_per_second / self.plan.world_size


def total_rate(prediction: Prediction) -> float | None:
    """Return the samples that all ranks process per second; ``None`` if no time was predicted."""
    if prediction.time is None:
        return None
    return prediction.time.samples_per_second * Plan.of(prediction.workload).data_parallel_size
