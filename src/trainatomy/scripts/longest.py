"""The longest sample of a data set whose samples differ in length: the loop trains on it once, after its steps.

Each batch is padded to its longest sample, so that a few batches say little about the largest one of an epoch.  Where
the batches of the steps differ, the lengths of all samples are read, and the batch that is fetched next gets the
longest one in the place of its first: an epoch has such a batch.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch.utils.data._utils import fetch

from trainatomy.results.script import BatchLengths
from trainatomy.scripts.samples import tensors_in
from trainatomy.simulator.isolation import keep_random_numbers
from trainatomy.training.signals import wrapped

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
        self._pending: list[_Loaded] = []
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
        for loaded in self._pending:
            loaded.trains = True
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
        """Note a call of a model that evaluates."""
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
        self._pending.append(loaded)
        count = len(index) if isinstance(index, list) else 0
        if count and self._may_choose(loaded, count):
            self._begins()
            if (longest := self._longest_of(fetcher.dataset)) is not None:
                batch = original(fetcher, [longest, *index[1:]])
                self._chose(loaded, max(map(prod, _shapes(batch)), default=0))
                return batch
        batch = original(fetcher, index)
        loaded.shapes.setdefault(count, set()).add(_shapes(batch))
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
    return tuple(tuple(one.shape) for one in tensors_in(value))
