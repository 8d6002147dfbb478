"""``loop: trainer``: the Hugging Face Trainer itself, with an observer; and what the loops of its subclasses share.

Importing this module imports the Trainer, which takes a second.

The class only adds calls to the observer: it keeps no tensor, so every tensor lives as long as under the plain Trainer.
The methods that it overrides pass their arguments on, and their callers hold those anyway.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
from transformers import PreTrainedModel, PrinterCallback, Seq2SeqTrainer, Trainer, TrainerCallback
from transformers.utils import logging

from trainatomy.errors import WorkloadError
from trainatomy.training.batch import POOL_SAMPLES, SyntheticDataset
from trainatomy.training.checkpointing import check_checkpointing, checkpoint_every
from trainatomy.training.evaluation import Evaluation, evaluation_of
from trainatomy.training.factory import returning_loss
from trainatomy.training.loops.generation import full_length, special_tokens
from trainatomy.training.model import unwrap
from trainatomy.training.optimizer import checked, choose_optimizer, create_single, sharded_optimizer
from trainatomy.training.parallel.axolotl import prepared_by_axolotl
from trainatomy.training.parallel.deepspeed import EngineSteps
from trainatomy.training.parallel.tensor import shard_as_transformers
from trainatomy.workload.arguments import is_class_path, is_own
from trainatomy.workload.fsdp import PREPARED_BY

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import nn

    from trainatomy.results.tasks import RestoringPurpose
    from trainatomy.training.observer import Observer
    from trainatomy.training.run import Run
    from trainatomy.workload.schema import Workload


def train(run: Run) -> None:
    """Train the model of ``run`` with the Trainer: on the CPU, or on the first GPU that it finds."""
    workload, model = run.workload, run.model
    check_checkpointing(model, workload.train)
    if workload.parallel.tp_size > 1:
        shard_as_transformers(model, workload.parallel.tp_size)
    dataset = run.dataset(run.samples)
    is_plain = not isinstance(unwrap(model), PreTrainedModel)

    def make(arguments: Any, optimizer: torch.optim.Optimizer | None) -> Trainer:
        evaluation = evaluation_of(workload, model, run.make_batch)
        # forward(**batch) of a plain model does not name the columns; to look at each of many samples takes seconds
        if is_plain or workload.batch_size > POOL_SAMPLES:
            arguments.remove_unused_columns = False
        kind = ObservedTrainer
        if workload.train.predict_with_generate and evaluation is not None:
            kind = GeneratingTrainer
            _begin_decoder(model)
        return kind(run, arguments, dataset, optimizer, evaluation)

    with returning_loss(model) if is_plain else nullcontext(), _preparation(workload):
        train_with(run, make)


def train_with(run: Run, make: Callable[[Any, torch.optim.Optimizer | None], Trainer]) -> None:
    """Run the steps of ``run`` with a Trainer.

    Args:
        run: The training.
        make: Returns the Trainer for its arguments and an optimizer that was made before; None where it makes its own.
    """
    workload = run.workload
    made_before = is_own(workload.train.optim) and not workload.train.fsdp  # with FSDP, the Trainer takes a class
    optimizer = create_single(workload, run.model) if made_before else None
    with tempfile.TemporaryDirectory(prefix="trainatomy-") as folder:
        arguments = run.arguments(folder)
        with watched_zero_grad(run.model, run.observer, set_to_none=workload.zero_grad_set_to_none):
            trainer = make(arguments, optimizer)
            trainer.remove_callback(PrinterCallback)
            with without_progress_bars():
                trainer.train(resume_from_checkpoint=continue_training(workload, trainer.args))


def _preparation(workload: Workload) -> AbstractContextManager[None]:
    """Return the context in which a model is prepared for FSDP2: by accelerate, or as a framework does."""
    return nullcontext() if (workload.train.fsdp_config or {}).get(PREPARED_BY) is None else prepared_by_axolotl()


def continue_training(workload: Workload, arguments: Any) -> str | None:
    """Let a Trainer go on for as many steps as it would train from the start; return the checkpoint to begin with.

    Raises:
        WorkloadError: There is no checkpoint.
    """
    if workload.loads_best_model:
        arguments.load_best_model_at_end = True
    if not workload.resumes:
        return None
    given = workload.train.resume_from_checkpoint
    state = Path(str(given)) / "trainer_state.json"
    if given is True or not state.is_file():
        found = "true" if given is True else f"{given}, which has no trainer_state.json"
        raise WorkloadError(
            f"train.resume_from_checkpoint: a measurement needs the folder of a checkpoint, found {found}",
            key="train.resume_from_checkpoint",
        )
    arguments.max_steps += json.loads(state.read_text(encoding="utf-8"))["global_step"]
    arguments.ignore_data_skip = True
    return str(given)


def _begin_decoder(model: nn.Module) -> None:
    """Give a decoder that has none a first token, which is that of the padding in T5's checkpoints."""
    settings: Any = getattr(unwrap(model), "generation_config", None)
    if not hasattr(unwrap(model), "generate"):
        name, key = type(unwrap(model)).__name__, "train.predict_with_generate"
        raise WorkloadError(f"{key}: {name} cannot generate: it has no generate()", key=key)
    if settings is not None and settings.decoder_start_token_id is None:
        settings.decoder_start_token_id = special_tokens(model)["decoder_start_token_id"]


