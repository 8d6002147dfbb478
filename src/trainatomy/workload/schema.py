"""The description of one training (or inference) on one GPU, as a value.

``Workload`` is frozen. It is validated from a mapping with the keys of the YAML file, and can be written as one again.
"""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

import yaml
from pydantic import BeforeValidator, Field, PrivateAttr, ValidationError, field_validator

from trainatomy.workload.data import DEFAULT_SEQUENCE_LENGTH, DataSpec
from trainatomy.workload.deepspeed import deepspeed_problems
from trainatomy.workload.explain import explain, workload_error
from trainatomy.workload.generation import GenerationSpec
from trainatomy.workload.gpu import GPUChoice, GPUOverride, resolve_gpu
from trainatomy.workload.loops import LOOPS, LoopName, describe_loops, unsupported_settings
from trainatomy.workload.model import Dtype, LoraSpec, ModelSpec
from trainatomy.workload.nearest import suggestion
from trainatomy.workload.overlay import overlay, remove_replaced, set_key
from trainatomy.workload.parallel import ParallelSpec
from trainatomy.workload.quantization import quantised_problems
from trainatomy.workload.section import Count, Path, Problem, Section, Text, number_as_text
from trainatomy.workload.software import AllocatorSettings, SoftwareSpec
from trainatomy.workload.train import DEFAULT_EVAL_BATCH_SIZE, TrainSpec

if TYPE_CHECKING:
    from collections.abc import Mapping

    from trainatomy.catalog.gpus import GPU

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

_BY_TRAINER = {
    "strategy": "belongs to loop: pytorch, except dp; the Trainer uses DDP, or has train.fsdp and train.deepspeed",
    "gradient_as_bucket_view": "belongs to loop: pytorch; the Trainer does not set it",
    "static_graph": "belongs to loop: pytorch; the Trainer takes train.ddp_static_graph",
    "find_unused_parameters": "belongs to loop: pytorch; the Trainer takes train.ddp_find_unused_parameters",
    "bucket_cap_mb": "belongs to loop: pytorch; the Trainer takes train.ddp_bucket_cap_mb",
    "broadcast_buffers": "belongs to loop: pytorch; the Trainer takes train.ddp_broadcast_buffers",
    "reshard_after_forward": "belongs to loop: pytorch; the Trainer takes it in train.fsdp_config",
    "mp_policy": "belongs to loop: pytorch; the Trainer takes train.bf16 or train.fp16",
    "transformer_layer_cls_to_wrap": "belongs to loop: pytorch; the Trainer takes it in train.fsdp_config",
    "offload_policy": "belongs to loop: pytorch; the Trainer takes cpu_offload in train.fsdp_config",
    "sync_each_batch": "belongs to loop: pytorch; the Trainer reduces gradients after the last micro-batch only",
    "tp_size": "is simulated with loop: pytorch only",
    "cp_size": "is simulated with loop: pytorch only",
    "enable_expert_parallel": "is simulated with loop: pytorch only",
    "sequence_parallel": "belongs to loop: pytorch; the Trainer does not set it",
    "pp_size": "belongs to loop: pytorch: the Trainer runs no pipelines",
}
"""Options of ``parallel`` that the Trainer does not take, with what it takes instead."""
_FSDP_CONFIG = frozenset(
    "activation_checkpointing auto_wrap_policy backward_prefetch cpu_offload cpu_ram_efficient_loading "
    "forward_prefetch limit_all_gathers min_num_params reshard_after_forward state_dict_type sync_module_states "
    "transformer_layer_cls_to_wrap use_orig_params version".split()
)
"""Keys that ``TrainingArguments`` reads from ``fsdp_config`` (transformers 5.17), with or without ``fsdp_``."""
_SECTIONS = ("data", "train", "generation", "parallel", "software")
"""Sections that may be empty."""
_LINE_BREAKS = frozenset("\x85\u2028\u2029")

