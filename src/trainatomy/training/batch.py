"""Batches of a workload: real tensors on the CPU, drawn on request.

A batch holds inputs and labels, as in Hugging Face's guide, and an attention mask only if the workload asks for one.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import cycle
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import Dataset, default_collate

from trainatomy.errors import FactoryError, WorkloadError
from trainatomy.training import factory
from trainatomy.training.configuration import DTYPES
from trainatomy.training.images import LARGEST_BATCH_BYTES
from trainatomy.training.labels import IGNORED, decoder_inputs_of, draw_decoder_inputs, draw_labels
from trainatomy.training.lengths import LengthBatch, orders
from trainatomy.training.model import unwrap, weights_dtype
from trainatomy.training.positions import lengths
from trainatomy.training.samples import PADDED_SHARE, draw_inputs, media_of, padding_masks, sample_shape
from trainatomy.training.shape import (
    Shape,
    refuse_packed_images,
    refuse_unused_images,
    refuse_unused_lengths,
    refuse_varying_lengths,
    samples_per_step,
    shape_of,
)
from trainatomy.units import human_bytes

if TYPE_CHECKING:
    from trainatomy.workload.schema import Workload


Sample = Mapping[str, Any]
Batch = dict[str, Any]


class BatchesOfLengths(NamedTuple):
    """The batches of a training whose samples differ in length, in order."""

    batches: tuple[LengthBatch, ...]


MakeBatch = Callable[[int], Mapping[str, Any]]
"""Takes the batch size and returns the batch."""


class SyntheticDataset(Dataset[Sample]):
    """Dataset of ``size`` samples, each drawn from its index, and the function that joins them into a batch.

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

    def draw_kept(self) -> None:
        """Draw the samples that are kept: an evaluation, which uses most of them once, would seem to wait for them."""
        for index in range(min(self.size, getattr(self.draw, "pool", 0))):
            self.draw(index)


def build_dataset(
    workload: Workload, model: nn.Module, size: int, make_batch: MakeBatch | BatchesOfLengths | None = None
) -> SyntheticDataset:
    """Return a dataset of ``size`` samples for ``model``.

    Args:
        workload: Describes the samples.
        model: The model that they are for.
        size: Number of samples.
        make_batch: Makes the batches in place of ``workload.data``, if given.

    Raises:
        WorkloadError: A length exceeds the model's positions or does not apply to the model, or the model has an input
            that only ``data.factory`` can make.
    """
    dataset = _dataset_of(workload, model, size, make_batch)
    dataset.collate = _remembering(dataset.collate, model)
    return dataset


_SHAPES = "_trainatomy_batch_shapes"
"""Where a model keeps the shape and the bytes of each tensor of its first batch, by name."""


def _remembering(collate: Callable[[Sequence[Any]], Batch], model: nn.Module) -> Callable[[Sequence[Any]], Batch]:
    """Return a function that joins samples, and keeps with the model what the first batch for it looked like."""

    def collated(samples: Sequence[Any]) -> Batch:
        batch, inner = collate(samples), unwrap(model)
        if not hasattr(inner, _SHAPES):
            tensors = {name: value for name, value in batch.items() if isinstance(value, Tensor) and value.dim()}
            setattr(inner, _SHAPES, {name: (tuple(value.shape), value.nbytes) for name, value in tensors.items()})
        return batch

    return collated


