"""Helpers of the loops of TRL's trainers: a reference model, adapters, and TRL's side effects switched off.

Samples for TRL's trainers: data sets of random words and a tokenizer that knows them.

TRL prepares its samples itself (tokenisation, masks, truncation, packing), so they are given to it as text, with a
tokenizer of random words in which a word is a token.  The tokens of supervised fine-tuning and of reward models are
given as ids, which TRL takes as they are and masks, truncates and packs as it does its own.
"""

from __future__ import annotations

import copy
import os
import random
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from importlib import import_module
from itertools import cycle, islice
from typing import TYPE_CHECKING, Any
from unittest import mock

from trainatomy.errors import WorkloadError
from trainatomy.libraries import version_of
from trainatomy.training.labels import IGNORED
from trainatomy.training.lengths import LengthBatch, orders
from trainatomy.training.model import unwrap
from trainatomy.training.positions import lengths
from trainatomy.workload.batching import batching_of

if TYPE_CHECKING:
    from types import ModuleType

    from torch import nn

    from trainatomy.training.run import Run
    from trainatomy.workload.schema import Workload


def check_model(loop: str, model: nn.Module, *, is_classifier: bool | None = None) -> None:
    """Raise ``WorkloadError`` for a model that the trainer does not train.

    Args:
        loop: The loop.
        model: The model.
        is_classifier: Whether it has to be a classifier of sequences with one label, as for ``loop: reward``; the
            others need a causal language model.
    """
    inner: Any = unwrap(model)
    if loop == "reward" if is_classifier is None else is_classifier:
        _check_reward_model(loop, inner)
        return
    head = getattr(inner, "get_output_embeddings", lambda: None)()
    if head is None or getattr(inner.config, "is_encoder_decoder", False) or not hasattr(inner, "generation_config"):
        name = type(inner).__name__
        raise WorkloadError(f"loop: {loop} trains causal language models, and {name} is none", key="loop")


def _check_reward_model(loop: str, model: Any) -> None:
    name, labels = type(model).__name__, getattr(model.config, "num_labels", None)
    if "SequenceClassification" not in name:
        raise WorkloadError(
            f"loop: {loop} trains a classifier with one label, and {name} is none: set model.class: "
            "AutoModelForSequenceClassification and model.config: {num_labels: 1}",
            key="loop",
        )
    if labels != 1:
        raise WorkloadError(
            f"loop: {loop} trains a classifier with one label, and {name} has {labels}: set model.config: "
            "{num_labels: 1}",
            key="loop",
        )


def load_bitsandbytes() -> None:
    """Import bitsandbytes where it is installed beside peft, as any script that imports TRL does.

    The Trainer imports peft, and peft bitsandbytes (peft/helpers.py); a process that hid it at that time has it now.
    TRL's ``OffloadActivations.__enter__`` looks for it in ``sys.modules`` and empties the allocator's cache if it is
    there.
    """
    if version_of("peft") and version_of("bitsandbytes"):
        with suppress(Exception):  # peft reports what is wrong with it
            import_module("bitsandbytes")


def reference_of(model: nn.Module) -> nn.Module:
    """Return a copy of the model, which stands for the same checkpoint loaded once more."""
    reference = copy.deepcopy(model)
    for parameter in reference.parameters():
        parameter.requires_grad_(True)  # as `from_pretrained` leaves it; TRL runs it without gradients
    return reference


@contextmanager
def adapters_of_this_training(module: ModuleType) -> Iterator[None]:
    """Let a trainer treat an adapter that the model has as one that it made itself, by ``peft_config``.

    A trainer that gets a model with an adapter takes it for a trained one and keeps a copy of it as the reference.
    With ``peft_config`` the reference is the model without its adapter.  The trainer asks for the first of these before
    anything else about adapters.

    Args:
        module: The module of the trainer, for as long as it is constructed.
    """
    original, asked = module.is_peft_model, False

    def is_peft_model(model: nn.Module) -> bool:
        nonlocal asked
        first, asked = not asked, True
        return False if first else bool(original(model))

    with mock.patch.object(module, "is_peft_model", is_peft_model):
        yield