MAX_STEPS = 10_000
"""Steps are executed one by one, so more of them would take hours; the peak is reached after two or three."""
MAX_BATCH_ELEMENTS = 2**28
"""Samples times tokens in a batch. One activation of 256 float32 values for each would take 256 GiB."""

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
    train: TrainSpec = Field(default_factory=TrainSpec, description="the settings of the training")
    generation: GenerationSpec = Field(default_factory=GenerationSpec, description="what `mode: generation` generates")
    parallel: ParallelSpec = Field(default_factory=ParallelSpec, description="the GPUs of the training")
    gpu: GPUChoice = Field(
        default="h200", description="a GPU (`trainatomy gpus` lists them), or a mapping that changes one"
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
        default=None, description='`"2022"`: emulate the libraries of January 2022 (default: today\'s)'
    )

    _places: dict[Path, str] = PrivateAttr(default_factory=dict)

    @field_validator(*_SECTIONS, mode="before")
    @classmethod
    def _empty_section(cls, section: Any) -> Any:
        """Return an empty section (``train:`` with nothing under it) as one without keys."""
        return {} if section is None else section

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
        """Return whether the training contains evaluations that are executed: the Trainer's, on one GPU."""
        train, here = self.train, self.mode == "training" and self.loop == "trainer"
        wanted = train.eval_strategy != "no" or train.eval_on_start or train.do_eval
        return here and wanted and self.parallel.world_size == 1

    @property
    def evaluates_after_steps(self) -> bool:
        """Return whether an evaluation runs between steps, not only before the first one."""
        return self.evaluates and (self.train.eval_strategy != "no" or self.train.do_eval)

    @property
    def saves(self) -> bool:
        """Return whether the training saves a checkpoint that is executed: by the Trainer, on one GPU."""
        here = self.mode == "training" and self.loop == "trainer" and self.parallel.world_size == 1
        return here and self.train.save_strategy not in (None, "no")

    @property
    def pauses(self) -> bool:
        """Return whether an evaluation or a checkpoint comes between two steps."""
        return self.evaluates_after_steps or self.saves

    @property
    def eval_samples(self) -> int:
        """Return the samples of one evaluation: as given, or two batches, or two rounds of accumulation."""
        rounds = self.train.eval_accumulation_steps or 1
        return self.data.eval_samples or 2 * rounds * self.eval_batch_size

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

    def placed(self, places: Mapping[Path, str]) -> Self:
        """Record where keys were written (see ``where``), and return the workload itself."""
        self._places.update(places)
        return self

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
        return type(self).from_mapping(mapping).placed(places)

    def to_mapping(self) -> dict[str, Any]:
        """Return the values that differ from the defaults, with the keys of the YAML file (see ``from_mapping``)."""
        mapping = self.model_dump(mode="json", by_alias=True, exclude_defaults=True)
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
        """Return a SHA-256 (hex) of what a prediction depends on: equal for equal trainings with different names."""
        mapping = {key: value for key, value in self.to_mapping().items() if key != "name"}
        return hashlib.sha256(json.dumps(mapping, sort_keys=True, separators=(",", ":")).encode()).hexdigest()

    def __eq__(self, other: object) -> bool:
        """Return whether two workloads describe the same training, wherever they were written."""
        return isinstance(other, Workload) and self.to_mapping() == other.to_mapping()

    def __hash__(self) -> int:
        return hash(self.digest())

    def contradictions(self) -> list[Problem]:
        """Return problems between keys of different sections."""
        return [
            *self._unscalable_gradients(),
            *self._refused_by_loop(),
            *self._targets(),
            *self._oversized_batch(),
            *self._spread(),
            *self._evaluation(),
            *quantised_problems(self, is_quantised=self.model.quantization is not None),
            *self._lengths(),
            *self._generation(),
        ]

    def _generation(self) -> list[Problem]:
        """Refuse a generation of unknown length, and settings that nothing would apply."""
        if self.mode == "generation" and self.generation.max_new_tokens is None:
            return [Problem(("generation", "max_new_tokens"), "say how many tokens to generate for each prompt")]
        generates = self.mode == "generation"
        if not generates and self.generation != GenerationSpec():
            return [Problem(("generation",), "needs mode: generation")]
        return []

    def _evaluation(self) -> list[Problem]:
        """Refuse evaluations whose memory is not determined, and metrics that nothing computes."""
        data, problems = self.data, []
        if self.evaluates and self.gathers_outputs and data.eval_samples is None:
            message = (
                "evaluation keeps the outputs of all samples on the GPU until its end: say how many there are, or set "
                "eval_accumulation_steps"
            )
            problems.append(Problem(("data", "eval_samples"), message))
        if data.preprocess_logits_for_metrics is not None and not data.compute_metrics:
            problems.append(Problem(("data", "preprocess_logits_for_metrics"), "needs compute_metrics"))
        if self.train.predict_with_generate and self.evaluates and not data.compute_metrics:
            message = "needs data.compute_metrics: without it the Trainer computes the loss only"
            problems.append(Problem(("train", "predict_with_generate"), message))
        if self.train.batch_eval_metrics and data.compute_metrics is True:
            message = "batch_eval_metrics calls it with tensors of the GPU: name the function"
            problems.append(Problem(("data", "compute_metrics"), message))
        return problems

    def _lengths(self) -> list[Problem]:
        """Refuse lengths of samples where batches of different lengths are not simulated."""
        here, train = ("data", "lengths"), self.train
        if self.data.lengths is None:
            return []
        problems = []
        if self.mode != "training":
            problems.append(Problem(here, f"are those of a training; for {self.mode} give data.sequence_length"))
        if self.parallel.world_size > 1:
            message = "are simulated on one GPU: on several, ranks wait for the one with the longest batch"
            problems.append(Problem(here, message))
        if self.evaluates:
            message = "evaluation is not simulated together with data.lengths: predict one without the other"
            problems.append(Problem(("train", "eval_strategy"), message))
        if self.saves:
            message = "saving is not simulated together with data.lengths: predict one without the other"
            problems.append(Problem(("train", "save_strategy"), message))
        if self.data.varies and (train.torch_empty_cache_steps or 1) > 1:
            message = "cannot be combined with data.lengths, except as 1: steps would differ by their number"
            problems.append(Problem(("train", "torch_empty_cache_steps"), message))
        return problems

    def _spread(self) -> list[Problem]:
        """Refuse what the loop cannot spread over several GPUs."""
        parallel, train = self.parallel, self.train
        if parallel.world_size > 1 and self.mode != "training":
            return [Problem(("parallel",), f"{self.mode} on several GPUs is not simulated: without it, one GPU is")]
        if self.mode != "training":
            return []
        by_trainer = "deepspeed" if train.deepspeed else "fsdp" if train.fsdp else "ddp"
        strategy = parallel.strategy or (by_trainer if self.loop == "trainer" else "ddp")
        grouped = [] if strategy.startswith("fsdp") else parallel.ungrouped(strategy)
        problems = [Problem(("parallel", *each.path), each.message) for each in grouped]
        problems += self._pipeline() if parallel.pp_size > 1 else []
        if parallel.sequence_parallel and self.data.padding:
            reason = "needs an attention mask, which models of transformers do not take with shards of a sequence"
            problems.append(Problem(("data", "padding"), f"{reason}: leave it out, or parallel.sequence_parallel"))
        if parallel.cp_size > 1 and self.data.padding:
            reason = "needs an attention mask, which ring attention does not take: leave it out, or parallel.cp_size"
            problems.append(Problem(("data", "padding"), reason))
        return problems + (self._spread_by_trainer() if self.loop == "trainer" else [])

    @property
    def microbatches(self) -> int:
        """Micro-batches that a pipeline divides a batch into."""
        return self.parallel.pp_microbatches or self.batch_size

    def _pipeline(self) -> list[Problem]:
        """Refuse batches that the pipeline's schedule cannot divide, and settings that it has no place for."""
        parallel, train, count = self.parallel, self.train, self.microbatches
        here, problems = ("parallel", "pp_microbatches"), []
        if self.batch_size % count:
            problems.append(Problem(here, f"{count} does not divide the batch of {self.batch_size} samples"))
        if parallel.schedule == "1F1B" and count < parallel.stages:
            reason = f"1F1B needs at least as many micro-batches as stages ({parallel.stages}), found {count}"
            problems.append(Problem(here, f"{reason}: use more, or pp_schedule: GPipe"))
        rounds = max(1, count // parallel.pp_size)
        if parallel.schedule.startswith("Interleaved") and count % rounds:
            reason = f"{parallel.schedule} runs {count} micro-batches in {rounds} rounds, which do not divide them"
            problems.append(Problem(here, f"{reason}: use a multiple of pp_size ({parallel.pp_size})"))
        if train.gradient_accumulation_steps > 1:
            reason = "is 1 with a pipeline, which accumulates gradients over parallel.pp_microbatches"
            problems.append(Problem(("train", "gradient_accumulation_steps"), reason))
        if train.fp16:
            reason = "needs a gradient scaler that all stages share, which PyTorch does not have: use bf16"
            problems.append(Problem(("train", "fp16"), reason))
        if self.model.lora is not None:
            problems.append(Problem(("model", "lora"), "is not simulated in a pipeline"))
        return problems

    def _spread_by_trainer(self) -> list[Problem]:
        """Refuse what the Trainer cannot spread over several GPUs."""
        parallel, train = self.parallel, self.train
        defaults = {name: field.default for name, field in ParallelSpec.model_fields.items()}
        problems = [
            Problem(("parallel", name), instead)
            for name, instead in _BY_TRAINER.items()
            if getattr(parallel, name) != defaults[name] and (name, parallel.strategy) != ("strategy", "dp")
        ]
        if parallel.strategy == "dp":
            problems += self._not_for_data_parallel()
        problems += [] if train.deepspeed is None else self._deepspeed(train.deepspeed)
        if train.fsdp and parallel.world_size == 1:
            problems.append(Problem(("train", "fsdp"), "shards over several GPUs: set parallel.gpus"))
        return problems + (self._fsdp_config() if train.fsdp else [])

    def _not_for_data_parallel(self) -> list[Problem]:
        """Refuse settings of other strategies, which the Trainer ignores or refuses when it uses DataParallel."""
        defaults = {name: field.default for name, field in TrainSpec.model_fields.items()}
        return [
            Problem(("train", name), "belongs to DDP, FSDP or DeepSpeed, but parallel.strategy is dp: leave it out")
            for name in defaults
            if name.startswith(("fsdp", "ddp_", "deepspeed")) and getattr(self.train, name) != defaults[name]
        ]

    def _deepspeed(self, config: Mapping[str, Any]) -> list[Problem]:
        """Refuse what DeepSpeed does not do, and what is not simulated."""
        here = ("train", "deepspeed")
        problems = [Problem((*here, *each.path), each.message) for each in deepspeed_problems(config)]
        if self.train.fsdp:
            problems.append(Problem(("train", "fsdp"), "cannot be combined with deepspeed: choose one of the two"))
        if self.saves:
            problems.append(Problem(("train", "save_strategy"), "saving is not simulated with deepspeed: leave it out"))
        if self.data.lengths is not None:
            problems.append(Problem(("data", "lengths"), "are not simulated with deepspeed: give data.sequence_length"))
        return problems

    def _fsdp_config(self) -> list[Problem]:
        """Refuse keys that transformers would ignore, and what is not simulated."""
        here, problems = ("train", "fsdp_config"), []
        for key, value in (self.train.fsdp_config or {}).items():
            name = key.removeprefix("fsdp_")
            if name.startswith("xla") and value:
                problems.append(Problem((*here, key), "is about TPUs, which are not simulated"))
            elif name == "activation_checkpointing_offload":
                if str(value).lower() in ("true", "1"):
                    problems.append(Problem((*here, key), "keeps activations in host memory, which is not simulated"))
            elif name not in _FSDP_CONFIG and not name.startswith("xla"):
                problems.append(Problem((*here, key), f"unknown key{suggestion(name, _FSDP_CONFIG)}"))
            elif name == "version" and str(value) not in ("1", "2"):
                problems.append(Problem((*here, key), f"must be 1 or 2, found {value!r}"))
        return problems

    def _unscalable_gradients(self) -> list[Problem]:
        """Refuse float16 gradients that GradScaler would unscale (torch/amp/grad_scaler.py, ``_unscale_grads_``).

        It unscales before clipping, and before the step of every optimizer that does not unscale inside its kernel.
        """
        if not self.cannot_unscale(self.model.dtype):
            return []
        message = (
            "gradient scaling cannot unscale the float16 gradients of float16 weights "
            "(PyTorch raises `Attempting to unscale FP16 gradients.`): use dtype float32, or bf16, or remove fp16"
        )
        return [Problem(("train", "fp16"), message)]

    def cannot_unscale(self, dtype: str) -> bool:
        """Return whether gradient scaling would refuse the gradients of weights in ``dtype``."""
        train = self.train
        trains_halves = dtype == "float16" and self.model.lora is None
        unscales = train.max_grad_norm > 0 or train.optim not in FUSED_OPTIMIZERS
        return self.mode == "training" and train.fp16 and trains_halves and unscales

    def _refused_by_loop(self) -> list[Problem]:
        """Return a problem for each setting that the loop cannot apply."""
        defaults = {name: field.default for name, field in TrainSpec.model_fields.items()}
        refused = unsupported_settings(LOOPS[self.loop], self.train, defaults)
        return [Problem(("train", name), reason) for name, reason in refused.items()]

    def _oversized_batch(self) -> list[Problem]:
        """Refuse batches that fit on no GPU, whose tensors would take minutes to make on the CPU."""
        tokens = 1 if self.data.factory else self.data.sequence_length or 1
        if self.batch_size * tokens <= MAX_BATCH_ELEMENTS:
            return []
        is_eval = self.mode != "training" and self.train.per_device_eval_batch_size is not None
        name = "per_device_eval_batch_size" if is_eval else "per_device_train_batch_size"
        message = f"is too large for any GPU: {self.batch_size:,} samples"
        return [Problem(("train", name), message + (f" of {tokens:,} tokens" if tokens > 1 else ""))]

    def _targets(self) -> list[Problem]:
        if self.model.lora is not None and self.model.freeze:
            return [
                Problem(("model", "freeze"), "cannot be combined with lora, which freezes everything but the adapters")
            ]
        return []
