"""Samples for TRL's trainers: data sets of random words and a tokenizer that knows them.

TRL prepares its samples itself (tokenisation, masks, truncation, packing), so they are given to it as text, with a
tokenizer of random words in which a word is a token.  The tokens of supervised fine-tuning are given as ids, which TRL
takes as they are and masks, truncates and packs as it does its own.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

from trainatomy.training.model import unwrap
from trainatomy.training.positions import lengths

if TYPE_CHECKING:
    from torch import nn

    from trainatomy.workload.schema import Workload

_WORDS = 4096
"""Different words at most; a vocabulary of a model's whole size takes a second to make."""
_SPECIAL = ("<pad>", "<eos>")


def vocabulary(model: nn.Module) -> list[str]:
    """Return the words of the samples: two special tokens, and others as far as the model's vocabulary goes."""
    config = unwrap(model).config.get_text_config()
    return [*_SPECIAL, *(f"w{number}" for number in range(len(_SPECIAL), min(int(config.vocab_size), _WORDS)))]


def make_tokenizer(model: nn.Module) -> Any:
    """Return a tokenizer for words that are separated by blanks; it pads on the left, as TRL asks for."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {word: number for number, word in enumerate(vocabulary(model))}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<eos>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", padding_side="left", truncation_side="left"
    )


def tokenised_samples(workload: Workload, model: nn.Module, size: int) -> Any:
    """Return ``size`` samples of token ids for ``SFTTrainer``, with a mask of what follows the prompt."""
    from datasets import Dataset

    length, prompt = sequence_length(workload, model), workload.data.prompt_length
    words, drawn = len(vocabulary(model)), random.Random(0)
    samples = {"input_ids": [drawn.choices(range(len(_SPECIAL), words), k=length) for _ in range(size)]}
    if prompt is not None:
        samples["completion_mask"] = [[0] * prompt + [1] * (length - prompt)] * size
    return Dataset.from_dict(samples)


def preference_pairs(workload: Workload, model: nn.Module, size: int) -> Any:
    """Return ``size`` prompts with a chosen and a rejected answer for ``DPOTrainer``, which ends them with a token."""
    from datasets import Dataset

    prompt = workload.data.prompt_length or 1
    answer = sequence_length(workload, model) - prompt
    words, drawn = vocabulary(model)[len(_SPECIAL) :], random.Random(0)

    def text(count: int) -> str:
        return " ".join(drawn.choices(words, k=count))

    answers = [[" " + text(answer - 1) if answer > 1 else "" for _ in range(size)] for _ in range(2)]
    return Dataset.from_dict(
        {"prompt": [text(prompt) for _ in range(size)], "chosen": answers[0], "rejected": answers[1]}
    )


def prompts(workload: Workload, model: nn.Module, size: int) -> Any:
    """Return ``size`` prompts for ``GRPOTrainer``."""
    from datasets import Dataset

    length = sequence_length(workload, model)
    words, drawn = vocabulary(model)[len(_SPECIAL) :], random.Random(0)
    return Dataset.from_dict({"prompt": [" ".join(drawn.choices(words, k=length)) for _ in range(size)]})


def sequence_length(workload: Workload, model: nn.Module) -> int:
    """Return the tokens of a sample, those of its prompt included."""
    return lengths(workload.data, unwrap(model)).sequence