@contextmanager
def without_progress_bars() -> Iterator[None]:
    """Hide the progress bar that transformers shows while it writes weights."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


@contextmanager
def watched_zero_grad(model: nn.Module, observer: Observer, *, set_to_none: bool) -> Iterator[None]:
    """Notify ``observer`` when ``model.zero_grad()`` runs, and choose how it clears gradients.

    The Trainer calls it without an argument, which means ``set_to_none=True`` since PyTorch 2.0.
    """
    original = model.zero_grad

    def zero_grad(*arguments: bool, **keywords: bool) -> None:
        observer.zero_grad_begin()
        original(set_to_none=set_to_none)
        observer.zero_grad_end()

    model.zero_grad = zero_grad  # type: ignore[method-assign]
    try:
        yield
    finally:
        del model.zero_grad  # uncovers the method of the class


class Steps(TrainerCallback):
    """Callback that forwards the Trainer's events to an observer."""

    def __init__(self, observer: Observer, workload: Workload) -> None:
        self.observer = observer
        self.workload = workload
        self._done = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self._done = state.global_step  # of the training that this one continues
        if args.fsdp:  # the Trainer leaves the model where it is, and accelerate moves the shards
            self.observer.loaded(model)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.observer.step_begin(state.global_step - self._done)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not args.deepspeed:  # its engine has taken the step already
            self.observer.optimizer_begin()

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not args.deepspeed:
            self.observer.optimizer_end()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        step = state.global_step - 1 - self._done
        self.observer.step_end(step)
        if self.observer.evaluates_after(step):
            control.should_evaluate = control.should_evaluate or self.workload.evaluates_after_steps
            control.should_save = control.should_save or self.workload.saves


class EngineBegins(TrainerCallback):
    """Callback that follows DeepSpeed's engine once the Trainer has made it."""

    def __init__(self, trainer: ObservedTrainer) -> None:
        self._trainer = ref(trainer)

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Note the model that the engine placed on the GPU, and its optimizer."""
        trainer = self._trainer()
        assert trainer is not None
        trainer.follow_engine()


class CheckpointEvery(TrainerCallback):
    """Callback that lets only every n-th layer recompute its activations; the other layers keep them.

    For trainings with ``gradient_checkpointing=True``.  The Trainer switches all layers on before it calls
    ``on_train_begin``.
    """

    def __init__(self, n: int) -> None:
        """Choose the layers 0, ``n``, 2 ``n``, …; see ``trainatomy.integrations.checkpoint_every``."""
        self.n = n

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Switch the other layers off."""
        checkpoint_every(model, self.n)


