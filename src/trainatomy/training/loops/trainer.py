"""``loop: trainer``: the Hugging Face Trainer itself, with an observer.

The class below adds calls to the observer and nothing else: it keeps no tensor, and every tensor lives as long as it
does under the plain Trainer.  The methods that it wraps hand their arguments on; their callers hold them anyway.
"""

from __future__ import annotations

import tempfile
from functools import cache
from typing import TYPE_CHECKING, Any

from trainatomy.training.arguments import training_arguments
from trainatomy.training.batch import build_dataset
from trainatomy.training.custom import create_custom
from trainatomy.training.gradients import check_checkpointing, watched_zero_grad
from trainatomy.training.optimizer import checked, choose_optimizer
from trainatomy.training.outputs import returning_loss
from trainatomy.workload.arguments import is_class_path

if TYPE_CHECKING:
    import torch
    from torch import nn

    from trainatomy.training.batch import MakeBatch, SyntheticDataset
    from trainatomy.training.observer import Observer
    from trainatomy.workload.schema import Workload


def train(
    workload: Workload,
    model: nn.Module,
    *,
    device: str,
    steps: int,
    observer: Observer,
    make_batch: MakeBatch | None = None,
) -> None:
    """Train ``model`` for ``steps`` optimizer steps with the Trainer: on the CPU, or on the first GPU that it finds.

    Raises what ``training_arguments``, ``build_dataset`` and ``choose_optimizer`` raise, and whatever the step raises.
    """
    check_checkpointing(model, workload.train)
    samples = workload.batch_size * workload.train.gradient_accumulation_steps * steps
    dataset = build_dataset(workload, model, samples, make_batch)
    with tempfile.TemporaryDirectory(prefix="trainatomy-") as folder:
        arguments = training_arguments(workload, steps=steps, output_dir=folder, use_cpu=device == "cpu")
        with watched_zero_grad(model, observer, set_to_none=workload.zero_grad_set_to_none):
            if _is_transformers_model(model):
                _run(workload, model, arguments, dataset, observer)
            else:
                arguments.remove_unused_columns = False  # a forward(**batch) names no column
                with returning_loss(model):
                    _run(workload, model, arguments, dataset, observer)


def _run(workload: Workload, model: nn.Module, arguments: Any, dataset: SyntheticDataset, observer: Observer) -> None:
    from transformers import PrinterCallback

    optimizer = create_custom(workload.train, model) if is_class_path(workload.train.optim) else None
    trainer = _observed_trainer()(workload, observer, model, arguments, dataset, optimizer)
    trainer.remove_callback(PrinterCallback)
    trainer.train()


def _is_transformers_model(model: nn.Module) -> bool:
    from transformers import PreTrainedModel

    from trainatomy.training.model import unwrap

    return isinstance(unwrap(model), PreTrainedModel)


@cache
def _observed_trainer() -> Any:
    """The Trainer with an observer; made on first use, because importing the Trainer takes a second."""
    import torch
    from transformers import Trainer, TrainerCallback

    class Steps(TrainerCallback):
        """Passes the Trainer's own events on."""

        def __init__(self, observer: Observer) -> None:
            self.observer = observer

        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.observer.step_begin(state.global_step)

        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.observer.optimizer_begin()

        def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.observer.optimizer_end()

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.observer.step_end(state.global_step - 1)

    class ObservedTrainer(Trainer):
        """A Trainer that tells an observer where it is."""

        def __init__(
            self,
            workload: Workload,
            observer: Observer,
            model: nn.Module,
            arguments: Any,
            dataset: SyntheticDataset,
            optimizer: torch.optim.Optimizer | None,
        ) -> None:
            self._workload = workload
            self._observer = observer
            self._micro_step = 0
            super().__init__(
                model=model,
                args=arguments,
                train_dataset=dataset,
                data_collator=dataset.collate,
                callbacks=[Steps(observer)],
                optimizers=(optimizer, None),
            )

        def _move_model_to_device(self, model: Any, device: torch.device) -> None:
            super()._move_model_to_device(model, device)
            self._observer.loaded(model)

        def create_optimizer(self, *arguments: Any, **keywords: Any) -> torch.optim.Optimizer:
            train = self._workload.train
            if self.optimizer is None:
                self.optimizer_cls_and_kwargs = choose_optimizer(train, self.args, self.model)
            optimizer = checked(train, lambda: super(ObservedTrainer, self).create_optimizer(*arguments, **keywords))
            self._observer.ready(self.model, optimizer)
            return optimizer

        def training_step(self, *arguments: Any, **keywords: Any) -> torch.Tensor:
            micro_step, of = self._micro_step, self.args.gradient_accumulation_steps
            self._micro_step = (micro_step + 1) % of
            if self._observer.leaves_out(micro_step, of):
                return torch.zeros((), device=self.args.device)
            self._observer.micro_step_begin(micro_step)
            loss = super().training_step(*arguments, **keywords)
            self._observer.micro_step_end(micro_step)
            return loss

        def compute_loss(self, *arguments: Any, **keywords: Any) -> Any:
            loss = super().compute_loss(*arguments, **keywords)
            self._observer.forward_end()
            return loss

    return ObservedTrainer
