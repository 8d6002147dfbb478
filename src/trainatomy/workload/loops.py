"""The training loops that a workload can name, one row each.

``LOOPS`` describes them: the flags, the reference page, the process that imports what a run needs, the timing model and
the measurement all read this table.  To add a loop, write its function (see ``trainatomy/training/loops``), add its
name and a row here, and its CPU costs to ``catalog/hosts.yaml``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from trainatomy.workload.schema import Workload

LoopName = Literal["trainer", "sft", "dpo", "kto", "reward", "grpo", "preference", "sentence_transformers", "pytorch"]
"""The values of the workload's key ``loop``: the names of the rows below that train."""


@dataclass(frozen=True, slots=True)
class Loop:
    """A way to run the steps of a workload.

    Every setting of ``train`` that has a meaning in a loop is applied by it unless ``support.yaml`` refuses it.

    Attributes:
        name: Value of the workload's key ``loop``, or of ``mode`` for a loop that does not train.
        run: ``module:function``; a function of a ``trainatomy.training.run.Run``.
        description: One sentence for the reference page.
        cpu_costs: Key of the loop's costs in ``catalog/hosts.yaml``.
        needs: Optional libraries that must be installed besides accelerate.
        extra: What pip installs for them, where one name does for all.
        imports: Further modules to import before the simulated GPU appears or the process is forked.
        trains: Whether the loop runs backward passes and an optimizer.
        by_trainer: Whether the steps are those of the Hugging Face Trainer, or of a class that derives from it.
        defaults: Settings of ``train`` whose defaults differ from ``TrainingArguments``.
        arguments: ``module:class`` of the trainer's arguments.
        sequences: Sequences that a sample has in the batch: two where it is a pair of answers.
    """

    name: str
    run: str
    description: str
    cpu_costs: str = "trainer"
    needs: tuple[str, ...] = ()
    extra: str | None = None
    imports: tuple[str, ...] = ("transformers.trainer",)
    trains: bool = True
    by_trainer: bool = True
    defaults: Mapping[str, Any] = field(default_factory=dict)
    arguments: str = "transformers:TrainingArguments"
    sequences: int = 1

    @property
    def settings(self) -> str | None:
        """Name of the configuration whose further settings the section ``trl`` holds, None without one."""
        library, _, name = self.arguments.partition(":")
        return name if library == "trl" else None

    @property
    def libraries(self) -> dict[str, str]:
        """Optional libraries that must be installed, each with what needs it, for the error message."""
        of_trainer = {"accelerate": "the Trainer"} if self.trains else {}
        return of_trainer | dict.fromkeys(self.needs, f"loop: {self.name}")

    @property
    def module(self) -> str:
        """The module that defines the loop's function."""
        return self.run.partition(":")[0]

    def function(self) -> Callable[..., None]:
        """Import and return the loop's function."""
        module, _, name = self.run.partition(":")
        found: Callable[..., None] = getattr(import_module(module), name)
        return found


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
        needs=("trl", "datasets"),
        extra="'trainatomy[trl]'",
        imports=("transformers.trainer", f"trl.trainer.{name}_trainer"),
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
            sequences=2,
        ),
        Loop(
            name="sentence_transformers",
            run="trainatomy.training.loops.sentence_transformers:train",
            description="the step of sentence-transformers' `SentenceTransformerTrainer`: embedding models",
            needs=("sentence_transformers", "datasets", "sklearn"),
            extra="'trainatomy[sentence-transformers]'",
            arguments="sentence_transformers:SentenceTransformerTrainingArguments",
        ),
        Loop(
            name="pytorch",
            run="trainatomy.training.loops.pytorch:train",
            description="a plain PyTorch loop",
            cpu_costs="pytorch",
            by_trainer=False,
        ),
        Loop(
            name="generation",
            run="trainatomy.training.loops.generation:generate",
            description="tokens by transformers' `generate()`, in evaluation mode and without gradients",
            cpu_costs="generation",
            imports=("transformers.generation.utils",),
            trains=False,
            by_trainer=False,
        ),
        Loop(
            name="inference",
            run="trainatomy.training.loops.pytorch:infer",
            description="the forward pass alone, in evaluation mode and without gradients",
            cpu_costs="inference",
            imports=(),
            trains=False,
            by_trainer=False,
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
