"""Samples of a step: what its DataLoaders fetched, else what the shapes of the model's inputs agree on.

The first dimension of the first tensor is often none: boxes, nodes, tokens of a packed row.  Where neither a loader nor
the shapes say how many samples there are, nobody knows, and batches are counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch.utils._pytree import tree_leaves
from torch.utils.data._utils import fetch

from trainatomy.training.signals import wrapped

_IMAGE_DIMENSIONS = 4
"""Dimensions from which on a tensor holds images, videos or volumes, one for each sample."""


class SampleCounter:
    """Counts the samples of each step of a loop.

    What loaders fetch counts for the model that is called with gradients next; what is fetched before an evaluation
    does not count.
    """

    def __init__(self) -> None:
        self._fetched = self._taken = 0
        self._first = 0
        self._backwards = self._accumulated = 0
        self._at_step: list[int] = []
        self._seen = False
        self._of_batch: int | None = None
        self._tokens: int | None = None

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Count what DataLoaders fetch in this process during the block."""
        kinds: Any = (fetch._MapDatasetFetcher, fetch._IterableDatasetFetcher)
        with wrapped(kinds[0], "fetch", self._around_fetch), wrapped(kinds[1], "fetch", self._around_fetch):
            yield

    def _around_fetch(self, original: Any, fetcher: Any, index: Any) -> Any:
        batch = original(fetcher, index)
        count = len(index) if isinstance(index, list | tuple) else 0
        self._fetched += count
        self._first = self._first or count
        return batch

    def step_begin(self) -> None:
        """Note that a step begins."""
        self._at_step.append(self._taken)
        self._backwards = self._accumulated = 0

    def backward_ended(self) -> None:
        """Note that a backward pass has added to the gradients."""
        self._backwards += 1
        self._accumulated = max(self._accumulated, self._backwards)

    def gradients_used(self) -> None:
        """Note that an optimizer took its step with the gradients, or that they were zeroed."""
        self._backwards = 0

    def micro_batches(self) -> int:
        """Return how many batches the gradients of the step that ends are of.

        Several backward passes of one step are of as many batches only if their gradients are accumulated: those of
        SAM's first pass are zeroed, those of a GAN's networks go to an optimizer each.  Several losses of one batch
        are told by what a loader fetched.
        """
        most, samples, batch = max(1, self._accumulated), self._taken - self._at_step[-1], self._of_batch
        if not samples or batch is None or batch > samples or samples // self._first >= most:
            return most
        return min(most, samples // batch)

    def trains(self, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> None:
        """Note a call of a model with gradients, and the shapes of its first one."""
        self._taken += self._fetched
        self._fetched = 0
        if not self._seen:
            self._seen = True
            self._of_batch, self._tokens = batch_size(arguments, keywords)

    def evaluated(self) -> None:
        """Note a call of a model that evaluates."""
        self._fetched = 0

    def in_step(self, micro_steps: int) -> int | None:
        """Return the samples of a step of this many micro-batches; None: nobody knows."""
        steps = [later - earlier for earlier, later in pairwise([*self._at_step, self._taken])]
        if steps and (fetched := Counter(reversed(steps)).most_common(1)[0][0]):
            # A loader may be some batches ahead, which only the first step shows, and the first of each short epoch.
            return self._mean_of_short_epochs(steps, fetched) if len(steps) > 1 else self._first * micro_steps
        return None if self._of_batch is None else self._of_batch * micro_steps

    def _mean_of_short_epochs(self, steps: Sequence[int], fetched: int) -> int:
        """Return the samples of a step, less than were ``fetched`` if steps used what others had fetched ahead.

        A step for which nothing is fetched ends an epoch: the steps so far have used all that was fetched for them.
        """
        if 0 not in steps:
            return fetched
        used = min(total / count for count, total in enumerate(accumulate(steps), 1))
        return min(fetched, max(1, int(used // self._first)) * self._first)

    def tokens_of_sample(self, micro_steps: int) -> int | None:
        """Return the tokens of a sample; None where it is no text, or nobody knows how many samples there are."""
        samples = self.in_step(micro_steps)
        if self._tokens is None or not samples:
            return None
        return round(self._tokens * micro_steps / samples)


def batch_size(arguments: Sequence[Any], keywords: Mapping[str, Any]) -> tuple[int | None, int | None]:
    """Return the samples and the tokens of a model's inputs, None where their shapes do not tell.

    Images tell before anything else, then a list with one entry for each sample, then the dimension on which most other
    tensors agree: the first, or the second of sequences that come first.
    """
    text = keywords.get("input_ids")
    tensors = [one for one in tensors_in((*arguments, *keywords.values())) if one.dim()]
    first = text if isinstance(text, torch.Tensor) else next(iter(tensors), None)
    has_tokens = first is not None and first.dim() == 2 and not first.is_floating_point()
    tokens = first.numel() if first is not None and has_tokens else None
    if isinstance(text, torch.Tensor) and text.dim():
        return text.shape[0], tokens
    images = [one for one in tensors if one.dim() >= _IMAGE_DIMENSIONS and one.is_floating_point() and one.shape[0] > 1]
    if (listed := _listed(arguments)) and not images:
        return listed, None
    return (_agreed(images, 0) if images else _agreed_in_any(tensors)), tokens


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in nested containers, also in mappings that are no dictionaries."""
    for leaf in tree_leaves(value):
        if isinstance(leaf, torch.Tensor):
            yield leaf
        elif isinstance(leaf, Mapping):
            yield from tensors_in(list(leaf.values()))


def _listed(arguments: Sequence[Any]) -> int | None:
    """Return the length of a list with one image or one mapping for each sample, as detectors take."""
    for one in arguments:
        if isinstance(one, list | tuple) and one and all(isinstance(entry, Mapping) for entry in one):
            return len(one)
        if isinstance(one, list) and one and all(isinstance(entry, torch.Tensor) and entry.dim() == 3 for entry in one):
            return len(one)
    return None


def _agreed_in_any(tensors: Sequence[torch.Tensor]) -> int | None:
    """Return the size of the first or the second dimension on which most tensors agree."""
    matrices = [one for one in tensors if one.dim() > 1]
    matrices = [one for one in matrices if one.shape[0] > 1] or matrices  # others are the same for all samples
    if not matrices:
        return _agreed(tensors, 0)
    if len({one.shape[0] for one in matrices}) > 1 and any(one.dim() > 2 for one in matrices):
        seconds = {one.shape[1] for one in matrices}
        if len(seconds) == 1:  # sequences whose length comes first
            return seconds.pop()
    return _agreed(matrices, 0)


def _agreed(tensors: Sequence[torch.Tensor], dimension: int) -> int | None:
    """Return the size of a dimension in more than half of the tensors."""
    sizes = Counter(one.shape[dimension] for one in tensors)
    size, count = sizes.most_common(1)[0] if sizes else (0, 0)
    return size if 2 * count > len(tensors) else None