def batch_shapes(model: nn.Module, size: int) -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor of a sample in the first batch of ``size`` that was made for a model."""
    return {name: _of_a_sample(shape, size) for name, (shape, _) in _first_batch(model).items()}


def batch_bytes(model: nn.Module) -> tuple[int, ...]:
    """Return the bytes of each tensor in the first batch that was made for a model; empty where none was made here."""
    return tuple(size for _, size in _first_batch(model).values())


def _first_batch(model: nn.Module) -> dict[str, tuple[tuple[int, ...], int]]:
    found: dict[str, tuple[tuple[int, ...], int]] = getattr(unwrap(model), _SHAPES, {})
    return found


def _of_a_sample(shape: tuple[int, ...], size: int) -> tuple[int, ...]:
    """Return the shape without the dimension of the batch, which may hold several rows of each sample."""
    rows, rest = divmod(shape[0], size)
    return shape if rest else shape[1:] if rows == 1 else (rows, *shape[1:])


def _dataset_of(
    workload: Workload, model: nn.Module, size: int, make_batch: MakeBatch | BatchesOfLengths | None
) -> SyntheticDataset:
    if isinstance(make_batch, BatchesOfLengths):
        shape = media_of(workload, model)[0] if workload.data.varying_media else None
        return _of_lengths(workload, model, size, make_batch.batches, shape)
    if make_batch is not None:
        return _from_function(make_batch, "the batch", size, model)
    if workload.data.factory is not None:
        reference = workload.data.factory
        make, keywords = factory.load(reference, "data.factory"), workload.data.factory_arguments
        return _from_function(make, f"data.factory: {reference}", size, model, keywords)
    if workload.data.varying_media:
        media, samples = media_of(workload, model)
        first = orders(workload, samples, count=1)[_rank()]
        return _of_lengths(workload, model, size, [batch for step in first.steps for batch in step], media)
    shape = shape_of(model, lengths(workload, unwrap(model)), workload.data)
    refuse_unused_lengths(workload.data, shape)
    refuse_unused_images(workload.data, shape)
    refuse_packed_images(workload.data, shape)
    if workload.data.varies:
        first = orders(workload, count=1)[_rank()]
        return _of_lengths(workload, model, size, [batch for step in first.steps for batch in step])
    draw = _Drawing(workload, shape, _input_dtype(workload, model))
    draw(0)  # fails here rather than in the loop if a sample cannot be drawn
    return SyntheticDataset(size, draw, _Collation(shape))


def build_batch(workload: Workload, model: nn.Module, make_batch: MakeBatch | BatchesOfLengths | None = None) -> Batch:
    """Return one batch: ``[batch, …]`` tensors on the CPU by the name of the model's argument."""
    size = workload.batch_size
    dataset = build_dataset(workload, model, size, make_batch)
    return dataset.collate([dataset[index] for index in range(size)])


def _from_function(
    make: Callable[..., Mapping[str, Any]],
    what: str,
    size: int,
    model: nn.Module,
    keywords: Mapping[str, Any] | None = None,
) -> SyntheticDataset:
    """Return a dataset of placeholders, each of whose batches is one call of the user's function."""

    def collate(samples: Sequence[Any]) -> Batch:
        batch = factory.call(make, what, (len(samples),), keywords)
        if not isinstance(batch, Mapping) or not batch:
            raise FactoryError(f"{what} must be a dict of tensors, not {type(batch).__name__}")
        _check_rows(batch, what, len(samples))
        _check_names(batch, what, model)
        return dict(batch)

    return SyntheticDataset(size, lambda index: _Placeholder(), collate)


def _check_rows(batch: Mapping[str, Any], what: str, size: int) -> None:
    """Refuse a batch whose tensors all have one first dimension that cannot come from ``size`` samples.

    A multiple is allowed (several views or choices of a sample), and so is 1 (samples packed into one row).
    """
    shapes = {name: tuple(value.shape) for name, value in batch.items() if isinstance(value, Tensor) and value.dim()}
    rows = {shape[0] for shape in shapes.values()}
    if len(rows) != 1 or any(size in shape[:2] for shape in shapes.values()):
        return
    found = rows.pop()
    if found != 1 and found % size:
        shown = ", ".join(f"{name} {list(shape)}" for name, shape in shapes.items())
        raise FactoryError(f"{what} was asked for a batch of {size} and returned {found} rows: {shown}")


def _check_names(batch: Mapping[str, Any], what: str, model: nn.Module) -> None:
    """Refuse entries that the model's forward does not take."""
    inner = unwrap(model)
    parameters = inspect.signature(inner.forward).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return
    unknown = [repr(name) for name in batch if name not in parameters]
    if unknown:
        raise FactoryError(
            f"{what} has {', '.join(unknown)}, which the forward of {type(inner).__name__} does not take: "
            f"it takes {', '.join(parameters)}"
        )


def _of_lengths(
    workload: Workload, model: nn.Module, size: int, batches: Sequence[LengthBatch], media: Shape | None = None
) -> SyntheticDataset:
    """Return a dataset of placeholders whose batches have given lengths, in that order and then again.

    ``media`` is the shape of a model whose images or recordings differ (``media_of``).
    """
    shape = media or shape_of(model, lengths(workload, unwrap(model)))
    if media is None:
        refuse_varying_lengths(workload.data, shape)
    draw = _Drawing(workload, shape, _input_dtype(workload, model))
    collate, following = _Collation(shape), cycle(batches)
    has_own_target = shape.has_target and not shape.is_encoder_decoder and workload.data.target_length is None

    def make(samples: Sequence[Any]) -> Batch:
        batch = next(following)
        if batch.media:
            shapes = [sample_shape(shape, sample, has_own_target=has_own_target) for sample in batch.media]
            return collate.padded([draw.of_shape(index, each) for index, each in enumerate(shapes)], batch)
        if len(batch.lengths) * batch.padded * _BYTES_OF_TOKEN > LARGEST_BATCH_BYTES:
            raise _too_large(len(batch.lengths))
        if batch.is_joined:
            return _joined([draw.of_length(index, length) for index, length in enumerate(batch.lengths)])
        drawn = [draw.of_length(index, batch.padded) for index in range(len(batch.lengths))]
        for sample, length in zip(drawn, batch.lengths, strict=True):
            _mask_from(sample, length)
        return collate(drawn)

    return SyntheticDataset(size, lambda index: _Placeholder(), make)


