"""Batches of trainings on preferences, made of those of single answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from trainatomy.training.labels import IGNORED
from trainatomy.workload.preference import WITHOUT_REFERENCE

if TYPE_CHECKING:
    from trainatomy.workload.schema import Workload

Batch = dict[str, Any]
IS_GOOD = "kto_tags"
"""Name of the labels of answers that are good or bad: ``[B]`` bool, with ms-swift a list."""
ANSWER = "completion_"
"""Beginning of the names of tensors with the answers themselves in ms-swift, whose Trainer finds no ``labels``."""
OTHER_ANSWER = "kl_"
"""Beginning of the names of tensors with another answer to each prompt, for the divergence from the reference."""

CHOSEN, REJECTED = "chosen_", "rejected_"
"""Beginnings of the names of tensors with one answer of each pair, where the trainer joins them itself (TRL's ORPO)."""

IMAGES = ("pixel_values", "image_sizes", "image_grid_thw", "aspect_ratio_ids", "aspect_ratio_mask")
"""Names of the tensors of images, which belong to the prompt."""


def paired(collate: Callable[[Sequence[Any]], Batch], workload: Workload) -> Callable[[Sequence[Any]], Batch]:
    """Return a function that makes the batch of a loss of preferences from that of single answers.

    Pairs are two rows of the same length: first all chosen answers, then all rejected ones.  Single answers are good
    and bad by turns, and come with another answer to the same prompt.
    """

    def pairs(samples: Sequence[Any]) -> Batch:
        batch = answers(samples)
        spec, prompt = workload.preference, workload.data.prompt_length or 1
        if spec.trainer == "axolotl" and spec.loss_type in WITHOUT_REFERENCE:
            prompts = {f"prompt_{name}": batch[name][:, :prompt].clone() for name in ("input_ids", "attention_mask")}
            both = {f"{of}{name}": value.clone() for of in (CHOSEN, REJECTED) for name, value in batch.items()}
            return prompts | both
        if spec.trainer == "axolotl":
            batch["completion_mask"] = (batch.pop("labels") != IGNORED).long()
        return {name: torch.cat((value, value)) for name, value in batch.items()}

    def labelled(samples: Sequence[Any]) -> Batch:
        batch = answers(samples)
        others = {f"{OTHER_ANSWER}{name}": value.clone() for name, value in batch.items() if name not in IMAGES}
        good = torch.arange(len(batch["input_ids"])) % 2 == 0
        if workload.preference.trainer == "swift":
            return {**{f"{ANSWER}{name}": value for name, value in batch.items()}, **others, IS_GOOD: good.tolist()}
        return {**batch, **others, IS_GOOD: good}

    def answers(samples: Sequence[Any]) -> Batch:
        batch = collate(samples)
        batch.setdefault("attention_mask", torch.ones_like(batch["input_ids"]))
        if workload.preference.is_of_classifier:
            del batch["labels"]
        elif prompt := workload.data.prompt_length:
            batch["labels"] = batch["labels"].clone()
            batch["labels"][:, :prompt] = IGNORED
        return batch

    return labelled if workload.preference.loss_type == "kto" else pairs
