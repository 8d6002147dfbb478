"""Notes on what is assumed of the images and recordings of a sample, and on what becomes of images."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from torch import nn

from trainatomy.results.prediction import LeadingNote
from trainatomy.training.image_layout import SEVERAL, rule_of
from trainatomy.training.images import PIX2STRUCT_PATCHES, REGIONS, has_assumed_length
from trainatomy.training.model import unwrap
from trainatomy.training.positions import Lengths, is_of_trl
from trainatomy.training.samples import input_names
from trainatomy.training.shape import Shape, shape_of
from trainatomy.units import by, many
from trainatomy.workload.schema import Workload

if TYPE_CHECKING:
    from trainatomy.workload.data import DataSpec

_OTHERS = "data.factory makes others"


def sample_notes(workload: Workload, model: nn.Module) -> Iterator[str]:
    """Yield notes on the images and recordings of a sample; what was decided for the user leads."""
    if workload.data.factory is not None or not hasattr(unwrap(model), "config"):
        return
    if workload.data.varying_media:
        return
    shape = shape_of(model, Lengths(0, 0), workload.data)
    names = input_names(shape)
    if is_of_trl(workload):
        if "pixel_values" in names:
            yield LeadingNote("samples hold text only: the trainers of TRL are simulated without images")
        return
    if "pixel_values" in names or shape.main_input == "pixel_values_videos":
        yield from _assumed_images(shape, workload.data)
        yield from _changed_images(shape)
    if "flattened_patches" in names:
        yield LeadingNote(f"one image of {PIX2STRUCT_PATCHES:,} patches per sample, assumed; {_OTHERS}")
    if {"visual_feats", "visual_embeds"}.intersection(names):
        yield LeadingNote(f"{REGIONS} regions of an image per sample, assumed; {_OTHERS}")
    if any(has_assumed_length(shape, name) for name in names):
        yield LeadingNote(f"a recording of 10 seconds per sample, assumed; {_OTHERS}")


def _assumed_images(shape: Shape, data: DataSpec) -> Iterator[str]:
    """Yield which images a sample is taken to have, with the flags that change it."""
    may_be_several = bool(shape.image_token) and getattr(shape.config, "model_type", "") in SEVERAL
    changes = ["--image-size"] if data.image_size is None and _has_a_choice(shape) else []
    changes += ["--images"] if data.images is None and may_be_several else []
    is_unknown = data.images is None and shape.image_token is not None and rule_of(shape) is None
    if data.image_size is not None or not (changes or is_unknown):
        return
    count = "one image" if shape.images == 1 else many(shape.images, "image")
    whole = ", not cut into tiles" if _is_cut(shape) else ""
    what = f"{count} of {by(shape.original_size)} per sample{whole}"
    then = f"{' and '.join(changes)} change{'s' if len(changes) == 1 else ''} it" if changes else _OTHERS
    yield LeadingNote(f"{what}, assumed; {then}")


def _has_a_choice(shape: Shape) -> bool:
    """Return whether images of different sizes become something else, in a way that is known."""
    rule = rule_of(shape)
    _, side, _ = shape.default_image_size
    sizes = ((side, side), (side, 2 * side), (4 * side, 4 * side))
    return rule is not None and len({rule(shape, *size) for size in sizes}) > 1


def _is_cut(shape: Shape) -> bool:
    """Return whether a processor cuts an image of the default size into tiles, which is taken whole here."""
    rule = rule_of(shape)
    return rule is not None and rule(shape, *shape.original_size).views > shape.layout.views


def _changed_images(shape: Shape) -> Iterator[str]:
    """Yield what becomes of images of a size that the user gave."""
    if shape.asked_size is None:
        return
    layout, asked = shape.layout, by(shape.asked_size)
    size = by((layout.height, layout.width))
    tokens = f": {many(shape.image_tokens, 'token')} each" if shape.image_tokens else ""
    if layout.rows:
        grid = by((layout.rows, layout.columns))
        beside = " beside the whole image" if layout.has_whole else ""
        yield f"images of {asked} are cut into {grid} tiles of {size}{beside}{tokens}"
    elif asked != size:
        names_size = shape.vision is shape.config and hasattr(shape.config, "image_size")
        other = "; --config image_size=… makes a model for others" if names_size else ""
        yield f"images of {asked} are resized to {size}, which {shape.class_name} takes{tokens}{other}"
