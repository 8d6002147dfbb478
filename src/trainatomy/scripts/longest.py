"""The longest sample of a data set whose samples differ in length: the loop trains on it once, after its steps.

Each batch is padded to its longest sample, so that a few batches say little about the largest one of an epoch.  Where
the batches of the steps differ, the lengths of all samples are read, and the batch that is fetched next gets the
longest one in the place of its first: an epoch has such a batch.

Samples of a step: what its DataLoaders fetched, else what the shapes of the model's inputs agree on.

The first dimension of the first tensor is often none: boxes, nodes, tokens of a packed row.  Where neither a loader nor
the shapes say how many samples there are, nobody knows, and batches are counted.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, is_dataclass
from itertools import accumulate, pairwise
from math import prod
from typing import Any

import torch
from torch.utils._pytree import tree_leaves
from torch.utils.data._utils import fetch

from trainatomy.results.script import BatchLengths
from trainatomy.simulator.isolation import keep_random_numbers
from trainatomy.training.observer import wrapped

_IMAGE_DIMENSIONS = 4
"""Dimensions from which on a tensor holds images, videos or volumes, one for each sample."""
_DEEPEST = 3
"""Objects within objects that are looked into: they may hold one another."""


@contextmanager
def fetches_followed(around: Callable[..., Any]) -> Iterator[None]:
    """Call ``around`` in place of what DataLoaders fetch batches with in this process, which it is given first."""
    kinds: Any = (fetch._MapDatasetFetcher, fetch._IterableDatasetFetcher)
    with wrapped(kinds[0], "fetch", around), wrapped(kinds[1], "fetch", around):
        yield


class SampleCounter:
    """Counts the samples of each step of a loop.

    What loaders fetch counts for the model that is called with gradients next; what is fetched before an evaluation
    does not count.

    Args:
        on_fetch: Called when a loader fetches a batch.
    """

    def __init__(self, on_fetch: Callable[[], None] = lambda: None) -> None:
        self._on_fetch = on_fetch
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
        with fetches_followed(self._around_fetch):
            yield

    def _around_fetch(self, original: Any, fetcher: Any, index: Any) -> Any:
        self._on_fetch()
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
    tensors = [one for one in batch_tensors((*arguments, *keywords.values())) if one.dim()]
    first = text if isinstance(text, torch.Tensor) else next(iter(tensors), None)
    has_tokens = first is not None and first.dim() == 2 and not first.is_floating_point()
    tokens = first.numel() if first is not None and has_tokens else None
    if isinstance(text, torch.Tensor) and text.dim():
        return text.shape[0], tokens
    images = [one for one in tensors if one.dim() >= _IMAGE_DIMENSIONS and one.is_floating_point() and one.shape[0] > 1]
    if (listed := _listed(arguments)) and not images:
        return listed, None
    return (_agreed(images, 0) if images else _agreed_in_any(tensors)), tokens


def batch_tensors(value: Any, depth: int = _DEEPEST) -> Iterator[torch.Tensor]:
    """Yield the tensors in nested containers: mappings that are no dictionaries, and objects that a loop can move."""
    for leaf in tree_leaves(value):
        if isinstance(leaf, torch.Tensor):
            yield leaf
        elif isinstance(leaf, Mapping):
            yield from batch_tensors(list(leaf.values()), depth)
        elif depth and _is_batch(leaf):
            yield from batch_tensors(list(vars(leaf).values()), depth - 1)


def _is_batch(value: Any) -> bool:
    """Return whether an object holds a batch's tensors: a graph, boxes, a dataclass."""
    if isinstance(value, torch.nn.Module | type) or not hasattr(value, "__dict__"):
        return False
    return is_dataclass(value) or callable(getattr(value, "to", None))


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


_MOST_STEPS = 4
"""Further steps in which a batch that was fetched must be trained on."""
_SECONDS = 5.0
"""Time for reading lengths."""
_ROWS = 1000
"""Rows of a table whose lengths are read at once."""
_STRIDE = 7919
"""A prime: every so many samples are read, so that a part of them shows the whole of an ordered data set."""

Shape = tuple[int, ...]


