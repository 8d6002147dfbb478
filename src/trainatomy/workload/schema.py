"""The description of one training, or of inference or generation, as a value.

``Workload`` is frozen. It is validated from a mapping with the keys of the YAML file, and can be written as one again.

Problems between the settings of a workload: rules of the table, and what several settings make together.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

import yaml
from pydantic import (
    BeforeValidator,
    Field,
    ModelWrapValidatorHandler,
    PrivateAttr,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from trainatomy.workload.data import DEFAULT_SEQUENCE_LENGTH, DataSpec
from trainatomy.workload.deepspeed import deepspeed_problems
from trainatomy.workload.defaults import (
    CHECKPOINTING,
    default_checkpointing,
    says_checkpointing,
    state_era,
    with_era,
    with_loop_defaults,
)
from trainatomy.workload.explain import explain, workload_error
from trainatomy.workload.fsdp import fsdp_problems
from trainatomy.workload.generation import GenerationSpec
from trainatomy.workload.gpu import (
    GPUChoice,
    GPUOverride,
    InstanceName,
    instance_problems,
    resolve_gpu,
    state_instance,
    with_instance,
)
from trainatomy.workload.loops import LOOPS, LoopName, describe_loops
from trainatomy.workload.model import AllocatorSettings, Dtype, LoraSpec, ModelSpec, SoftwareSpec
from trainatomy.workload.overlay import overlay, remove_replaced, set_key
from trainatomy.workload.parallel import ParallelSpec
from trainatomy.workload.preference import PreferenceSpec
from trainatomy.workload.section import Count, Decay, Index, Path, Problem, Section, Settings, Text, number_as_text
from trainatomy.workload.sentence_transformers import SentenceTransformersSpec
from trainatomy.workload.support import BETWEEN_SECTIONS, WITHIN_SECTIONS, Features, unsupported
from trainatomy.workload.train import DEFAULT_EVAL_BATCH_SIZE, TrainSpec
from trainatomy.workload.trl import COUNTS, trl_problems

if TYPE_CHECKING:
    from trainatomy.catalog.gpus import GPU
    from trainatomy.workload.dialects.translation import Origin


MAX_BATCH_SAMPLES = 2**22
"""Samples in a batch: to join more takes the CPU many seconds."""
MAX_BATCH_ELEMENTS = 2**30
"""Samples times tokens in a batch. One activation of 256 float32 values for each would take 1 TiB."""


MAX_ACCUMULATION = 10_000
"""Micro-batches of a step: what each allocates is kept, and 100,000 of them take 16 GiB of host memory."""


def contradictions(workload: Workload) -> list[Problem]:
    """Return problems within the sections of a workload, or where there are none, those between its sections."""
    has, degrees = Features(workload), workload.parallel.degree_problems()
    within = [Problem(("parallel", *each.path), each.message) for each in degrees] + instance_problems(workload)
    within += unsupported(has, WITHIN_SECTIONS)
    return within or [
        *_of_libraries(workload),
        *_oversized_batch(workload),
        *_oversized_step(workload),
        *unsupported(has, BETWEEN_SECTIONS),
    ]


def _of_libraries(workload: Workload) -> list[Problem]:
    """Return problems of the configurations that other libraries read, whose keys are theirs."""
    train = workload.train
    if workload.mode != "training" or not LOOPS[workload.loop].by_trainer:
        return []
    deepspeed = [] if train.deepspeed is None else deepspeed_problems(train.deepspeed)
    return [
        *(Problem(("train", "deepspeed", *each.path), each.message) for each in deepspeed),
        *(fsdp_problems(workload) if train.fsdp else []),
        *trl_problems(workload),
    ]


def _oversized_batch(workload: Workload) -> list[Problem]:
    """Refuse batches that fit on no GPU, whose tensors would take minutes to make on the CPU."""
    tokens = 1 if workload.data.factory else workload.data.sequence_length or 1
    if workload.batch_size <= MAX_BATCH_SAMPLES and workload.batch_size * tokens <= MAX_BATCH_ELEMENTS:
        return []
    is_eval = workload.mode != "training" and workload.train.per_device_eval_batch_size is not None
    name = "per_device_eval_batch_size" if is_eval else "per_device_train_batch_size"
    message = f"is too large for any GPU: {workload.batch_size:,} samples"
    return [Problem(("train", name), message + (f" of {tokens:,} tokens" if tokens > 1 else ""))]


def _oversized_step(workload: Workload) -> list[Problem]:
    """Refuse steps of so many micro-batches that the host's memory would be full before they are predicted."""
    count = workload.train.gradient_accumulation_steps
    if workload.mode != "training" or count <= MAX_ACCUMULATION:
        return []
    message = f"{count:,} micro-batches are more than are simulated in a step ({MAX_ACCUMULATION:,}): use larger ones"
    return [Problem(("train", "gradient_accumulation_steps"), message)]