_BYTES_OF_TOKEN = 24
"""Bytes that a token has in a batch: its id, its label and its mask."""


def _joined(samples: Sequence[Sample]) -> Batch:
    """Return samples behind each other in one row, as transformers' collator for training without padding does."""
    from transformers import DataCollatorWithFlattening

    names = ("input_ids", "labels")
    return dict(DataCollatorWithFlattening()([{name: sample[name] for name in names} for sample in samples]))


def _rank() -> int:
    """Return the rank of this process, 0 without a process group."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


class _Placeholder(dict[str, Any]):
    """Sample of a dataset whose batches come from a function; it has no columns that the Trainer could remove."""


POOL_BYTES = 256 * 2**20
"""Host memory for samples that are kept to be used again."""
POOL_SAMPLES = 4096
"""Most samples that are drawn; larger batches repeat them, as drawing takes longer than all else done for a sample."""


class _Drawing:
    """Draws the sample of an index, always the same one for the same index.

    The samples of two steps are kept and used again in later steps: drawing images takes the CPU longer than launching
    a step, and a measured training would seem to wait for its data.  Of large batches only the first samples are drawn
    (``POOL_SAMPLES``).
    """

    def __init__(self, workload: Workload, shape: Shape, float_dtype: torch.dtype) -> None:
        self.shape = shape
        self.known: dict[int, Sample] = {}
        self.pool = min(2 * samples_per_step(workload), POOL_SAMPLES)
        self.with_labels = workload.mode == "training"
        self.with_mask = workload.data.has_mask
        self.is_padded = workload.data.padding
        length = workload.data.sequence_length
        is_rounded = length is not None and workload.data.rounded_up(length) > length
        self.kept = length if is_rounded and not workload.data.varies else None
        self.is_smoothed = workload.train.label_smoothing_factor > 0
        self.float_dtype = float_dtype

    def __call__(self, index: int) -> Sample:
        place = index % self.pool
        if place not in self.known:
            sample = self.known[place] = self._draw(place)
            size = sum(value.nbytes for value in tree_leaves(sample))
            self.pool = min(self.pool, max(POOL_BYTES // size, 1))
        return self.known[place]

    def of_length(self, index: int, length: int) -> dict[str, Any]:
        """Draw the sample of an index with a length of its own, without padding."""
        return self._draw(index, replace(self.shape, lengths=self.shape.lengths._replace(sequence=length)))

    def of_shape(self, index: int, shape: Shape) -> dict[str, Any]:
        """Draw the sample of an index with images or a recording of its own, and the masks that padding will need."""
        sample = self._draw(index, shape)
        return {**sample, **padding_masks(shape, sample)}

    def _draw(self, index: int, shape: Shape | None = None) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(index)
        shape = shape or self.shape
        inputs = draw_inputs(shape, generator)
        targets = draw_labels(shape, inputs, generator) if self.with_labels else draw_decoder_inputs(shape, generator)
        if self.with_labels and self.is_smoothed:
            targets = {**targets, **decoder_inputs_of(shape, targets)}
        sample = {**inputs, **self._mask(inputs), **targets}
        if self.is_padded:
            _pad(sample)
        elif self.kept is not None and "attention_mask" in sample:
            _mask_from(sample, self.kept)
        cast: dict[str, Any] = tree_map(self._cast, sample)
        return cast

    def _mask(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return ``[S]`` int64 ones, as a tokenizer does, for models that read text."""
        if not self.with_mask or "input_ids" not in inputs or "attention_mask" not in self.shape.parameters:
            return {}
        return {"attention_mask": torch.ones_like(inputs["input_ids"])}

    def _cast(self, value: Tensor) -> Tensor:
        return value.to(self.float_dtype) if value.is_floating_point() else value


_LISTED = frozenset({"mask_labels", "class_labels"})
"""Arguments that models take as a list with one tensor per image."""

_CHANNELS_FIRST = "CHW"

_OF_TEXT = frozenset({"input_ids", "attention_mask", "labels", "token_type_ids", "mm_token_type_ids"})
"""Arguments with a value for each token of a row."""

_JOINED = frozenset({"pixel_values", "image_grid_thw", "image_sizes"})
"""Arguments in which models whose samples have several images, or lists of patches, expect all images in one row."""