@dataclass(slots=True)
class _Loaded:
    """What loaders of a data set fetched: the shapes of batches by their numbers of samples; whether a model trains."""

    trains: bool = False
    shapes: dict[int, set[tuple[Shape, ...]]] = field(default_factory=dict)

    @property
    def has_tensors(self) -> bool:
        """True if batches hold tensors; else the loop makes them of what was fetched."""
        return any(shapes != {()} for shapes in self.shapes.values())

    @property
    def is_budgeted(self) -> bool:
        """True if a sampler chooses how many samples a batch has: more than whole ones and the last of an epoch."""
        return len(self.shapes) > 2

    @property
    def differs(self) -> bool:
        """True if batches of as many samples have different shapes."""
        return self.is_budgeted or any(len(shapes) > 1 for shapes in self.shapes.values())

    @property
    def largest(self) -> int:
        """Elements of the largest tensor."""
        return max((prod(shape) for all_of in self.shapes.values() for each in all_of for shape in each), default=0)


class LongestSample:
    """Follows the batches of a loop, and puts the longest sample into one after its steps.

    Args:
        looks_ahead: False: only follow.
        begins: Called before the batch that differs is fetched.
    """

    def __init__(self, begins: Callable[[], None], *, looks_ahead: bool) -> None:
        self._looks_ahead, self._begins = looks_ahead, begins
        self._is_done: Callable[[], bool] = lambda: False
        self._loaded: dict[int, _Loaded] = {}
        self._pending: list[tuple[_Loaded, int, tuple[Shape, ...]]] = []
        self._inputs: dict[int, set[tuple[Shape, ...]]] = {}
        self._steps_left = _MOST_STEPS
        self._wanted = 0  # elements of the largest tensor of a batch that is to be trained on
        self._largest: Shape = ()
        self._longest: Shape = ()
        self._read = (0, 0)
        self._reason = ""

    @contextmanager
    def attached(self, is_done: Callable[[], bool]) -> Iterator[None]:
        """Follow in the block what DataLoaders fetch in this process; ``is_done`` says that the steps are over."""
        self._is_done = is_done
        kind: Any = fetch._MapDatasetFetcher
        with wrapped(kind, "fetch", self._around_fetch):
            yield

    def trains(self, model: int, arguments: Sequence[Any], keywords: Mapping[str, Any], *, is_first: bool) -> None:
        """Note a call of a model with gradients, which may be its first one in the step."""
        for loaded, count, fetched in self._pending:
            loaded.trains = True
            loaded.shapes.setdefault(count, set()).add(fetched)
        self._pending.clear()
        shapes = _shapes((*arguments, *keywords.values()))
        shape = max(shapes, key=prod, default=())
        if self._wanted and prod(shape) >= self._wanted:
            self._longest, self._wanted = shape, 0
        elif not self._is_done():
            self._largest = max(self._largest, shape, key=prod)
            if is_first:
                self._inputs.setdefault(model, set()).add(shapes)

    def evaluated(self) -> None:
        """Note a call of a model that evaluates, perhaps with batches of the same data set."""
        self._pending.clear()

    def goes_on(self) -> bool:
        """Return whether another step is executed: until the batch was trained on, and one like the others after it."""
        if not (self._wanted or self._longest) or not self._steps_left:
            return False
        self._steps_left = self._steps_left - 1 if self._wanted else 0
        return True

    def lengths(self) -> BatchLengths | None:
        """Return what is known of batches that differ; None where those of the steps do not."""
        trained = [one for one in self._loaded.values() if one.trains]
        # A loader's last batch of an epoch has fewer samples; what a loop takes by itself may have any number.
        if not self._inputs_differ(1 if trained else 0) and not any(one.differs for one in trained):
            return None
        if self._longest:
            return BatchLengths(self._largest, self._longest, *self._read)
        if any(one.is_budgeted for one in trained):
            reason = "the sampler chooses how many samples a batch has"
        elif trained:
            reason = "the loop makes them"
        else:
            reason = "no DataLoader fetches them from a data set with a length"
        return BatchLengths(self._largest, None, *self._read, self._reason or reason)

    def _inputs_differ(self, dimension: int) -> bool:
        """Return whether a model's inputs had different shapes from a dimension on."""
        cut = [{tuple(shape[dimension:] for shape in one) for one in inputs} for inputs in self._inputs.values()]
        return any(len(shapes) > 1 for shapes in cut)

    # -- loaders -------------------------------------------------------------------------------------------------------

    def _around_fetch(self, original: Any, fetcher: Any, index: Any) -> Any:
        loaded = self._loaded.setdefault(id(fetcher.dataset), _Loaded())
        count = len(index) if isinstance(index, list) else 0
        if count and self._may_choose(loaded, count):
            self._begins()
            if (longest := self._longest_of(fetcher.dataset)) is not None:
                batch = original(fetcher, [longest, *index[1:]])
                self._chose(loaded, max(map(prod, _shapes(batch)), default=0))
                return batch
        batch = original(fetcher, index)
        self._pending.append((loaded, count, _shapes(batch)))
        return batch

    def _may_choose(self, loaded: _Loaded, count: int) -> bool:
        """Return whether the next batch gets the longest sample: once, where batches of one size differ in length."""
        if not self._looks_ahead or self._read[1] or self._reason or not loaded.trains or not self._is_done():
            return False
        if loaded.is_budgeted or count < max(loaded.shapes):
            return False
        return loaded.differs or (self._inputs_differ(0) and not loaded.has_tensors)

    def _longest_of(self, dataset: Any) -> int | None:
        """Return the index of the longest sample, as far as lengths can be read in time."""
        restore = keep_random_numbers()
        try:
            count = len(dataset)
            longest, read = longest_sample(dataset, count)
        except Exception as error:  # whatever the data set's own code raises
            self._reason = f"its samples cannot be read: {type(error).__name__}: {error}".partition("\n")[0]
            return None
        finally:
            restore()
        self._read = read, count
        return longest

    def _chose(self, loaded: _Loaded, elements: int) -> None:
        """Note the size of the batch with the longest sample; the steps may have had one as large."""
        if elements > loaded.largest or not elements:
            self._wanted = elements or prod(self._largest)
            self._reason = "the batch with the longest sample did not come to the model"
        else:
            self._longest, self._steps_left = self._largest, 0


