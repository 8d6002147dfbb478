"""``loop: preference``: the steps of frameworks that train on preferences with a Trainer of their own.

Reference models that DeepSpeed runs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import Trainer

from trainatomy.libraries import import_library
from trainatomy.training.checkpointing import check_checkpointing
from trainatomy.training.evaluation import Evaluation, evaluation_of
from trainatomy.training.loops.trainer import ObservedTrainer, train_with
from trainatomy.training.model import cast_weights
from trainatomy.training.preference import alone, axolotl, llamafactory, swift
from trainatomy.training.preference.batches import Batch, paired
from trainatomy.training.trl import check_model, reference_of
from trainatomy.workload.preference import WITHOUT_REFERENCE, PreferenceSpec, has_reference_model

if TYPE_CHECKING:
    from trainatomy.training.batch import SyntheticDataset
    from trainatomy.training.run import Run


def engine_of(model: Any, accelerator: Any) -> nn.Module:
    """Return DeepSpeed's engine for a reference model: sharded with ZeRO-3, and whole otherwise.

    Source: TRL 0.24, models/utils.py (``prepare_deepspeed``).
    """
    deepspeed = import_library("deepspeed", "train.deepspeed")
    settings = deepcopy(accelerator.state.deepspeed_plugin.deepspeed_config)
    if settings["zero_optimization"]["stage"] != 3:
        settings["zero_optimization"]["stage"] = 0
    elif hidden_size := getattr(model.config, "hidden_size", None):
        settings |= {
            "zero_optimization.reduce_bucket_size": hidden_size * hidden_size,
            "zero_optimization.stage3_param_persistence_threshold": 10 * hidden_size,
            "zero_optimization.stage3_prefetch_bucket_size": 0.9 * hidden_size * hidden_size,
        }
    engine, *_ = deepspeed.initialize(model=model, config=settings)
    engine.eval()
    found: nn.Module = engine
    return found


_LOSSES: Mapping[str, Mapping[str, Callable[[PreferenceTrainer, nn.Module, Batch], Tensor]]] = {
    "llamafactory": {"pairs": llamafactory.pair_loss, "kto": llamafactory.kto_loss, "reward": llamafactory.reward_loss},
    "swift": {
        "pairs": swift.dpo_loss,
        "kto": swift.kto_loss,
        "orpo": alone.orpo_loss,
        "simpo": alone.cpo_loss,
        "cpo": alone.cpo_loss,
        "reward": swift.reward_loss,
    },
    "axolotl": {"pairs": axolotl.dpo_loss, "orpo": alone.orpo_loss, "simpo": alone.cpo_loss},
}
"""Functions of a trainer, a model and a batch, by the framework and the kind of samples."""


class PreferenceTrainer(Trainer):
    """A framework's trainer on preferences.

    Attributes:
        preference: Whose loss it computes.
        reference_model: A second model; None where there is none, or where the model without its adapters serves.
    """

    preference: PreferenceSpec
    reference_model: nn.Module | None

    def prepare(self, reference_model: nn.Module | None) -> None:
        """Set up what follows the Trainer's own constructor."""
        if self.preference.trainer != "swift":  # ms-swift leaves it to the Trainer, which counts the tokens of pairs
            self.model_accepts_loss_kwargs = False
        self.reference_model = reference_model
        if reference_model is not None and self.is_deepspeed_enabled:
            self.reference_model = engine_of(reference_model, self.accelerator)
        elif reference_model is not None:
            self.reference_model = self.accelerator.prepare_model(reference_model, evaluation_mode=True).eval()

    @property
    def compares(self) -> bool:
        """Whether the loss compares with a reference."""
        return self.preference.loss_type not in WITHOUT_REFERENCE

    @contextlib.contextmanager
    def reference(self, model: nn.Module) -> Iterator[nn.Module]:
        """Give the model to compare with, without gradients: the second one, or ``model`` without its adapters."""
        if self.reference_model is not None:
            with torch.no_grad():
                yield self.reference_model
            return
        adapted: Any = self.accelerator.unwrap_model(model)
        with torch.no_grad(), adapted.disable_adapter():
            yield model

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the loss of a batch."""
        kinds = _LOSSES[self.preference.trainer]
        return kinds.get(self.preference.loss_type, kinds["pairs"])(self, model, batch)

    def compute_loss(
        self, model: nn.Module, inputs: Batch, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        loss = self.loss(model, inputs)
        if num_items_in_batch is not None and self.model_accepts_loss_kwargs:
            loss = loss / self.args.gradient_accumulation_steps
        return loss

    def prediction_step(self, model: nn.Module, inputs: Batch, *arguments: Any, **keywords: Any) -> Any:
        inputs = self._prepare_inputs(inputs)
        with torch.no_grad():
            loss = self.loss(model, inputs)
        return loss.detach(), None, None


class ObservedPreferenceTrainer(ObservedTrainer, PreferenceTrainer):
    """A framework's trainer on preferences that notifies an observer of every phase of a step."""

    def __init__(
        self,
        run: Run,
        arguments: Any,
        dataset: SyntheticDataset,
        optimizer: torch.optim.Optimizer | None,
        evaluation: Evaluation | None,
        reference_model: nn.Module | None,
    ) -> None:
        self.preference = run.workload.preference
        super().__init__(run, arguments, dataset, optimizer, evaluation)
        self.prepare(reference_model)
        self._empties_cache = self.preference.trainer == "axolotl" and self.compares
        if self.reference_model is not None:
            run.observer.reference_loaded(self.reference_model)

    def training_step(self, model: nn.Module, inputs: Any, *arguments: Any, **keywords: Any) -> Tensor:
        loss = super().training_step(model, inputs, *arguments, **keywords)
        if self._empties_cache:  # AxolotlDPOTrainer.training_step
            torch.cuda.empty_cache()
        return loss


def train(run: Run) -> None:
    """Train the model of ``run``."""
    workload, model, spec = run.workload, run.model, run.workload.preference
    check_model(workload.loop, model, is_classifier=spec.is_of_classifier)
    check_checkpointing(model, workload.train)
    dataset = run.dataset(run.samples)
    evaluation = evaluation_of(workload, model, run.make_batch)
    for used in (dataset, *(() if evaluation is None else (evaluation.dataset,))):
        used.collate = paired(used.collate, workload)
    reference_model = reference_of(model) if has_reference_model(workload) else None
    cast_weights(model, workload, run.device, is_copied=True)
    if reference_model is not None and spec.trainer == "axolotl":  # which loads it as it does the model
        cast_weights(reference_model, workload, run.device, is_copied=True)
    if spec.loss_type == "reward" and not spec.is_of_classifier:
        model = llamafactory.WithValueHead(model)
    else:
        for kept in filter(None, (model, reference_model)):
            _without_dropout(kept)
    trained = replace(run, model=model)

    def make(arguments: Any, optimizer: torch.optim.Optimizer | None) -> ObservedPreferenceTrainer:
        arguments.remove_unused_columns = False  # as all these trainers have it: a reward model gets labels, too
        return ObservedPreferenceTrainer(trained, arguments, dataset, optimizer, evaluation, reference_model)

    train_with(trained, make)


def _without_dropout(model: nn.Module) -> None:
    """Switch dropout off, as TRL's ``disable_dropout_in_model`` does."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0