@contextmanager
def loaded_as(module: ModuleType, reference: nn.Module | None) -> Iterator[None]:
    """Let a trainer that loads its reference model from a checkpoint get ``reference`` instead.

    Args:
        module: The module of the trainer, for as long as it is constructed.
        reference: The model; None where the trainer loads none.
    """
    with mock.patch.object(module, "create_model_from_path", lambda *arguments, **keywords: reference):
        yield


@contextmanager
def quiet_trl() -> Iterator[None]:
    """Switch off TRL's telemetry and warnings, and the progress bars of datasets."""
    import datasets
    from trl.trainer.base_trainer import _BaseTrainer

    shown = datasets.is_progress_bar_enabled()
    datasets.disable_progress_bars()
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore", FutureWarning)
        stack.enter_context(mock.patch.dict(os.environ, {"HF_HUB_DISABLE_TELEMETRY": "1", "TQDM_DISABLE": "1"}))
        if hasattr(_BaseTrainer, "_send_telemetry"):
            stack.enter_context(mock.patch.object(_BaseTrainer, "_send_telemetry", lambda trainer: None))
        try:
            yield
        finally:
            if shown:
                datasets.enable_progress_bars()


_WORDS = 4096
"""Different words at most; a vocabulary of a model's whole size takes a second to make."""
_SPECIAL = ("<pad>", "<eos>")


def vocabulary(model: nn.Module) -> list[str]:
    """Return the words of the samples: two special tokens, and others as far as the model's vocabulary goes."""
    config = unwrap(model).config.get_text_config()
    return [*_SPECIAL, *(f"w{number}" for number in range(len(_SPECIAL), min(int(config.vocab_size), _WORDS)))]


def make_tokenizer(model: nn.Module, padding_side: str = "left", **keywords: Any) -> Any:
    """Return a tokenizer for words that are separated by blanks; it pads on the left, as TRL asks for.

    ``keywords`` are further ones of ``PreTrainedTokenizerFast``.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {word: number for number, word in enumerate(vocabulary(model))}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<eos>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        padding_side=padding_side,
        truncation_side="left",
        **keywords,
    )


MOST_TOKENS = 2**25
"""Tokens of all samples of a training with TRL, which takes them as lists of numbers, of 36 bytes each."""


def check_size(tokens: int) -> None:
    """Raise ``WorkloadError`` for samples that would fill the host's memory before a step runs."""
    if tokens > MOST_TOKENS:
        key = "train.per_device_train_batch_size"
        message = f"{tokens:,} tokens are more than are made for TRL's trainers ({MOST_TOKENS:,}): use fewer samples"
        raise WorkloadError(f"{key}: {message}", key=key)


def trained_lengths(run: Run) -> list[int]:
    """Return the tokens of each sample that a training is given, in order.

    Where samples differ in length, they are those of its batches, or else of the first order.
    """
    workload = run.workload
    if not workload.data.varies:
        length = sequence_length(workload, run.model)
        check_size(length * run.samples)
        return [length] * batching_of(workload).samples_of(run.samples, length)
    return [length for batch in trained_batches(run) for length in batch.lengths]


def trained_batches(run: Run) -> list[LengthBatch]:
    """Return the batches of a training: those that it is given, or else of the first order.

    They are repeated if there are fewer.
    """
    workload = run.workload
    given = getattr(run.make_batch, "batches", None) or [b for step in orders(workload, count=1)[0].steps for b in step]
    return list(islice(cycle(given), run.steps * workload.train.gradient_accumulation_steps))


def evaluated_lengths(workload: Workload, model: nn.Module) -> list[int]:
    """Return the tokens of each sample of an evaluation."""
    length = sequence_length(workload, model)
    check_size(length * workload.eval_samples)
    return [length] * workload.eval_samples


def dataset_of(columns: dict[str, Any]) -> Any:
    """Return a data set of columns, as TRL and sentence-transformers take it."""
    from datasets import Dataset

    return Dataset.from_dict(columns)


