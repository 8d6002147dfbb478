"""``loop: sft``, ``dpo``, ``kto``, ``reward`` and ``grpo``: TRL's trainers with an observer.

Importing the module of a trainer takes seconds; ``workload.loops`` names it for the process to import beforehand.

With GRPO every completion gets ``max_completion_length`` tokens: where a real one ends depends on values.  The reward
is a number for each completion, from a function on the host.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

from trainatomy.errors import WorkloadError
from trainatomy.training.batch import BatchesOfLengths
from trainatomy.training.checkpointing import check_checkpointing
from trainatomy.training.loops.generation import generating
from trainatomy.training.loops.trainer import ObservedTrainer, train_with
from trainatomy.training.model import unwrap
from trainatomy.training.trl import (
    adapters_of_this_training,
    check_model,
    evaluated_lengths,
    labelled_answers,
    load_bitsandbytes,
    loaded_as,
    make_tokenizer,
    packed_samples,
    preference_pairs,
    prompts,
    quiet_trl,
    reference_of,
    sequence_length,
    tokenised_pairs,
    tokenised_samples,
    trained_batches,
    trained_lengths,
)

if TYPE_CHECKING:
    import torch
    from torch import nn

    from trainatomy.training.run import Run


class ObservedTrlTrainer(ObservedTrainer):
    """Base of TRL's trainers that notify an observer of every phase of a step; TRL's class is the second base."""

    def __init__(self, run: Run, **keywords: Any) -> None:
        super(ObservedTrainer, self).__init__(model=run.model, callbacks=self.observe(run), **keywords)
        self.follow()
        if (reference := getattr(self, "ref_model", None)) is not None:
            run.observer.reference_loaded(reference)


class ObservedGeneration(ObservedTrlTrainer):
    """Base of TRL's trainer that generates what it trains on; it notifies an observer of the generation, too."""

    def training_step(self, model: nn.Module, inputs: Any, *arguments: Any, **keywords: Any) -> torch.Tensor:
        """Run a micro-batch; none may repeat the one before, because the first of several generates for all of them."""
        loss = super(ObservedTrainer, self).training_step(model, inputs, *arguments, **keywords)
        self._observer.loss_kept(loss)
        self._observer.micro_step_end(self._micro_step)
        self._micro_step = (self._micro_step + 1) % self.args.gradient_accumulation_steps
        return loss

    def _prepare_inputs(self, inputs: Any) -> Any:
        prepared = super()._prepare_inputs(inputs)
        self._observer.micro_step_begin(self._micro_step)
        return prepared

    def _generate_single_turn(self, *arguments: Any, **keywords: Any) -> Any:
        inner: Any = unwrap(self.model)
        trainer: Any = self
        original, new = inner.generate, trainer.max_completion_length
        special = {*trainer.eos_token_ids, trainer._tokenizer.pad_token_id}
        word = next(token for token in range(len(special) + 1) if token not in special)

        def generate(*given: Any, **named: Any) -> Any:
            tokens = self._observer.repeat_generate(inner, given, named)
            if tokens is None:
                with generating(inner, self._observer, new):
                    tokens = original(*given, **named)
            self._observer.generated(tokens, word)
            return tokens

        inner.generate = generate
        try:
            return super()._generate_single_turn(*arguments, **keywords)
        finally:
            del inner.generate


def reward(completions: list[Any], **keywords: Any) -> list[float]:
    """Return a number for each completion; all alike would make all advantages 0."""
    drawn = random.Random(0)
    return [drawn.random() for _ in completions]


def train(run: Run) -> None:
    """Train the model of ``run`` with the trainer of its loop.

    Raises:
        WorkloadError: The model is none that the trainer trains, or a function makes the batches, which is what TRL
            does.
    """
    workload, model = run.workload, run.model
    loop = workload.loop
    if run.make_batch is not None and not isinstance(run.make_batch, BatchesOfLengths):
        raise WorkloadError(f"loop: {loop} takes no batch of your own: TRL makes the batches", key="loop")
    check_model(loop, model)
    check_checkpointing(model, workload.train)
    if workload.trl.get("activation_offloading"):
        load_bitsandbytes()
    kind = _TRAINERS[loop]
    module = import_module(f"trl.trainer.{loop}_trainer")
    trainer = type(f"Observed{kind.name}", (kind.base, getattr(module, kind.name)), {})

    def make(arguments: Any, optimizer: torch.optim.Optimizer | None) -> ObservedTrlTrainer:
        keywords = kind.keywords(run, arguments)
        keywords |= {"args": arguments, "processing_class": make_tokenizer(model), "optimizers": (optimizer, None)}
        with adapters_of_this_training(module) if kind.compares else nullcontext():
            if kind.base is ObservedGeneration:
                with loaded_as(module, keywords.pop("ref_model")):
                    return trainer(run, **keywords)
            return trainer(run, **keywords)

    with quiet_trl():
        train_with(run, make)


