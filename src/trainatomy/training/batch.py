"""The batches of a workload: real tensors on the CPU, drawn when they are asked for.

As in the guide, a batch holds the inputs and the labels, and no attention mask unless the workload wants one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import Dataset, default_collate

from trainatomy.errors import FactoryError
from trainatomy.training import factory
from trainatomy.training.labels import IGNORED, decoder_inputs_of, draw_decoder_inputs, draw_labels
from trainatomy.training.model import unwrap
from trainatomy.training.positions import lengths
from trainatomy.training.samples import PADDED_SHARE, draw_inputs
from trainatomy.training.shape import Shape, shape_of
from trainatomy.training.throughput import samples_per_step

if TYPE_CHECKING:
    from trainatomy.workload.schema import Workload

Sample = Mapping[str, Any]
Batch = dict[str, Any]
MakeBatch = Callable[[int], Mapping[str, Any]]
"""A function that takes the batch size and returns the batch."""


class SyntheticDataset(Dataset[Sample]):
    """``size`` samples, each drawn from its index, with the function that joins them into a batch.

    A sample is a dict of CPU tensors without the batch dimension; ``collate`` stacks them.
    """

    def __init__(self, size: int, draw: Callable[[int], Sample], collate: Callable[[Sequence[Any]], Batch]) -> None:
        self.size = size
        self.draw = draw
        self.collate = collate

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Sample:
        return self.draw(index)


def build_dataset(
    workload: Workload, model: nn.Module, size: int, make_batch: MakeBatch | None = None
) -> SyntheticDataset:
    """A dataset of ``size`` samples for ``model``, whose batches come from ``make_batch`` where it is given.

    Raises ``WorkloadError``: a length beyond the model's positions, an input that only ``data.factory`` can make.
    """
    if make_batch is not None:
        return _from_function(make_batch, "the batch", size)
    if workload.data.factory is not None:
        reference = workload.data.factory
        return _from_function(factory.load(reference, "data.factory"), f"data.factory: {reference}", size)
    shape = shape_of(model, lengths(workload.data, unwrap(model)))
    draw = _Drawing(workload, shape)
    draw(0)  # tells at once where a sample cannot be drawn
    return SyntheticDataset(size, draw, _Collation(shape))


def build_batch(workload: Workload, model: nn.Module, make_batch: MakeBatch | None = None) -> Batch:
    """One batch of the workload's size: ``[batch, …]`` tensors on the CPU by the name of the model's argument."""
    size = workload.batch_size
    dataset = build_dataset(workload, model, size, make_batch)
    return dataset.collate([dataset[index] for index in range(size)])


def _from_function(make: MakeBatch, what: str, size: int) -> SyntheticDataset:
    """Samples are placeholders; each batch is one call of the user's function."""

    def collate(samples: Sequence[Any]) -> Batch:
        with factory.user_code(what):
            batch = make(len(samples))
        if not isinstance(batch, Mapping) or not batch:
            found = type(batch).__name__
            raise FactoryError(f"{what} must be a dict of tensors, not {found}")
        return dict(batch)

    return SyntheticDataset(size, lambda index: _Placeholder(), collate)


class _Placeholder(dict[str, Any]):
    """A sample of a dataset whose batches come whole; it has no columns that the Trainer could remove."""


POOL_BYTES = 256 * 2**20
"""Host memory that samples may take which wait to be used again."""


class _Drawing:
    """Draws the sample of an index, always the same for the same index.

    The samples of two steps come again in later ones, from memory: drawing images takes the host longer than issuing a
    step, and a training that is measured would seem to wait for its data.
    """

    def __init__(self, workload: Workload, shape: Shape) -> None:
        self.shape = shape
        self.known: dict[int, Sample] = {}
        self.pool = 2 * samples_per_step(workload)
        self.with_labels = workload.mode == "training"
        self.with_mask = workload.data.has_mask
        self.is_padded = workload.data.padding
        self.is_smoothed = workload.train.label_smoothing_factor > 0
        self.float_dtype = _input_dtype(workload)

    def __call__(self, index: int) -> Sample:
        place = index % self.pool
        if place not in self.known:
            sample = self.known[place] = self._drawn(place)
            size = sum(value.nbytes for value in tree_leaves(sample))
            self.pool = min(self.pool, max(POOL_BYTES // size, 1))
        return self.known[place]

    def _drawn(self, index: int) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(index)
        inputs = draw_inputs(self.shape, generator)
        targets = (
            draw_labels(self.shape, inputs, generator)
            if self.with_labels
            else draw_decoder_inputs(self.shape, generator)
        )
        if self.with_labels and self.is_smoothed:
            targets = {**targets, **decoder_inputs_of(self.shape, targets)}
        sample = {**inputs, **self._mask(inputs), **targets}
        if self.is_padded:
            _pad(sample)
        cast: dict[str, Any] = tree_map(self._cast, sample)
        return cast

    def _mask(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """``[S]`` int64 ones, as a tokenizer returns them, for models that read text."""
        if not self.with_mask or "input_ids" not in inputs or "attention_mask" not in self.shape.parameters:
            return {}
        return {"attention_mask": torch.ones_like(inputs["input_ids"])}

    def _cast(self, value: Tensor) -> Tensor:
        return value.to(self.float_dtype) if value.is_floating_point() else value


_LISTED = frozenset({"mask_labels", "class_labels"})
"""What models take as a list with a tensor for each image."""


_JOINED = frozenset({"pixel_values", "image_grid_thw"})
"""What models that take a list of patches want of all images in one row."""


class _Collation:
    """PyTorch's default collation, except that the objects of images, of which each may have others, stay in a list;
    joint models of text and images are asked for their loss by an argument."""

    def __init__(self, shape: Shape) -> None:
        self.joined = _JOINED if shape.grid is not None else frozenset[str]()
        self.asks_for_loss = "return_loss" in shape.parameters and "labels" not in shape.parameters

    def __call__(self, samples: Sequence[Sample]) -> Batch:
        apart = {name for name, value in samples[0].items() if isinstance(value, dict) or name in _LISTED}
        joined = [{name: value for name, value in sample.items() if name not in apart} for sample in samples]
        batch: Batch = default_collate(joined)
        for name in self.joined & batch.keys():
            batch[name] = batch[name].flatten(0, 1)
        batch.update({name: [sample[name] for sample in samples] for name in samples[0] if name in apart})
        if self.asks_for_loss:
            batch["return_loss"] = True
        return batch


def _input_dtype(workload: Workload) -> torch.dtype:
    """Floats follow weights of 16 bits, unless autocast casts them on the way in (a convolution wants one dtype)."""
    train = workload.train
    if workload.mode == "inference" and (train.fp16_full_eval or train.bf16_full_eval):
        return torch.float16 if train.fp16_full_eval else torch.bfloat16
    if train.fp16 or train.bf16:
        return torch.float32
    dtype = getattr(torch, workload.model.dtype)
    assert isinstance(dtype, torch.dtype)
    return dtype


def _pad(sample: dict[str, Tensor]) -> None:
    """Mask the end of the text out, and its labels with it."""
    length = sample["attention_mask"].shape[-1] if "attention_mask" in sample else 0
    kept = length - length // PADDED_SHARE
    if length == 0:
        return
    sample["attention_mask"][..., kept:] = 0
    if "labels" in sample and sample["labels"].shape == sample["attention_mask"].shape:
        sample["labels"][kept:] = IGNORED