def longest_sample(dataset: Any, count: int, seconds: float = _SECONDS) -> tuple[int, int]:
    """Return the index of the longest sample of a data set, and how many samples were read in time."""
    end = time.monotonic() + seconds
    tables: Any = sys.modules.get("datasets")
    if tables is not None and isinstance(dataset, tables.Dataset) and dataset.format["type"] != "custom":
        return _longest_row(dataset, count, end)
    longest, index, read = -1, 0, 0
    stride = _STRIDE if count % _STRIDE else 1
    for read in range(1, count + 1):
        place = read * stride % count
        if (length := length_of(dataset[place])) > longest:
            longest, index = length, place
        if time.monotonic() > end:
            break
    return index, read


def _longest_row(dataset: Any, count: int, end: float) -> tuple[int, int]:
    """Return the same for a table, whose lists and texts know their lengths."""
    import pyarrow
    import pyarrow.compute as functions

    compute: Any = functions  # which are made at import
    rows, longest, index, read = dataset.with_format("arrow"), -1, 0, 0
    for begin in range(0, count, _ROWS):
        table = rows[begin : begin + _ROWS]
        read = begin + table.num_rows
        lengths = [0] * table.num_rows
        for column in table.columns:
            if pyarrow.types.is_list(column.type) or pyarrow.types.is_large_list(column.type):
                found = compute.list_value_length(column)
            elif pyarrow.types.is_string(column.type) or pyarrow.types.is_large_string(column.type):
                found = compute.utf8_length(column)
            else:
                continue
            lengths = [length + (more or 0) for length, more in zip(lengths, found.to_pylist(), strict=True)]
        if lengths and max(lengths) > longest:
            longest = max(lengths)
            index = begin + lengths.index(longest)
        if time.monotonic() > end:
            break
    return index, read


def length_of(sample: Any) -> int:
    """Return how long a sample is: the numbers and characters in it, or the nodes of a graph."""
    if isinstance(sample, torch.Tensor):
        return sample.numel()
    if isinstance(sample, str | bytes):
        return len(sample)
    if isinstance(sample, Mapping):
        return sum(map(length_of, sample.values()))
    if isinstance(sample, list | tuple):
        return len(sample) if sample and isinstance(sample[0], int | float) else sum(map(length_of, sample))
    size = getattr(sample, "num_nodes", None) or getattr(sample, "size", 1)
    return size if isinstance(size, int) else prod(size) if isinstance(size, tuple) else 1


def _shapes(value: Any) -> tuple[Shape, ...]:
    return tuple(tuple(one.shape) for one in batch_tensors(value))