def _reference(run: Run, *, is_used: bool) -> nn.Module | None:
    """Return a reference model, None where none is used or where the model without its adapters serves."""
    return reference_of(run.model) if is_used and run.workload.model.lora is None else None


def _datasets(run: Run, make: Callable[[list[int], int], Any]) -> dict[str, Any]:
    """Return the samples of a training and of its evaluation, made for their lengths and the size of a batch."""
    workload = run.workload
    evaluated: dict[str, Any] = {}
    if workload.evaluates:
        evaluated["eval_dataset"] = make(evaluated_lengths(workload, run.model), workload.eval_batch_size)
    return {"train_dataset": make(trained_lengths(run), workload.batch_size), **evaluated}


def _of_sft(run: Run, arguments: Any) -> dict[str, Any]:
    workload, model, keywords = run.workload, run.model, dict[str, Any]()
    fitting = max((arguments.max_length or 0) // sequence_length(workload, model), 1)
    if workload.evaluates:
        packs = arguments.packing if arguments.eval_packing is None else arguments.eval_packing
        more = fitting if packs and workload.data.eval_samples is None else 1  # as many batches of packs
        keywords["eval_dataset"] = tokenised_samples(workload, model, evaluated_lengths(workload, model) * more)
    if arguments.packing and workload.data.varies:
        arguments.dataset_kwargs = {"skip_prepare_dataset": True}
        samples = packed_samples(workload, model, trained_batches(run))
    else:
        samples = tokenised_samples(workload, model, trained_lengths(run) * (fitting if arguments.packing else 1))
    return {"train_dataset": samples, **keywords}


def _of_dpo(run: Run, arguments: Any) -> dict[str, Any]:
    datasets = _datasets(run, lambda lengths, rows: preference_pairs(run.workload, run.model, lengths))
    return {"ref_model": _reference(run, is_used=not arguments.precompute_ref_log_probs), **datasets}


def _of_kto(run: Run, arguments: Any) -> dict[str, Any]:
    datasets = _datasets(run, lambda lengths, rows: labelled_answers(run.workload, run.model, lengths, rows))
    return {"ref_model": _reference(run, is_used=not arguments.precompute_ref_log_probs), **datasets}


def _of_reward(run: Run, arguments: Any) -> dict[str, Any]:
    length, longest = sequence_length(run.workload, run.model), arguments.max_length
    if longest is not None and length > longest and not run.workload.data.varies:
        raise WorkloadError(
            f"trl.max_length: TRL leaves out samples of more than {longest} tokens, and all have {length}: raise it",
            key="trl.max_length",
        )
    return _datasets(run, lambda lengths, rows: tokenised_pairs(run.model, lengths))


def _of_grpo(run: Run, arguments: Any) -> dict[str, Any]:
    return {
        "ref_model": _reference(run, is_used=arguments.beta != 0),
        "reward_funcs": reward,
        "train_dataset": prompts(run.workload, run.model, arguments.generation_batch_size * run.steps),
    }


class _Trainer(NamedTuple):
    """One of TRL's trainers.

    Attributes:
        name: Its class.
        keywords: Returns, for a training and the trainer's arguments, what its constructor takes beside what all take.
        compares: Whether it compares with a reference model.
        base: What notifies the observer.
    """

    name: str
    keywords: Callable[[Run, Any], dict[str, Any]]
    compares: bool = False
    base: type[ObservedTrlTrainer] = ObservedTrlTrainer


_TRAINERS: Mapping[str, _Trainer] = {
    "sft": _Trainer("SFTTrainer", _of_sft),
    "dpo": _Trainer("DPOTrainer", _of_dpo, compares=True),
    "kto": _Trainer("KTOTrainer", _of_kto, compares=True),
    "reward": _Trainer("RewardTrainer", _of_reward),
    "grpo": _Trainer("GRPOTrainer", _of_grpo, compares=True, base=ObservedGeneration),
}
"""The trainers by the name of their loop."""
