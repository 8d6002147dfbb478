"""Random batches, each a function of its size that returns the same batch again."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

Batch = dict[str, Tensor]


def pictures_of(side: int, classes: int, dense: bool = False) -> Callable[[int], Batch]:
    """Return a data factory of images with a label each, or one for each pixel."""

    @cache
    def make(batch_size: int) -> Batch:
        places = (side, side) if dense else ()
        return {
            "pixel_values": torch.rand(batch_size, 3, side, side),
            "labels": torch.randint(0, classes, (batch_size, *places)),
        }

    return make


def clips_of(frames: int, side: int) -> Callable[[int], Batch]:
    """Return a data factory of video clips with a label each."""

    @cache
    def make(batch_size: int) -> Batch:
        return {
            "pixel_values": torch.rand(batch_size, 3, frames, side, side),
            "labels": torch.randint(0, 400, (batch_size,)),
        }

    return make


def texts_of(length: int, entries: int) -> Callable[[int], Batch]:
    """Return a data factory of texts with the next token of each token, out of ``entries``."""

    @cache
    def make(batch_size: int) -> Batch:
        return {name: torch.randint(0, entries, (batch_size, length)) for name in ("tokens", "labels")}

    return make


def clicks_of(categories: int, entries: int, bag: int) -> Callable[[int], Batch]:
    """Return a data factory of a recommender's rows: numbers, and ``bag`` entries of each category."""

    @cache
    def make(batch_size: int) -> Batch:
        return {
            "numbers": torch.rand(batch_size, 13),
            "categories": torch.randint(0, entries, (batch_size, categories, bag)),
            "labels": torch.rand(batch_size),
        }

    return make
