"""The training loops that a workload can name, one row each.

``LOOPS`` describes them: the flags, the reference page, the process that imports what a run needs, the timing model and
the measurement all read this table.  To add a loop, write its function (see ``trainatomy/training/loops``), add its
name and a row here, and its CPU costs to ``catalog/hosts.yaml``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from collections.abc import Callable

    from trainatomy.workload.schema import Workload

LoopName = Literal["trainer", "sft", "dpo", "kto", "reward", "grpo", "preference", "sentence_transformers", "pytorch"]
"""The values of the workload's key ``loop``: the names of the rows below that train."""


@dataclass(frozen=True, slots=True)
class Loop:
    """A way to run the steps of a workload.

    Every setting of ``train`` is applied by the loop unless ``support.yaml`` refuses it or it is named in ``unused``.

    Attributes:
        name: Value of the workload's key ``loop``, or of ``mode`` for a loop that does not train.
        run: ``module:function``; a function of a ``trainatomy.training.run.Run``.
        description: One sentence for the reference page.
        cpu_costs: Key of the loop's costs in ``catalog/hosts.yaml``.
        libraries: Optional libraries that must be installed, each with what needs it, for the error message.
        extra: What pip installs for them, where one name does for all.
        imports: Further modules to import before the simulated GPU appears or the process is forked.
        trains: Whether the loop runs backward passes and an optimizer.
        unused: Settings that have no meaning in this loop and are ignored.
        by_trainer: Whether the steps are those of the Hugging Face Trainer, or of a class that derives from it.
        defaults: Settings of ``train`` whose defaults differ from ``TrainingArguments``.
        arguments: ``module:class`` of the trainer's arguments.
        sequences: Sequences that a sample has in the batch: two where it is a pair of answers.
    """

    name: str
    run: str
    description: str
    cpu_costs: str
    libraries: Mapping[str, str] = field(default_factory=dict)
    extra: str | None = None
    imports: tuple[str, ...] = ()
    trains: bool = True
    unused: frozenset[str] = frozenset()
    by_trainer: bool = False
    defaults: Mapping[str, Any] = field(default_factory=dict)
    arguments: str = "transformers:TrainingArguments"
    sequences: int = 1

    @property
    def settings(self) -> str | None:
        """Name of the configuration whose further settings the section ``trl`` holds, None without one."""
        library, _, name = self.arguments.partition(":")
        return name if library == "trl" else None

    @property
    def module(self) -> str:
        """The module that defines the loop's function."""
        return self.run.partition(":")[0]

    def function(self) -> Callable[..., None]:
        """Import and return the loop's function."""
        module, _, name = self.run.partition(":")
        found: Callable[..., None] = getattr(import_module(module), name)
        return found


_HOST_ONLY = frozenset({"dataloader_pin_memory", "dataloader_num_workers", "dataloader_prefetch_factor", "seed"})
"""Settings without effect on the GPU's memory or on the operations of a step, in any loop."""

_EVALUATION_ONLY = frozenset({"per_device_eval_batch_size", "fp16_full_eval", "bf16_full_eval"})

EVALUATION = (
    "eval_strategy",
    "do_eval",
    "eval_on_start",
    "eval_accumulation_steps",
    "eval_do_concat_batches",
    "prediction_loss_only",
    "batch_eval_metrics",
    "include_for_metrics",
    "predict_with_generate",
    "generation_max_length",
    "generation_num_beams",
)
"""Settings of the Trainer's evaluation."""

SAVING = (
    "save_strategy",
    "save_total_limit",
    "save_only_model",
    "load_best_model_at_end",
    "resume_from_checkpoint",
)
"""Settings of the Trainer's checkpoints."""

_OF_TRAINING = _HOST_ONLY | {
    "train_sampling_strategy",
    "deepspeed",
    "gradient_accumulation_steps",
    "gradient_checkpointing",
    "gradient_checkpointing_every",
    "gradient_checkpointing_kwargs",
    "optim",
    "optim_args",
    "optim_target_modules",
    "max_grad_norm",
    "learning_rate",
    "weight_decay",
    "adam_beta1",
    "adam_beta2",
    "adam_epsilon",
    "label_smoothing_factor",
    "neftune_noise_alpha",
    "average_tokens_across_devices",
    "logging_nan_inf_filter",
    "include_num_input_tokens_seen",
    "use_liger_kernel",
    "liger_kernel_config",
    "torch_compile",
    "torch_compile_backend",
    "torch_compile_mode",
    "dynamo_use_regional_compilation",
    "torch_empty_cache_steps",
    "fsdp",
    "fsdp_config",
    "ddp_find_unused_parameters",
    "ddp_bucket_cap_mb",
    "ddp_broadcast_buffers",
    "ddp_static_graph",
    *EVALUATION,
    *SAVING,
}
"""Settings without meaning where nothing is trained."""


def _of_trl(
    name: str,
    settings: str,
    description: str,
    *,
    defaults: Mapping[str, Any],
    sequences: int = 1,
) -> Loop:
    """Return the row of one of TRL's trainers.

    ``defaults`` are those of its configuration beside the two that all of them change.
    """
    return Loop(
        name=name,
        run="trainatomy.training.loops.trl:train",
        description=description,
        cpu_costs="trl",
        libraries={"accelerate": "the Trainer", "trl": f"loop: {name}", "datasets": f"loop: {name}"},
        extra="'trainatomy[trl]'",
        imports=("transformers.trainer", f"trl.trainer.{name}_trainer"),
        unused=_HOST_ONLY | _EVALUATION_ONLY,
        by_trainer=True,
        defaults={"gradient_checkpointing": True, "bf16": True, **defaults},
        arguments=f"trl:{settings}",
        sequences=sequences,
    )