__all__ = [
    "DEFAULT_SEQUENCE_LENGTH",
    "DataSpec",
    "Dtype",
    "GPUOverride",
    "LoraSpec",
    "ModelSpec",
    "ParallelSpec",
    "SoftwareSpec",
    "TrainSpec",
    "Workload",
]

_SECTIONS = ("data", "train", "trl", "preference", "sentence_transformers", "generation", "parallel", "software")
"""Sections that may be empty."""
_LINE_BREAKS = frozenset("\x85\u2028\u2029")

MAX_STEPS = 10_000
"""Steps are executed one by one, so more of them would take hours; without `steps`, copies of the last one follow."""
FUSED_OPTIMIZERS = frozenset({"adamw_torch_fused"})


class Workload(Section):
    """The description of a training."""

    name: Text | None = Field(default=None, description="name in tables and records")
    model: ModelSpec = Field(description="the model")
    data: DataSpec = Field(default_factory=DataSpec, description="the batch")
    loop: LoopName = Field(default="trainer", description=describe_loops())
    mode: Literal["training", "inference", "generation"] = Field(
        default="training", description="`training`, `inference` (forward passes) or `generation` of tokens"
    )
    zero_grad_set_to_none: bool = Field(
        default=True, description="release gradients after a step instead of filling them with zeros"
    )
    keep_outputs: bool = Field(
        default=False,
        description="with `loop: pytorch`: hold the model's outputs, such as logits, until the backward pass has "
        "ended, as a loop that gives them a name does",
    )
    ema_decay: Decay | None = Field(
        default=None,
        description="with `loop: pytorch`: keep an exponential moving average of the weights with this decay, by "
        "`torch.optim.swa_utils.AveragedModel`",
    )
    skipped_steps: Index = Field(
        default=0,
        description="with `train.fp16`: first optimizer steps that gradient scaling skips because gradients overflow, "
        "so that the optimizer's states are made later; a prediction assumes them, a measurement counts them",
    )
    activation_offloading: Literal["pinned", "pageable"] | None = Field(
        default=None,
        description="with `loop: pytorch`: keep what autograd saves for backward in host memory, by "
        "`torch.autograd.graph.save_on_cpu`, in pinned memory or not",
    )
    train: TrainSpec = Field(default_factory=TrainSpec, description="the settings of the training")
    trl: Settings = Field(
        default_factory=dict,
        description="with `loop: sft`, `dpo`, `kto`, `reward` or `grpo`: settings that the configuration of TRL's "
        "trainer (`SFTConfig`) has and `TrainingArguments` does not, such as `{packing: true}`",
    )
    preference: PreferenceSpec = Field(
        default_factory=PreferenceSpec,
        description="with `loop: preference`: whose trainer computes which loss",
    )
    sentence_transformers: SentenceTransformersSpec = Field(
        default_factory=SentenceTransformersSpec,
        description="with `loop: sentence_transformers`: the loss, the samples and the pooling",
    )
    generation: GenerationSpec = Field(default_factory=GenerationSpec, description="what `mode: generation` generates")
    parallel: ParallelSpec = Field(default_factory=ParallelSpec, description="the GPUs of the training")
    gpu: GPUChoice = Field(
        default="h200",
        description="a GPU (`trainatomy gpus` lists them) or a MIG instance of one (`h200:3g.71gb`), or a mapping that "
        "changes one",
    )
    instance: InstanceName | None = Field(
        default=None,
        description="a cloud's machine, such as `p5.48xlarge` (`trainatomy gpus --instances` lists them), which says "
        "`gpu` and `parallel.gpus`",
    )
    allocator: AllocatorSettings = Field(
        default="",
        description='settings of PyTorch\'s allocator (`PYTORCH_ALLOC_CONF`), such as `"expandable_segments:True"`',
    )
    software: SoftwareSpec = Field(default_factory=SoftwareSpec, description="the software that is simulated")
    steps: Annotated[Count, Field(le=MAX_STEPS)] | None = Field(
        default=None, description="optimizer steps to execute (default: as many as the peak needs)"
    )
    era: Annotated[Literal["2022"], BeforeValidator(number_as_text)] | None = Field(
        default=None,
        description='`"2022"`: emulate the libraries of January 2022: PyTorch 1.10, eager attention, AdamW of '
        "transformers, gradients filled with zeros, reentrant checkpointing; keys that are set stay (default: today's)",
    )

    _places: dict[Path, str] = PrivateAttr(default_factory=dict)
    _origin: Origin | None = PrivateAttr(default=None)

    @field_validator(*_SECTIONS, mode="before")
    @classmethod
    def _empty_section(cls, section: Any) -> Any:
        """Return an empty section (``train:`` with nothing under it) as one without keys."""
        return {} if section is None else section

    @field_validator("trl")
    @classmethod
    def _counts_of_trl(cls, settings: dict[str, Any]) -> dict[str, Any]:
        for name in COUNTS:
            value = settings.get(name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                message = "{name} must be a whole number above 0, found {value}"
                raise PydanticCustomError("count", message, {"name": name, "value": repr(value)})
        return settings

    @model_validator(mode="wrap")
    @classmethod
    def _fill_in_defaults(cls, raw: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        """Fill in defaults that ``TrainingArguments`` does not have: of the loop, the era, and peft's preparation."""
        if not isinstance(raw, dict):
            return handler(raw)
        raw = with_loop_defaults(with_era(with_instance(raw)))
        workload, train = handler(raw), raw.get("train") or {}
        if says_checkpointing(workload) or not default_checkpointing(workload) or not isinstance(train, Mapping):
            return workload
        filled = handler({**raw, "train": {**train, CHECKPOINTING: True}})
        if filled.train.gradient_checkpointing_kwargs is None:
            filled.train.model_fields_set.discard(CHECKPOINTING)  # nobody said it, which notes and `to_mapping` ask
        return filled

    @property
    def batch_size(self) -> int:
        """Return the samples in one forward pass, of training or of inference."""
        train = self.train
        if self.mode != "training" and train.per_device_eval_batch_size is not None:
            return train.per_device_eval_batch_size
        return train.per_device_train_batch_size

    @property
    def eval_batch_size(self) -> int:
        """Return the samples in one batch of an evaluation during the training."""
        return self.train.per_device_eval_batch_size or DEFAULT_EVAL_BATCH_SIZE

    @property
    def evaluates(self) -> bool:
        """Return whether the training contains evaluations that are executed: the Trainer's."""
        train = self.train
        wanted = train.eval_strategy != "no" or train.eval_on_start or train.do_eval
        return self._is_of_a_trainer and wanted

    @property
    def evaluates_after_steps(self) -> bool:
        """Return whether an evaluation runs between steps, not only before the first one."""
        return self.evaluates and (self.train.eval_strategy != "no" or self.train.do_eval)

    @property
    def saves(self) -> bool:
        """Return whether the training saves a checkpoint that is executed: by the Trainer."""
        wanted = self.train.save_strategy not in (None, "no") or self.train.load_best_model_at_end
        return self._is_of_a_trainer and wanted

    @property
    def resumes(self) -> bool:
        """Return whether the training continues another, whose checkpoint is loaded by the Trainer."""
        return self._is_of_a_trainer and self.train.resume_from_checkpoint is not None

    @property
    def loads_best_model(self) -> bool:
        """Return whether the best model is loaded at the end by the Trainer."""
        return self._is_of_a_trainer and self.train.load_best_model_at_end

    @property
    def _is_of_a_trainer(self) -> bool:
        return self.mode == "training" and LOOPS[self.loop].by_trainer

    @property
    def shards_on_host(self) -> bool:
        """True if FSDP keeps weights in host memory."""
        fsdp, config = self.train.fsdp, self.train.fsdp_config or {}
        words = " ".join(map(str, fsdp)) if isinstance(fsdp, tuple | list) else str(fsdp)
        return self.parallel.offload_policy is not None or bool(config.get("cpu_offload")) or "offload" in words

    @property
    def tf32(self) -> bool | None:
        """Return whether float32 products may use TF32: ``train.tf32``, or what a Trainer that compiles makes of it.

        Source: transformers 5.17, training_args.py (``TrainingArguments.__post_init__``, "TF32").
        """
        train = self.train
        if self._is_of_a_trainer and train.compiles and (train.bf16 or (train.tf32 is None and not train.fp16)):
            return True
        return train.tf32

    @property
    def pauses(self) -> bool:
        """Return whether an evaluation or a checkpoint comes between two steps."""
        return self.evaluates_after_steps or self.saves

    @property
    def eval_samples(self) -> int:
        """Return the samples of one evaluation on all GPUs: as given, or two batches, or two rounds of accumulation."""
        rounds = self.train.eval_accumulation_steps or 1
        return self.data.eval_samples or 2 * rounds * self.eval_batch_size * self.parallel.data_parallel_size

    @property
    def gathers_outputs(self) -> bool:
        """Return whether an evaluation keeps the outputs of all its batches on the GPU."""
        train = self.train
        kept = not (train.prediction_loss_only or train.batch_eval_metrics)
        return bool(self.data.compute_metrics) and kept and train.eval_accumulation_steps is None

    @property
    def display_name(self) -> str:
        """Return the workload's name, or that of its model."""
        return self.name or str(self.model.id or self.model.class_ or self.model.factory)

    def resolve_gpu(self) -> GPU:
        """Return the GPU with all its facts, including the workload's changes."""
        return resolve_gpu(self.gpu)

    def where(self, *path: str | int) -> str:
        """Return where a key was written, for messages: ``file.yaml:9: train.fp16``, ``--fp16``, or ``train.fp16``."""
        return self._places.get(path, ".".join(map(str, path)))

    def placed(self, places: Mapping[Path, str], origin: Origin | None = None) -> Self:
        """Record where keys were written (see ``where`` and ``origin``), and return the workload itself."""
        self._places.update(places)
        self._origin = origin
        return self

    @property
    def origin(self) -> Origin | None:
        """Return the configuration of another framework that the workload was read from; None for no such."""
        return self._origin

    @property
    def places(self) -> Mapping[Path, str]:
        """Return where keys were written."""
        return self._places

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> Self:
        """Validate nested mappings with the keys of the YAML file.

        Raises:
            WorkloadError: Lists every problem, one a line.
        """
        try:
            return cls.model_validate(mapping)
        except ValidationError as error:
            problems = explain(error, mapping, cls)
            raise workload_error(map(str, problems), problems) from None

    def replace(self, changes: str | Mapping[str, Any], value: Any = None, /) -> Self:
        """Return a validated copy with some keys changed.

        ``workload.replace("train.per_device_train_batch_size", 8)`` changes one key,
        ``workload.replace({"train.bf16": True, "gpu": "h100"})`` several. As on the command line, a key that
        contradicts one of this workload takes its place: ``train.bf16`` switches ``train.fp16`` off.

        Args:
            changes: A dotted key of the workload file, or a mapping from such keys to values.
            value: The value for a single key.

        Raises:
            WorkloadError: A key does not exist, or a value is not valid; names the key and suggests the nearest one.
        """
        settings = {changes: value} if isinstance(changes, str) else changes
        mapping = self.to_raw_mapping()
        paths = [tuple(key.split(".")) for key in settings]
        for path, setting in zip(paths, settings.values(), strict=True):
            set_key(mapping, path, overlay(None, setting))
        remove_replaced(mapping, paths)
        places = {path: place for path, place in self._places.items() if path not in paths}
        return type(self).from_mapping(mapping).placed(places, self._origin)

    def to_mapping(self) -> dict[str, Any]:
        """Return the values that differ from the defaults, with the keys of the YAML file (see ``from_mapping``)."""
        mapping = self.model_dump(mode="json", by_alias=True, exclude_defaults=True)
        stated = {name: getattr(self.train, name) for name in LOOPS[self.loop].defaults}
        if stated and self.mode == "training":
            mapping["train"] = {**mapping.get("train", {}), **stated}
        elif default_checkpointing(self) is not False:
            said = {CHECKPOINTING: self.train.gradient_checkpointing} if says_checkpointing(self) else {}
            rest = {name: value for name, value in mapping.get("train", {}).items() if name != CHECKPOINTING}
            mapping["train"] = {**rest, **said}
        state_era(self, mapping)
        state_instance(self, mapping)
        return {key: value for key, value in mapping.items() if value != {} or key not in _SECTIONS}

    def to_raw_mapping(self) -> dict[str, Any]:
        """Return ``to_mapping`` with the names, but not the values, of settings that change nothing."""
        mapping = self.to_mapping()
        if self.train.ignored:
            ignored = dict.fromkeys(self.train.ignored) | dict.fromkeys(self.train.missed, True)
            mapping["train"] = {**mapping.get("train", {}), **ignored}
        return mapping

    def to_yaml(self) -> str:
        """Return ``to_mapping`` as the text of a workload file.

        Unicode's own line breaks are escaped, because PyYAML loses them.
        """
        mapping = self.to_mapping()
        plain = not _LINE_BREAKS & set(json.dumps(mapping, ensure_ascii=False))
        return yaml.safe_dump(mapping, sort_keys=False, allow_unicode=plain)

    def digest(self) -> str:
        """Return a SHA-256 (hex) of what a prediction depends on: equal for equal training runs of any name."""
        mapping = {key: value for key, value in self.to_mapping().items() if key != "name"}
        return hashlib.sha256(json.dumps(mapping, sort_keys=True, separators=(",", ":")).encode()).hexdigest()

    def __eq__(self, other: object) -> bool:
        """Return whether two workloads describe the same training, wherever they were written."""
        return isinstance(other, Workload) and self.to_mapping() == other.to_mapping()

    def __hash__(self) -> int:
        return hash(self.digest())

    def contradictions(self) -> list[Problem]:
        """Return problems between keys."""
        return contradictions(self)

    @property
    def microbatches(self) -> int:
        """Micro-batches that a pipeline divides a batch into."""
        return self.parallel.pp_microbatches or self.batch_size

    def cannot_unscale(self, dtype: str) -> bool:
        """Return whether gradient scaling would refuse the gradients of weights in ``dtype``.

        DeepSpeed scales its loss itself, and has copies of the weights in float32: accelerate makes no ``GradScaler``.
        """
        train = self.train
        trains_halves = dtype == "float16" and not self.model.has_adapters
        unscales = train.max_grad_norm > 0 or train.optim not in FUSED_OPTIMIZERS
        by_torch = train.fp16 and train.deepspeed is None
        return self.mode == "training" and by_torch and trains_halves and unscales
