"""The ``train`` section: names, meaning and defaults of transformers' ``TrainingArguments`` (5.17).

``OWN_KEYS`` are names of our own.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, ModelWrapValidatorHandler, PrivateAttr, model_validator
from pydantic_core import PydanticCustomError

from trainatomy.workload import arguments as checkpointing
from trainatomy.workload.arguments import arguments, ignored_problems, is_own
from trainatomy.workload.deepspeed import read_deepspeed
from trainatomy.workload.document import suggestion
from trainatomy.workload.section import (
    Amount,
    Count,
    Decay,
    Fraction,
    Index,
    Names,
    Problem,
    Section,
    Settings,
    Text,
    refuse,
)

OWN_KEYS = frozenset({"gradient_checkpointing_every", "dynamo_use_regional_compilation"})
"""Keys that ``TrainingArguments`` does not have."""
MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
"""Modes of ``torch.compile``."""
CAPTURING = ("reduce-overhead", "max-autotune")
"""Those that run CUDA graphs."""


def _optimizer(name: str) -> str:
    """Check the name of an optimizer; for a class or a function only its syntax, as no code is loaded here."""
    known = arguments()
    if name in known.optimizers or is_own(name):
        return name
    if reason := known.refused_optimizers.get(name):
        raise PydanticCustomError("optimizer", "{name} {reason}", {"name": name, "reason": reason})
    meant = known.optimizer_synonyms.get(name.casefold().replace("-", "_"))
    hint = f"; did you mean {meant}?" if meant else suggestion(name, known.optimizers)
    raise PydanticCustomError("optimizer", "unknown optimizer {name}{hint}", {"name": repr(name), "hint": hint})


def _optimizer_arguments(text: str) -> str:
    """Check the syntax of ``optim_args``."""
    for part in _parts(text):
        name, equals, value = part.partition("=")
        if not (name.isidentifier() and equals and value):
            message = 'must look like "momentum=0.9,nesterov=True"; found {part}'
            raise PydanticCustomError("optim_args", message, {"part": repr(part)})
    return text


def _counted_tokens(value: Any) -> Any:
    """Return the name of a boolean, as transformers reads it."""
    return {True: "all", False: "no"}[value] if isinstance(value, bool) else value


def _parts(text: str) -> list[str]:
    """Split ``"eps=(1e-30,0.001), foreach=True"`` at the commas outside brackets, without blanks."""
    return [part for part in re.split(r",(?![^(\[]*[)\]])", text.replace(" ", "")) if part]


def _unless_empty(value: Any) -> Any:
    """Return None for all spellings of FSDP that is off, True for a typed ``true``, and a list of several options."""
    if isinstance(value, list | tuple):
        value = [part for each in value for part in str(each).split()]
    only = value[0] if isinstance(value, list) and len(value) == 1 else value
    if str(only).lower() in ("true", "false"):
        return str(only).lower() == "true" or None
    return value or None


def _strategy(value: Any) -> Any:
    """Return a strategy in lower case; YAML reads ``no`` as false."""
    return "no" if value is False else str(getattr(value, "value", value)).lower()


def _unless_unlimited(value: Any) -> Any:
    """Return None for the Trainer's spelling of no limit, -1."""
    return None if str(value).strip() in ("-1", "0") else value


def _saving(value: Any) -> Any:
    return None if value is None else _strategy(value)


def _unless_none(value: Any) -> Any:
    return False if value is None else value


def _resuming(value: Any) -> Any:
    """Return None for all spellings of a training from the start, and True for a typed ``true``."""
    text = str(value).strip().lower()
    return True if text == "true" else None if text in ("false", "none", "null", "no", "") else value


DEFAULT_EVAL_BATCH_SIZE = 8
"""Samples per batch of an evaluation during a training, transformers' default of ``per_device_eval_batch_size``."""


