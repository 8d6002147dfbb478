"""Samples whose images or recordings differ in size: what the model's processor makes of each.

Texts beside images are alike: as long as the text that the largest image leaves of ``data.sequence_length``.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING

from trainatomy.errors import WorkloadError
from trainatomy.training.image_layout import pads_images, rule_of
from trainatomy.training.images import FRAMES, has_assumed_length
from trainatomy.training.lengths import Sample, drawn_sizes
from trainatomy.training.model import unwrap
from trainatomy.training.positions import Lengths, lengths, position_limits
from trainatomy.training.samples import input_names
from trainatomy.training.shape import Shape, refuse_unused_images, refuse_unused_lengths, shape_of
from trainatomy.units import by
from trainatomy.workload.lengths import Image, number_of, pixels_of

if TYPE_CHECKING:
    from torch import nn

    from trainatomy.workload.schema import Workload


def media_of(workload: Workload, model: nn.Module) -> tuple[Shape, list[Sample]]:
    """Return the properties of a model, and every sample of an epoch whose images or recordings differ.

    Raises:
        WorkloadError: Samples of this model do not differ so, or it is not known how.
    """
    assert workload.data.lengths is not None
    shape = shape_of(model, Lengths(0, 0), workload.data)
    refuse_unused_lengths(workload.data, shape)
    if workload.data.lengths.kind == "seconds":
        return _recordings(workload, model, shape)
    return _images(workload, model, shape)


def _recordings(workload: Workload, model: nn.Module, shape: Shape) -> tuple[Shape, list[Sample]]:
    if not any(has_assumed_length(shape, name) for name in input_names(shape)):
        hears = any(name in ("input_features", "input_values") for name in input_names(shape))
        why = "hears recordings of one length, to which its processor pads all" if hears else "hears no recordings"
        raise _refused(f"{shape.class_name} {why}: leave it out")
    if getattr(shape.config, "layerdrop", 0):
        raise WorkloadError(
            "model.config.layerdrop: leaves out layers at random, so that steps with batches of one length differ: "
            "give 0, as transformers' example scripts do",
            key="model.config.layerdrop",
        )
    drawn = [number_of(size) for size in drawn_sizes(workload)]
    limit, longest = getattr(shape.config, "max_source_positions", None), max(drawn) / number_of("1s")
    if "input_features" in shape.parameters and isinstance(limit, int) and longest * FRAMES > limit:
        raise _refused(f"{longest:g} seconds are more than the {limit:,} frames of {shape.class_name}")
    return replace(shape, lengths=lengths(workload, unwrap(model))), [Sample(samples) for samples in drawn]


def _images(workload: Workload, model: nn.Module, shape: Shape) -> tuple[Shape, list[Sample]]:
    refuse_unused_images(workload.data, shape)
    drawn = [pixels_of(size) for size in drawn_sizes(workload)]
    of_size = {image: replace(shape, asked_size=image) for image in dict.fromkeys(drawn)}
    if rule_of(shape) is None or not (shape.image_token or pads_images(shape)):
        raise _refused(f"how {shape.class_name} joins images of several sizes in a batch is not known: leave it out")
    if len(of_size) > 1 and len({each.layout for each in of_size.values()}) == 1:
        alike = by((shape.default_image_size[1], shape.default_image_size[2]))
        raise _refused(f"the processor of {shape.class_name} resizes every image to {alike}: leave it out")
    if pads_images(shape) and workload.train.train_sampling_strategy == "group_by_length":
        key = "train.train_sampling_strategy"
        raise WorkloadError(f"{key}: group_by_length needs text: the Trainer counts input_ids", key=key)
    largest = max(of_size, key=lambda image: (of_size[image].placeholders, prod(image)))
    # What the largest sample holds, as where all samples are like it.
    data = workload.data.model_copy(update={"lengths": None, "image_size": largest})
    own = lengths(workload.model_copy(update={"data": data}), unwrap(model))
    limit = position_limits(unwrap(model)).sequence
    if limit is not None and own.total > limit:
        raise _refused(f"{own.total} tokens are more than the {limit} positions of {shape.class_name}")
    made = {image: _sample(each, image, own.sequence) for image, each in of_size.items()}
    return replace(of_size[largest], lengths=own), [made[image] for image in drawn]


def _sample(shape: Shape, image: Image, text: int) -> Sample:
    layout = shape.layout
    pixels = layout.height * layout.width
    if pads_images(shape):
        return Sample(pixels, image, (layout.height, layout.width))
    return Sample(shape.placeholders + text, image, tuple(layout), shape.images * layout.views * pixels)


def sample_shape(shape: Shape, sample: Sample, *, has_own_target: bool) -> Shape:
    """Return the properties that determine one of these samples.

    Args:
        shape: Those of the model.
        sample: The sample.
        has_own_target: Whether its transcript is as long as what is spoken in its recording.
    """
    if sample.image is not None:
        return replace(shape, asked_size=sample.image)
    seconds = sample.length / number_of("1s")
    if not has_own_target:
        return replace(shape, seconds=seconds)
    target = max(1, round(shape.lengths.target * seconds / shape.seconds))
    return replace(shape, seconds=seconds, lengths=shape.lengths._replace(target=target))


def _refused(message: str) -> WorkloadError:
    return WorkloadError(f"data.lengths: {message}", key="data.lengths")
