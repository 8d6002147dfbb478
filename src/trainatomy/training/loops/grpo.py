"""``loop: grpo``: TRL's ``GRPOTrainer`` with an observer.  Importing this module imports TRL, which takes seconds.

Every completion gets ``max_completion_length`` tokens: where a real one ends depends on values.  The reward is a number
for each completion, from a function on the host.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

from trl import GRPOTrainer
from trl.trainer import grpo_trainer

from trainatomy.training.loops.generation import generating
from trainatomy.training.loops.trl import ObservedTrlTrainer, batches_given, train_with
from trainatomy.training.model import unwrap
from trainatomy.training.trl import adapters_of_this_training, loaded_as, prompts, reference_of

if TYPE_CHECKING:
    import torch
    from torch import nn

    from trainatomy.training.batch import BatchesOfLengths, MakeBatch
    from trainatomy.training.observer import Observer
    from trainatomy.workload.schema import Workload


class ObservedGRPOTrainer(ObservedTrlTrainer, GRPOTrainer):
    """TRL's trainer that notifies an observer of every phase of a step, and of the generation before it."""

    def training_step(self, model: nn.Module, inputs: Any, *arguments: Any, **keywords: Any) -> torch.Tensor:
        """Run a micro-batch; none may repeat the one before, because the first of several generates for all of them."""
        loss: torch.Tensor = GRPOTrainer.training_step(self, model, inputs, *arguments, **keywords)
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
        original, new = inner.generate, self.max_completion_length
        special = {*self.eos_token_ids, self._tokenizer.pad_token_id}
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


def train(
    workload: Workload,
    model: nn.Module,
    *,
    device: str,
    steps: int,
    observer: Observer,
    make_batch: MakeBatch | BatchesOfLengths | None = None,
) -> None:
    """Train ``model`` for ``steps`` optimizer steps; the arguments are those of ``trainatomy.training.run.run``."""
    batches_given(workload, make_batch)

    def make(arguments: Any, **shared: Any) -> ObservedGRPOTrainer:
        has_reference = workload.model.lora is None and arguments.beta != 0
        reference = reference_of(model) if has_reference else None
        with adapters_of_this_training(grpo_trainer), loaded_as(grpo_trainer, reference):
            return ObservedGRPOTrainer(
                workload,
                observer,
                model,
                args=arguments,
                reward_funcs=reward,
                train_dataset=prompts(workload, model, arguments.generation_batch_size * steps),
                **shared,
            )

    train_with(make, workload, model, device=device, steps=steps, observer=observer)
