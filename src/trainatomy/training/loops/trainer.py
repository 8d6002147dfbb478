"""``loop: trainer``: the Hugging Face Trainer itself, with an observer."""

from __future__ import annotations

import json
import tempfile
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainatomy.errors import WorkloadError
from trainatomy.training.arguments import training_arguments
from trainatomy.training.batch import POOL_SAMPLES, build_dataset
from trainatomy.training.checkpointing import check_checkpointing
from trainatomy.training.evaluation import Evaluation, evaluation_of
from trainatomy.training.factory import returning_loss
from trainatomy.training.loops.generation import special_tokens
from trainatomy.training.model import unwrap
from trainatomy.training.optimizer import create_single
from trainatomy.workload.arguments import is_own
from trainatomy.workload.fsdp import PREPARED_BY

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn

    from trainatomy.training.batch import BatchesOfLengths, MakeBatch, SyntheticDataset
    from trainatomy.training.observer import Observer
    from trainatomy.workload.schema import Workload


def train(
    workload: Workload,
    model: nn.Module,
    *,
    device: str,
    steps: int,
    observer: Observer,
    make_batch: MakeBatch | BatchesOfLengths | None = None,
) -> None:
    """Train ``model`` for ``steps`` optimizer steps with the Trainer: on the CPU, or on the first GPU that it finds.

    Arguments and exceptions are those of ``trainatomy.training.run.run``.
    """
    check_checkpointing(model, workload.train)
    if workload.parallel.tp_size > 1:
        from trainatomy.training.parallel.tensor import shard_as_transformers

        shard_as_transformers(model, workload.parallel.tp_size)
    ranks = workload.parallel.data_parallel_size
    samples = workload.batch_size * workload.train.gradient_accumulation_steps * steps * ranks
    dataset = build_dataset(workload, model, samples, make_batch)
    with tempfile.TemporaryDirectory(prefix="trainatomy-") as folder:
        arguments = training_arguments(workload, steps=steps, output_dir=folder, use_cpu=device == "cpu")
        with watched_zero_grad(model, observer, set_to_none=workload.zero_grad_set_to_none):
            evaluation = evaluation_of(workload, model, make_batch)
            if workload.batch_size > POOL_SAMPLES:
                arguments.remove_unused_columns = False  # there are none, and to look at each sample takes seconds
            if _is_transformers_model(model):
                _run(workload, model, arguments, dataset, observer, evaluation)
            else:
                arguments.remove_unused_columns = False  # forward(**batch) does not name the columns
                with returning_loss(model):
                    _run(workload, model, arguments, dataset, observer, evaluation)


def _run(
    workload: Workload,
    model: nn.Module,
    arguments: Any,
    dataset: SyntheticDataset,
    observer: Observer,
    evaluation: Evaluation | None,
) -> None:
    from transformers import PrinterCallback

    from trainatomy.training.loops.observed_trainer import GeneratingTrainer, ObservedTrainer

    kind = ObservedTrainer
    if workload.train.predict_with_generate and evaluation is not None:
        kind = GeneratingTrainer
        _begin_decoder(model)
    made_before = is_own(workload.train.optim) and not workload.train.fsdp  # with FSDP, the Trainer takes a class
    optimizer = create_single(workload, model) if made_before else None
    trainer = kind(workload, observer, model, arguments, dataset, optimizer, evaluation)
    trainer.remove_callback(PrinterCallback)
    with without_progress_bars(), _preparation(workload):
        trainer.train(resume_from_checkpoint=continue_training(workload, arguments))


def _preparation(workload: Workload) -> AbstractContextManager[None]:
    """Return the context in which a model is prepared for FSDP2: by accelerate, or as a framework does."""
    if (workload.train.fsdp_config or {}).get(PREPARED_BY) is None:
        return nullcontext()
    from trainatomy.training.parallel.axolotl import prepared_by_axolotl

    return prepared_by_axolotl()


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
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _is_transformers_model(model: nn.Module) -> bool:
    from transformers import PreTrainedModel

    return isinstance(unwrap(model), PreTrainedModel)


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