class ObservedTrainer(Trainer):
    """Trainer that notifies an observer of every phase of a step."""

    def __init__(
        self,
        run: Run,
        arguments: Any,
        dataset: SyntheticDataset,
        optimizer: torch.optim.Optimizer | None,
        evaluation: Evaluation | None = None,
    ) -> None:
        super().__init__(
            model=run.model,
            args=arguments,
            train_dataset=dataset,
            data_collator=dataset.collate,
            callbacks=self.observe(run),
            optimizers=(optimizer, None),
            **({} if evaluation is None else evaluation.keywords()),
        )
        self.follow()

    def observe(self, run: Run) -> list[TrainerCallback]:
        """Notify the observer of ``run`` from now on, as soon as the Trainer has the callbacks that are returned."""
        self._workload = run.workload
        self._observer = run.observer
        self._micro_step = 0
        self._is_evaluating = False
        self._engine: EngineSteps | None = None
        every = run.workload.train.gradient_checkpointing_every
        return [Steps(run.observer, run.workload), *([] if every == 1 else [CheckpointEvery(every)])]

    def follow(self) -> None:
        """Notify the observer of what the constructor did, and of what DeepSpeed's engine will do."""
        model: Any = self.model
        if self._is_loaded_by_bitsandbytes(model):
            self._observer.loaded(model)
        elif getattr(self, "is_distributed_loading_by_transformers", False):
            self._move_model_to_device(model, self.args.device)  # from_pretrained has placed each rank's shards there
        if self.args.deepspeed:
            self.add_callback(EngineBegins(self))

    def follow_engine(self) -> None:
        """Notify the observer of the steps of DeepSpeed's engine from now on."""
        engine = self.accelerator.deepspeed_engine_wrapped.engine
        self._observer.loaded(self.model)
        self._observer.ready(self.model, engine.optimizer)
        self._engine = EngineSteps(engine, self._observer)

    @staticmethod
    def _is_loaded_by_bitsandbytes(model: Any) -> bool:
        """Return whether the Trainer leaves the model where it is, as ``Trainer.__init__`` decides."""
        return str(getattr(model, "quantization_method", "")).endswith(("bitsandbytes", "BITS_AND_BYTES"))

    def _move_model_to_device(self, model: Any, device: torch.device) -> None:
        super()._move_model_to_device(model, device)
        self._observer.loaded(model)

    def create_optimizer(self, *arguments: Any, **keywords: Any) -> torch.optim.Optimizer:
        train = self._workload.train
        if self.args.deepspeed and self.optimizer is not None:  # its own, or one that was made before
            return self.optimizer
        if self.optimizer is None:
            choose = sharded_optimizer if is_class_path(train.optim) else choose_optimizer
            self.optimizer_cls_and_kwargs = choose(train, self.args, self.model)
        optimizer = checked(train, lambda: super(ObservedTrainer, self).create_optimizer(*arguments, **keywords))
        if not self.args.deepspeed:
            self._observer.ready(self.model, optimizer)
        return optimizer

    def training_step(self, model: nn.Module, inputs: Any, *arguments: Any, **keywords: Any) -> torch.Tensor:
        micro_step, of = self._micro_step, self.args.gradient_accumulation_steps
        self._micro_step = (micro_step + 1) % of
        if micro_step == 0 and not all(module.training for module in model.modules()):
            model.train()  # as the Trainer does next: then what loading left in another mode is no micro-batch's change
        if self._observer.leaves_out(micro_step, of):
            return torch.zeros((), device=self.args.device)
        repeated = self._observer.repeat(micro_step, inputs)
        if repeated is not None:
            return repeated
        self._observer.micro_step_begin(micro_step)
        loss = super().training_step(model, inputs, *arguments, **keywords)
        if self._engine is not None and self._engine.took_step():
            return loss
        self._observer.loss_kept(loss)
        self._observer.micro_step_end(micro_step)
        return loss

    def compute_loss(self, *arguments: Any, **keywords: Any) -> Any:
        loss = super().compute_loss(*arguments, **keywords)
        if not self._is_evaluating:
            self._observer.forward_end()
        return loss

    def _save_checkpoint(self, *arguments: Any, **keywords: Any) -> None:
        self._observer.saving_begin()
        super()._save_checkpoint(*arguments, **keywords)
        folder = Path(self.args.output_dir) / f"checkpoint-{self.state.global_step}"
        files = {
            str(file.relative_to(folder)): file.stat().st_size for file in sorted(folder.rglob("*")) if file.is_file()
        }
        self._observer.saving_end(files, folder)
        if self._workload.loads_best_model:  # one is saved, which is the best one
            self.state.best_model_checkpoint = str(folder)

    def _load_from_checkpoint(self, *arguments: Any, **keywords: Any) -> None:
        with self._restoring("resume"):
            super()._load_from_checkpoint(*arguments, **keywords)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        with contextlib.nullcontext() if checkpoint is None else self._restoring("resume"):
            super()._load_optimizer_and_scheduler(checkpoint)

    def _load_best_model(self) -> None:
        with self._restoring("best"):
            super()._load_best_model()

    @contextlib.contextmanager
    def _restoring(self, purpose: RestoringPurpose) -> Iterator[None]:
        """Tell the observer that a checkpoint is loaded in the block."""
        self._observer.restoring_begin(purpose)
        yield
        self._observer.restoring_end()

    def evaluate(self, *arguments: Any, **keywords: Any) -> dict[str, float]:
        self._is_evaluating = True
        self._observer.evaluation_begin(
            -(-len(self.eval_dataset) // (self.args.eval_batch_size * self.args.world_size))
        )
        metrics = super().evaluate(*arguments, **keywords)
        self._is_evaluating = False
        self._observer.evaluation_end()
        return metrics

    def prediction_step(self, model: nn.Module, inputs: Any, *arguments: Any, **keywords: Any) -> Any:
        repeated = self._observer.repeat_evaluation(inputs)
        if repeated is not None:
            return repeated
        self._observer.evaluation_forward_begin()
        outputs = super().prediction_step(model, inputs, *arguments, **keywords)
        self._observer.evaluation_forward_end(outputs)
        return outputs


DEFAULT_LENGTH = 20
"""Tokens of a sequence that ``generate()`` makes unless something says otherwise (``GenerationConfig.max_length``)."""


class GeneratingTrainer(ObservedTrainer, Seq2SeqTrainer):
    """Trainer that evaluates with ``generate()``; every sequence gets all its tokens, as in ``mode: generation``."""

    def prediction_step(self, model: nn.Module, inputs: Any, *arguments: Any, **keywords: Any) -> Any:
        length = self.args.generation_max_length or DEFAULT_LENGTH
        decodes = bool(getattr(unwrap(model).config, "is_encoder_decoder", False))
        prompt = 1 if decodes else int(inputs["input_ids"].shape[1])
        with full_length(model, length - prompt):
            return super().prediction_step(model, inputs, *arguments, **keywords)
