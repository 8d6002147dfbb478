"""A predicted training: the verdict, the memory breakdown, the time of a step, and the evidence for them.

Notes of a prediction that stand out from the others.

What was predicted: the model, precision, optimizer, attention, loop and batch that a training is known by.

A training's division among GPUs, and its throughput by their number, as plain values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, NamedTuple

from trainatomy.results.duration import Duration, duration_of
from trainatomy.results.host import HostBill
from trainatomy.results.lengths import LengthsPrediction
from trainatomy.results.memory import Memory, ModuleActivations, OutOfMemoryPoint, TimelinePoint, Verdict
from trainatomy.results.operations import Padding
from trainatomy.results.script import ScriptRun
from trainatomy.results.tasks import Checkpoint, Evaluation, Experts, Generation, RestoredCheckpoint
from trainatomy.results.time import Time


class LeadingNote(str):
    """A note on something that was decided for the user and changes memory or time.

    Anything that adds to the notes of a prediction may add one of these; pages show them above the figures
    (``Prediction.leading_notes``), and other notes at their end.
    """

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Subject:
    """The training that was predicted, as people name it; None, False or empty: there is none, or it is not known.

    Attributes:
        models: Classes of the models, without peft's wrapper.
        mode: ``training``, ``inference`` or ``generation``.
        loop: Name of the loop (``trainer``, ``pytorch``, ``sft``), or ``script`` for one of the user's own.
        weights_dtype: The dtype of the weights that are not quantised.
        autocast: The dtype that mixed precision computes in, ``fp16`` or ``bf16``.
        tf32: Whether matrix products of float32 run in TF32.
        quantization: How weights are quantised, such as ``nf4``, ``int8`` or the name of a method.
        lora_rank: Rank of the adapters.
        trained_share: The share of the parameters that is trained, where it is not all of them.
        optimizer: Name in ``TrainingArguments.optim``, the path of a class, or classes (``AdamW + Muon``).
        attention: transformers' name of the attention, such as ``sdpa``.
        attention_kernels: PyTorch's kernels that a step calls: ``flash``, ``efficient``, ``cudnn`` or ``flex``.
        batch_size: Samples of each GPU in one forward pass.
        inputs: Shape of each input of a sample, by the name of the model's argument.
        lengths: Fewest and most tokens of samples that differ in length; of images or recordings the smallest and the
            largest, as ``data.lengths`` writes them.
        new_tokens: Tokens that are generated for each prompt.
        beams: Beams of beam search.
        accumulation_steps: Micro-batches of an optimizer step.
        checkpointing: The layers that are checkpointed: every so many; 0: none.
        compiled: Whether ``torch.compile`` compiles the model.
        keeps_gradients: Whether gradients are filled with zeros instead of released.
        torch: The version of PyTorch that is simulated, where it is not the installed one.
        era: The year whose libraries are emulated.
    """

    models: tuple[str, ...]
    mode: str
    loop: str
    weights_dtype: str
    batch_size: int
    autocast: str | None = None
    tf32: bool = False
    quantization: str | None = None
    lora_rank: int | None = None
    trained_share: float | None = None
    optimizer: str | None = None
    attention: str | None = None
    attention_kernels: tuple[str, ...] = ()
    inputs: dict[str, tuple[int, ...]] = field(default_factory=dict)
    lengths: tuple[int | str, int | str] | None = None
    new_tokens: int | None = None
    beams: int = 1
    accumulation_steps: int = 1
    checkpointing: int = 0
    compiled: bool = False
    keeps_gradients: bool = False
    torch: str | None = None
    era: str | None = None


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


Basis = Literal["measured", "computed", "assumed"]
Unit = Literal["", "bytes", "allocations", "steps"]

ReasonCode = Literal[
    "autocast_copies_not_at_peak",
    "frozen_parameters",
    "gradients_not_at_peak",
    "low_precision_parameters",
    "optimizer_states_not_created",
    "quantised_parameters",
    "sharded",
]


@dataclass(frozen=True, slots=True)
class Fact:
    """An input that the prediction rests on, with its source.

    ``amount`` in ``unit`` is the value of a quantity; ``value`` is the value of a setting, as text.
    """

    name: str
    value: str
    basis: Basis
    source: str
    amount: int | None = None
    unit: Unit = ""


@dataclass(frozen=True, slots=True)
class BytesPerParameter:
    """Bytes per parameter at the peak, without activations and temporaries, compared with the rule of thumb.

    ``rule`` is the figure of Hugging Face's guides (18 for mixed precision with AdamW, 16 in fp32, 6 for inference in
    mixed precision; ``None`` where they give none) and ``rule_name`` the case it is for.  ``parts`` are bytes per
    parameter by component.  ``reasons`` explain the difference: each is a ``ReasonCode``, or a sentence in predictions
    that an earlier version recorded.
    """

    parameters: int
    trainable_parameters: int
    actual: float
    parts: dict[str, float]
    rule: float | None
    rule_name: str
    reasons: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class GPUSummary:
    """The GPU of a prediction: id, product name, bytes that CUDA can use, compute capability."""

    id: str
    name: str
    memory_bytes: int
    capability: tuple[int, int]


@dataclass(frozen=True, slots=True)
class RankPrediction:
    """Memory of one process of a training; ranks count from 0.  The fields are those of ``Prediction``."""

    rank: int
    fits: bool
    verdict: Verdict
    room_bytes: int
    memory: Memory
    modules: tuple[ModuleActivations, ...]
    out_of_memory: OutOfMemoryPoint | None
    timeline: tuple[TimelinePoint, ...] = ()


@dataclass(frozen=True, slots=True)
class Prediction:
    """A predicted training: the answer first, then the evidence.

    ``fits`` means that the allocator never runs out of the memory that the context and the driver leave on the GPU.
    ``room_bytes`` is the headroom at the peak (negative: the shortfall). ``verdict`` is ``tight`` when the training
    fits with less than 5 % of the GPU's memory left, or only because the allocator frees its cache on the way
    (``num_alloc_retries`` > 0).  ``without_workspace`` counts the convolutions of a step that fall back to a slower
    algorithm because the workspace of their first choice does not fit.  ``trials`` counts those for which cuDNN tries
    all its algorithms (``cudnn.benchmark``); by the rules, without cuDNN's library, memory is then the least that the
    training needs.

    The memory fields describe ``rank``: rank 0, or in a pipeline the one that holds most.  ``other_ranks`` holds
    further ranks of a training on several GPUs.  ``evaluation`` is the evaluation that runs during the training, if
    there is one.

    With ``data.lengths``, ``lengths`` describes the epochs, memory is that of the worst one, and time that of the mean
    step.  ``script`` is the script that was run, of ``trainatomy run``; ``workload`` then says what was seen of it.

    ``subject`` is what was predicted; None in predictions that an earlier version recorded.  ``leading_notes`` are the
    notes that matter most: what was decided for the user and changes memory or time.  ``paddings`` are sizes that are
    no multiples of what tensor cores take, with what padding them saves.  ``host_bill`` is what the training takes
    of each machine's memory, /dev/shm and disk; None for scripts, and in predictions that an earlier version recorded.
    """

    name: str
    workload: dict[str, object]
    card: GPUSummary
    fits: bool
    verdict: Verdict
    room_bytes: int
    memory: Memory
    modules: tuple[ModuleActivations, ...]
    bytes_per_parameter: BytesPerParameter
    facts: tuple[Fact, ...]
    notes: tuple[str, ...]
    out_of_memory: OutOfMemoryPoint | None
    timeline: tuple[TimelinePoint, ...]
    seconds_taken: float
    versions: dict[str, str]
    time: Time | None = None
    without_workspace: int = 0
    trials: int = 0
    other_ranks: tuple[RankPrediction, ...] = ()
    evaluation: Evaluation | None = None
    rank: int = 0
    lengths: LengthsPrediction | None = None
    generation: Generation | None = None
    checkpoint: Checkpoint | None = None
    restored: tuple[RestoredCheckpoint, ...] = ()
    script: ScriptRun | None = None
    experts: Experts | None = None
    subject: Subject | None = None
    leading_notes: tuple[str, ...] = ()
    paddings: tuple[Padding, ...] = ()
    host_bill: HostBill | None = None

    @property
    def gpu(self) -> GPUSummary:
        """The GPU; the field keeps the name that version 1 of the JSON gives it."""
        return self.card

    @property
    def duration(self) -> Duration | None:
        """How long the whole training takes, where its steps are known."""
        return duration_of(self, Plan.of(self.workload).data_parallel_size)

    @property
    def ranks(self) -> dict[int, RankPrediction]:
        """The memory of every executed rank by its number, in order; a training on one GPU has rank 0 only."""
        first = RankPrediction(**{each.name: getattr(self, each.name) for each in fields(RankPrediction)})
        return {each.rank: each for each in sorted((first, *self.other_ranks), key=lambda one: one.rank)}