LOOPS: Mapping[str, Loop] = {
    loop.name: loop
    for loop in (
        Loop(
            name="trainer",
            run="trainatomy.training.loops.trainer:train",
            description="the step of the Hugging Face Trainer",
            cpu_costs="trainer",
            libraries={"accelerate": "the Trainer"},
            imports=("transformers.trainer",),
            unused=_HOST_ONLY | _EVALUATION_ONLY,
            by_trainer=True,
        ),
        _of_trl(
            "sft",
            "SFTConfig",
            "the step of TRL's `SFTTrainer`: supervised fine-tuning",
            defaults={"learning_rate": 2e-5},
        ),
        _of_trl(
            "dpo",
            "DPOConfig",
            "the step of TRL's `DPOTrainer`: pairs of answers, with a reference model",
            defaults={"learning_rate": 1e-6},
            sequences=2,
        ),
        _of_trl(
            "kto",
            "KTOConfig",
            "the step of TRL's `KTOTrainer`: answers labelled good or bad, with a reference model",
            defaults={"learning_rate": 1e-6, "train_sampling_strategy": "sequential"},
        ),
        _of_trl(
            "reward",
            "RewardConfig",
            "the step of TRL's `RewardTrainer`: a reward model, on pairs of answers",
            defaults={"learning_rate": 1e-4},
            sequences=2,
        ),
        _of_trl(
            "grpo",
            "GRPOConfig",
            "the step of TRL's `GRPOTrainer`, which generates what it trains on",
            defaults={"learning_rate": 1e-6},
        ),
        Loop(
            name="preference",
            run="trainatomy.training.loops.preference:train",
            description="the step of other frameworks' trainers on preferences: DPO, KTO, ORPO, rewards and others",
            cpu_costs="trainer",
            libraries={"accelerate": "the Trainer"},
            imports=("transformers.trainer",),
            unused=_HOST_ONLY | _EVALUATION_ONLY,
            by_trainer=True,
            sequences=2,
        ),
        Loop(
            name="sentence_transformers",
            run="trainatomy.training.loops.sentence_transformers:train",
            description="the step of sentence-transformers' `SentenceTransformerTrainer`: embedding models",
            cpu_costs="trainer",
            libraries={
                "accelerate": "the Trainer",
                "sentence_transformers": "loop: sentence_transformers",
                "datasets": "loop: sentence_transformers",
                "sklearn": "loop: sentence_transformers",
            },
            extra="'trainatomy[sentence-transformers]'",
            imports=("transformers.trainer",),
            unused=_HOST_ONLY | _EVALUATION_ONLY,
            by_trainer=True,
            arguments="sentence_transformers:SentenceTransformerTrainingArguments",
        ),
        Loop(
            name="pytorch",
            run="trainatomy.training.loops.pytorch:train",
            description="a plain PyTorch loop",
            cpu_costs="pytorch",
            libraries={"accelerate": "the Trainer"},
            imports=("transformers.trainer",),
            unused=_HOST_ONLY | _EVALUATION_ONLY,
        ),
        Loop(
            name="generation",
            run="trainatomy.training.loops.generation:generate",
            description="tokens by transformers' `generate()`, in evaluation mode and without gradients",
            cpu_costs="generation",
            imports=("transformers.generation.utils",),
            trains=False,
            unused=_OF_TRAINING,
        ),
        Loop(
            name="inference",
            run="trainatomy.training.loops.pytorch:infer",
            description="the forward pass alone, in evaluation mode and without gradients",
            cpu_costs="inference",
            trains=False,
            unused=_OF_TRAINING,
        ),
    )
}
"""The loops by its name."""

_TRL = "TRL's trainer is not run; "
OTHER_LOOPS: Mapping[str, str] = {
    "ppo": _TRL + "PPO also generates, and holds a reference, a reward and a value model",
    "orpo": _TRL + "ORPO runs chosen and rejected answers in one batch without a reference model: measure it",
    "cpo": _TRL + "CPO runs chosen and rejected answers in one batch without a reference model: measure it",
    "rloo": _TRL + "RLOO generates what it trains on, as loop: grpo does: measure it",
    "sentencetransformer": "write loop: sentence_transformers",
    "sentence-transformers": "write loop: sentence_transformers",
    "lightning": "Lightning's trainer is not run; give the module as a factory with loop: pytorch",
}
"""Why a loop of another library is refused, by its name without ``Trainer``, and what to write instead."""


def other_loop(name: object) -> str | None:
    """Return what to write for the name of another library's trainer, such as ``SFTTrainer``; None for other names."""
    short = str(name).lower().rpartition(".")[2].removesuffix("trainer").rstrip("-_")
    return f"write loop: {short}" if short in LOOPS and LOOPS[short].settings else OTHER_LOOPS.get(short)


def describe_loops() -> str:
    """Return the loops that train as one line of text for help and reference pages."""
    return "; ".join(f"`{loop.name}`: {loop.description}" for loop in LOOPS.values() if loop.trains)


def loop_of(workload: Workload) -> Loop:
    """Return the loop that runs ``workload``: that of its mode, or the one it names."""
    return LOOPS.get(workload.mode) or LOOPS[workload.loop]