class TrainSpec(Section):
    """The ``TrainingArguments`` that change memory or time of a step.

    Others (``output_dir``, ``logging_steps``, …) are accepted, and their names are kept in ``ignored``.
    """

    per_device_train_batch_size: Count = Field(default=8, description="samples per batch")
    per_device_eval_batch_size: Count | None = Field(
        default=None,
        description="samples per batch of an evaluation (default: 8), or of `mode: inference` and `mode: generation` "
        "(default: `per_device_train_batch_size`)",
    )
    eval_strategy: Annotated[Literal["no", "steps", "epoch"], BeforeValidator(_strategy)] = Field(
        default="no", description="evaluate during the training; one evaluation is executed"
    )
    do_eval: bool = Field(
        default=False, description="evaluate, as with `eval_strategy` (example scripts do so at the end)"
    )
    eval_on_start: bool = Field(default=False, description="evaluate before the first step as well")
    eval_steps: Amount | None = Field(
        default=None,
        description="steps from one evaluation to the next, or their share of all, for how long a run takes",
    )
    max_steps: Annotated[Count | None, BeforeValidator(_unless_unlimited)] = Field(
        default=None, description="steps of the whole training, for how long it takes; a few of them are executed"
    )
    num_train_epochs: Amount | None = Field(
        default=None,
        description="the same in epochs, whose samples `data.train_samples` or `data.lengths` says (default with them: "
        "3)",
    )
    eval_accumulation_steps: Count | None = Field(
        default=None, description="batches whose outputs evaluation gathers on the GPU (default: all of them)"
    )
    eval_do_concat_batches: bool = Field(
        default=True, description="join the gathered outputs of batches into one tensor, instead of a list"
    )
    predict_with_generate: bool = Field(
        default=False, description="evaluate with `generate()`, as `Seq2SeqTrainer` does with `data.compute_metrics`"
    )
    generation_max_length: Count | None = Field(
        default=None,
        description="tokens of a sequence in `predict_with_generate`, with the first one or the prompt (default: 20)",
    )
    generation_num_beams: Count | None = Field(
        default=None, description="beams in `predict_with_generate` (default: 1)"
    )
    save_strategy: Annotated[Literal["no", "steps", "epoch", "best"] | None, BeforeValidator(_saving)] = Field(
        default=None, description="save checkpoints; one is counted (default: none)"
    )
    save_steps: Amount = Field(
        default=500,
        description="steps from one checkpoint to the next, or their share of all, for how many there are",
    )
    save_total_limit: Annotated[Count | None, BeforeValidator(_unless_unlimited)] = Field(
        default=None, description="checkpoints to keep (default: all)"
    )
    save_only_model: bool = Field(default=False, description="save no optimizer states")
    load_best_model_at_end: Annotated[bool, BeforeValidator(_unless_none)] = Field(
        default=False, description="load the best checkpoint after the training; needs `eval_strategy`, and saves"
    )
    resume_from_checkpoint: Annotated[bool | Text | None, BeforeValidator(_resuming)] = Field(
        default=None,
        description="continue a training: true, or the folder of its checkpoint, which only `trainatomy measure` reads",
    )
    prediction_loss_only: bool = Field(default=False, description="evaluation gathers the loss and no other output")
    batch_eval_metrics: bool = Field(
        default=False,
        description="compute metrics after each evaluation batch, on the GPU, instead of gathering outputs",
    )
    include_for_metrics: Names = Field(
        default=(), description="inputs of metrics besides predictions and labels: `inputs`, `loss`"
    )
    gradient_accumulation_steps: Count = Field(
        default=1, description="batches whose gradients are accumulated before an optimizer step"
    )
    gradient_checkpointing: bool = Field(
        default=False,
        description=(
            "recompute activations in the backward pass (default: true where peft prepares quantised weights for "
            "adapters, else false)"
        ),
    )
    gradient_checkpointing_every: Count = Field(
        default=1,
        description="recompute only every N-th of the layers that transformers can checkpoint",
    )
    gradient_checkpointing_kwargs: Settings | None = Field(
        default=None, description="arguments of PyTorch's checkpointing, such as `{use_reentrant: true}`"
    )
    fp16: bool = Field(default=False, description="mixed precision: autocast to float16 with gradient scaling")
    bf16: bool = Field(default=False, description="mixed precision: autocast to bfloat16")
    tf32: bool | None = Field(default=None, description="TF32 for float32 matrix products (default: PyTorch's)")
    fp16_full_eval: bool = Field(default=False, description="cast the weights to float16 for inference")
    bf16_full_eval: bool = Field(default=False, description="cast the weights to bfloat16 for inference")
    optim: Annotated[str, AfterValidator(_optimizer)] = Field(
        default="adamw_torch_fused",
        description=(
            "optimizer: a name that the Trainer knows, the path of a class, or a function that makes one or "
            "several, `package.module:make` or `file.py:make`"
        ),
    )
    optim_args: Annotated[str, AfterValidator(_optimizer_arguments)] | None = Field(
        default=None, description='further arguments of the optimizer, such as `"momentum=0.9"` or `"foreach=True"`'
    )
    optim_target_modules: str | tuple[str, ...] | None = Field(
        default=None, description="modules for GaLore and APOLLO: names, a regular expression, or `all-linear`"
    )
    max_grad_norm: Amount = Field(default=1.0, description="clip gradients to this norm; 0 switches clipping off")
    learning_rate: Amount = Field(default=5e-5, description="learning rate")
    weight_decay: Amount = Field(default=0.0, description="weight decay")
    adam_beta1: Decay = Field(default=0.9, description="Adam's beta1")
    adam_beta2: Decay = Field(default=0.999, description="Adam's beta2")
    adam_epsilon: Amount = Field(default=1e-8, description="Adam's epsilon")
    label_smoothing_factor: Fraction = Field(default=0.0, description="label smoothing in the Trainer's loss")
    neftune_noise_alpha: Amount | None = Field(
        default=None, description="scale of the NEFTune noise that the Trainer adds to embeddings"
    )
    use_cache: bool | None = Field(
        default=None,
        description="keep the key/value cache, `model.config.use_cache` (default: false with `loop: trainer`, the "
        "model's configuration in other loops)",
    )
    use_liger_kernel: bool = Field(
        default=False, description="Liger's layers, which never store all logits (`pip install 'trainatomy[liger]'`)"
    )
    liger_kernel_config: Settings | None = Field(
        default=None, description="which of Liger's layers to use, such as `{rope: false}` (default: Liger's choice)"
    )
    torch_compile: bool = Field(
        default=False,
        description="compile the model with `torch.compile` (experimental; `pip install 'trainatomy[compile]'`)",
    )
    torch_compile_backend: str | None = Field(
        default=None, description="backend of `torch.compile`: `inductor`, which is the default"
    )
    torch_compile_mode: str | None = Field(
        default=None,
        description="mode of `torch.compile`: `default`, `reduce-overhead` or `max-autotune`, with CUDA graphs, or "
        "`max-autotune-no-cudagraphs`",
    )
    dynamo_use_regional_compilation: bool = Field(
        default=False,
        description="compile each of the repeated layers instead of the whole model, as accelerate does",
    )
    average_tokens_across_devices: bool = Field(
        default=True, description="average the loss over the tokens of all GPUs"
    )
    logging_nan_inf_filter: bool = Field(
        default=True, description="leave NaN and infinite losses out of the logged mean"
    )
    include_num_input_tokens_seen: Annotated[Literal["no", "all", "non_padding"], BeforeValidator(_counted_tokens)] = (
        Field(
            default="no",
            description="count the input tokens on the GPU, for which the CPU waits in each micro-batch (true: `all`)",
        )
    )
    torch_empty_cache_steps: Count | None = Field(default=None, description="empty the allocator's cache every N steps")
    fsdp: Annotated[bool | str | tuple[str, ...] | None, BeforeValidator(_unless_empty)] = Field(
        default=None, description="shard over the GPUs of `parallel` with FSDP (older releases: a string or list)"
    )
    fsdp_config: Settings | None = Field(
        default=None, description="how FSDP shards: the keys of `TrainingArguments.fsdp_config` (`version: 2` or `1`)"
    )
    deepspeed: Annotated[Settings | None, BeforeValidator(read_deepspeed)] = Field(
        default=None, description="train with DeepSpeed: its configuration, as a JSON file or a mapping (ZeRO 0 to 3)"
    )
    ddp_find_unused_parameters: bool | None = Field(
        default=None, description="DDP: look for parameters without a gradient (default: transformers')"
    )
    ddp_bucket_cap_mb: Count | None = Field(default=None, description="DDP: size of a bucket in MiB (default: 25)")
    ddp_broadcast_buffers: bool | None = Field(
        default=None, description="DDP: send buffers from rank 0 in each forward pass (default: transformers')"
    )
    ddp_static_graph: bool | None = Field(default=None, description="DDP: the graph of a step never changes")
    dataloader_pin_memory: bool = Field(default=True, description="copy batches from pinned host memory")
    dataloader_num_workers: Index = Field(default=0, description="worker processes that load batches")
    dataloader_prefetch_factor: Count | None = Field(
        default=None, description="batches that each of these processes makes ahead (default: 2)"
    )
    seed: Index = Field(default=42, description="random seed")
    train_sampling_strategy: Literal["random", "sequential", "group_by_length"] = Field(
        default="random",
        description="order of the samples of `data.lengths`",
    )

    _ignored: tuple[str, ...] = PrivateAttr(default=())
    _missed: tuple[str, ...] = PrivateAttr(default=())

    @property
    def ignored(self) -> tuple[str, ...]:
        """Names of ``TrainingArguments`` that were set and are not applied; ``notes`` says which of them matter."""
        return self._ignored

    @property
    def missed(self) -> tuple[str, ...]:
        """Return those of ``ignored`` that would change memory or time, and are not simulated."""
        return self._missed

    @property
    def compiles(self) -> bool:
        """True if the model is compiled; a backend or a mode asks for it too, as in ``TrainingArguments``."""
        return self.torch_compile or self.torch_compile_backend is not None or self.torch_compile_mode is not None

    def notes(self) -> tuple[str, ...]:
        """Return a note for each reason why settings that matter are not simulated."""
        reasons = arguments().not_simulated
        by_reason: dict[str, list[str]] = {}
        for name in self._missed:
            by_reason.setdefault(reasons[name], []).append(f"train.{name}")
        return tuple(f"{', '.join(names)}: {reason}" for reason, names in by_reason.items())

    def optimizer_arguments(self) -> dict[str, Any]:
        """Parse ``optim_args``: ``"foreach=False,momentum=0.9"`` gives ``{"foreach": False, "momentum": 0.9}``."""
        pairs = (part.partition("=") for part in _parts(self.optim_args or ""))
        return {name: _literal(value) for name, _, value in pairs}

    @model_validator(mode="wrap")
    @classmethod
    def _drop_unapplied(cls, raw: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        """Drop settings that change nothing, and keep their names; a value may be a secret, such as a token."""
        if not isinstance(raw, Mapping):
            return handler(raw)
        dropped = tuple(name for name, value in raw.items() if arguments().is_unapplied(name, value))
        kept = {name: value for name, value in raw.items() if name not in dropped}
        train = handler(checkpointing.move_every(checkpointing.with_old_names(kept)))
        train._ignored = dropped
        if problems := ignored_problems(raw):
            refuse(problems)
        train._missed = tuple(name for name in dropped if arguments().is_missed(name, raw[name]))
        return train

    def contradictions(self) -> list[Problem]:
        """Refuse arguments that PyTorch's checkpointing does not have, and what its compiler does otherwise."""
        return checkpointing.problems(self) + self._compiling_problems()

    def _compiling_problems(self) -> list[Problem]:
        """Refuse what PyTorch's compiler does otherwise than is simulated."""
        problems = []
        backend, mode = self.torch_compile_backend, self.torch_compile_mode
        if backend not in (None, "inductor"):
            message = f"{backend!r} is not simulated; the code of inductor, the default, is"
            problems.append(Problem(("torch_compile_backend",), message))
        if mode not in (None, *MODES):
            message = f"{mode!r} is no mode of torch.compile; {', '.join(MODES[:-1])} and {MODES[-1]} are"
            problems.append(Problem(("torch_compile_mode",), message))
        return problems

    @property
    def offloads_checkpoints(self) -> bool:
        """True if what gradient checkpointing saves is kept in host memory."""
        return self.gradient_checkpointing and checkpointing.offloads(self.gradient_checkpointing_kwargs)


def _literal(text: str) -> Any:
    """Return ``0.9``, ``True`` and ``(0.9, 0.99)`` as Python values, anything else as a string."""
    try:
        return ast.literal_eval({"true": "True", "false": "False", "none": "None"}.get(text, text))
    except (ValueError, SyntaxError):
        return text