class _Collation:
    """PyTorch's default collation with exceptions for images.

    The objects of images stay in a list, because their number may differ.  Joint models of text and images compute
    their loss only if an argument asks for it.
    """

    def __init__(self, shape: Shape) -> None:
        self.joined = _JOINED if shape.joins_images else frozenset[str]()
        self.asks_for_loss = "return_loss" in shape.parameters and "labels" not in shape.parameters

    def __call__(self, samples: Sequence[Sample]) -> Batch:
        count = len(samples)
        if count > 1 and count * sum(value.nbytes for value in tree_leaves(samples[0])) > LARGEST_BATCH_BYTES:
            return {name: self._repeated(name, value, count) for name, value in self(samples[:1]).items()}
        apart = {name for name, value in samples[0].items() if isinstance(value, dict) or name in _LISTED}
        joined = [{name: value for name, value in sample.items() if name not in apart} for sample in samples]
        batch: Batch = default_collate(joined)
        for name in self.joined & batch.keys():
            batch[name] = batch[name].flatten(0, 1)
        batch.update({name: [sample[name] for sample in samples] for name in samples[0] if name in apart})
        if self.asks_for_loss:
            batch["return_loss"] = True
        return batch

    def padded(self, samples: Sequence[Sample], batch: LengthBatch) -> Batch:
        """Return samples of different sizes as a batch: each tensor with zeros up to the largest of its name.

        Args:
            samples: The samples.
            batch: Says to which length or size they are padded.
        """

        def grown(name: str, value: Tensor) -> Tensor:
            sides = [max(sample[name].shape[place] for sample in samples) for place in range(value.dim())]
            if name in _OF_TEXT and value.dim() and batch.side is None and not batch.is_counted:
                sides[-1] = batch.padded
            missing = [sides[place] - value.shape[place] for place in reversed(range(value.dim()))]
            fill = IGNORED if name == "labels" else 0
            return pad(value, [each for last in missing for each in (0, last)], value=fill)

        def whole(name: str, value: Any) -> Any:
            if name in self.joined and isinstance(value, Tensor):
                return value[None] if value.dim() == len(_CHANNELS_FIRST) else value  # an image that is not cut
            if not isinstance(value, Tensor):
                return value
            if name == "mask_labels":
                assert batch.side is not None
                height, width = batch.side
                return pad(value, [0, width - value.shape[-1], 0, height - value.shape[-2]])
            return value if name in _LISTED else grown(name, value)

        found: list[Sample] = [{name: whole(name, value) for name, value in sample.items()} for sample in samples]
        if not self.joined & found[0].keys():
            return self(found)
        joined = self.joined & found[0].keys()
        rest: Batch = self([{name: value for name, value in each.items() if name not in joined} for each in found])
        return rest | {name: torch.cat([sample[name] for sample in found]) for name in joined}

    def _repeated(self, name: str, value: Any, count: int) -> Any:
        """Return what a batch of one sample holds under a name as that of ``count`` samples, without copies of it."""
        if isinstance(value, list):
            return value * count
        if not isinstance(value, Tensor):
            return value
        if name in self.joined:
            raise _too_large(count)
        return value.expand(count, *value.shape[1:])


def _too_large(count: int) -> WorkloadError:
    key = "train.per_device_train_batch_size"
    limit = human_bytes(LARGEST_BATCH_BYTES)
    return WorkloadError(f"{key}: a batch of {count:,} samples takes more than {limit} of host memory", key=key)


def _input_dtype(workload: Workload, model: nn.Module) -> torch.dtype:
    """Return the dtype of floating-point inputs: as the user says, that of the weights, or float32 under autocast.

    A convolution needs both in one dtype; autocast casts them itself.
    """
    train, asked = workload.train, workload.data.float_dtype
    if asked is not None:
        return DTYPES[asked]
    if workload.mode != "training" and (train.fp16_full_eval or train.bf16_full_eval):
        return torch.float16 if train.fp16_full_eval else torch.bfloat16
    if train.fp16 or train.bf16:
        return torch.float32
    return weights_dtype(workload, model)


def _pad(sample: dict[str, Tensor]) -> None:
    """Mask out the end of the text and its labels."""
    length = sample["attention_mask"].shape[-1] if "attention_mask" in sample else 0
    if length:
        _mask_from(sample, length - length // PADDED_SHARE)


def _mask_from(sample: dict[str, Tensor], kept: int) -> None:
    """Mask out the text and its labels from a position on."""
    sample["attention_mask"][..., kept:] = 0
    if "labels" in sample and sample["labels"].shape == sample["attention_mask"].shape:
        sample["labels"][..., kept:] = IGNORED