def tokenised_samples(workload: Workload, model: nn.Module, lengths: Sequence[int]) -> Any:
    """Return samples of token ids for ``SFTTrainer``, with a mask of what follows the prompt."""
    prompt = workload.data.prompt_length
    samples = {"input_ids": _token_ids(model, lengths)}
    if prompt is not None:
        samples["completion_mask"] = [[0] * prompt + [1] * (length - prompt) for length in lengths]
    return dataset_of(samples)


def packed_samples(workload: Workload, model: nn.Module, batches: Sequence[LengthBatch]) -> Any:
    """Return packs for ``SFTTrainer`` in the form in which it would pack samples itself.

    The rows of a batch are joined or have one document each, so it does not matter in which of them a document lies.
    """
    rows = [row for batch in batches for row in _rows(batch.lengths, workload.batch_size)]
    ids = _token_ids(model, [sum(row) for row in rows])
    prompt = batching_of(workload).prompt or 0
    is_scored = [[place >= prompt for length in row for place in range(length)] for row in rows]
    labels = [
        [word if kept else IGNORED for word, kept in zip(*each, strict=True)]
        for each in zip(ids, is_scored, strict=True)
    ]
    return dataset_of({"input_ids": ids, "labels": labels, "seq_lengths": rows})


def _rows(documents: Sequence[int], count: int) -> list[Sequence[int]]:
    """Return this many rows of these documents, one in each but the last."""
    return [*([length] for length in documents[: count - 1]), documents[count - 1 :]]


def tokenised_pairs(model: nn.Module, lengths: Sequence[int]) -> Any:
    """Return pairs of answers of equal length, with their prompts, as token ids for ``RewardTrainer``."""
    return dataset_of(dict.fromkeys(("chosen_ids", "rejected_ids"), _token_ids(model, lengths)))


def preference_pairs(workload: Workload, model: nn.Module, lengths: Sequence[int]) -> Any:
    """Return prompts with a chosen and a rejected answer of equal length for ``DPOTrainer``."""
    text = _Texts(workload, model, lengths)
    return dataset_of({"prompt": text.prompts(), "chosen": text.answers(), "rejected": text.answers()})


def labelled_answers(workload: Workload, model: nn.Module, lengths: Sequence[int], batch_size: int) -> Any:
    """Return prompts with an answer each for ``KTOTrainer``; every other one of a batch is labelled good."""
    text = _Texts(workload, model, lengths)
    labels = [place % batch_size % 2 == 0 for place in range(len(lengths))]
    return dataset_of({"prompt": text.prompts(), "completion": text.answers(), "label": labels})


class _Texts:
    """Random words: prompts of ``data.prompt_length``, and answers that fill the rest of each sample.

    TRL ends each answer with a token.
    """

    def __init__(self, workload: Workload, model: nn.Module, lengths: Sequence[int]) -> None:
        self.prompt = workload.data.prompt_length or 1
        self.lengths = lengths
        self.words = vocabulary(model)[len(_SPECIAL) :]
        self.drawn = random.Random(0)

    def prompts(self) -> list[str]:
        return [self._text(self.prompt) for _ in self.lengths]

    def answers(self) -> list[str]:
        counts = [length - self.prompt - 1 for length in self.lengths]
        return [" " + self._text(count) if count else "" for count in counts]

    def _text(self, count: int) -> str:
        return " ".join(self.drawn.choices(self.words, k=count))


def _token_ids(model: nn.Module, lengths: Sequence[int]) -> list[list[int]]:
    words, drawn = range(len(_SPECIAL), len(vocabulary(model))), random.Random(0)
    return [drawn.choices(words, k=length) for length in lengths]


def prompts(workload: Workload, model: nn.Module, size: int) -> Any:
    """Return ``size`` prompts for ``GRPOTrainer``."""
    length = sequence_length(workload, model)
    check_size(length * size)
    words, drawn = vocabulary(model)[len(_SPECIAL) :], random.Random(0)
    return dataset_of({"prompt": [" ".join(drawn.choices(words, k=length)) for _ in range(size)]})


def sequence_length(workload: Workload, model: nn.Module) -> int:
    """Return the tokens of a sample, those of its prompt included."""
    return lengths(workload, unwrap(model)).sequence
