"""The properties of a model that determine what a sample looks like.

Samples and tokens per second.
"""

from __future__ import annotations

import inspect
import math
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import nn

from trainatomy.errors import WorkloadError
from trainatomy.training.image_layout import SEVERAL, Layout, has_limits, refuse_size, rule_of, scaled
from trainatomy.training.lengths import sample_lengths
from trainatomy.training.model import unwrap
from trainatomy.training.positions import SECONDS, Lengths, lengths, writes_transcripts
from trainatomy.workload.batching import batching_of
from trainatomy.workload.sentence_transformers import sequences_of

if TYPE_CHECKING:
    from trainatomy.workload.data import DataSpec
    from trainatomy.workload.schema import Workload


CHOICES = 4
"""Choices in a sample of a multiple-choice model, as in SWAG."""


@dataclass(frozen=True)
class Shape:
    """The properties of a model that determine what a sample looks like.

    Attributes:
        class_name: Name of the model's class.
        config: Its configuration.
        parameters: Names of the arguments of its forward.
        main_input: Name of its main input.
        lengths: Tokens of a sample.
        images: Images of a sample.
        asked_size: Height and width of an image before the model's processor, if the user says.
        limits: Limits to which the processor resizes images, if the user says.
        pixels: Fewest and most pixels to which images are scaled before the processor, if they are.
        seconds: How long a recording is, for models that take any length.
    """

    class_name: str
    config: Any
    parameters: frozenset[str]
    main_input: str
    lengths: Lengths
    images: int = 1
    asked_size: tuple[int, int] | None = None
    limits: tuple[int, int] | None = None
    pixels: tuple[int, int] | None = None
    seconds: float = SECONDS

    @property
    def text(self) -> Any:
        """Configuration of the part that reads text, in a model of several parts."""
        return getattr(self.config, "text_config", None) or (self.config.encoder if self._is_pair else self.config)

    @property
    def decoder(self) -> Any:
        """Configuration of the part that writes text, in a model of several parts."""
        return self.config.decoder if self._is_pair else self.text

    @property
    def vision(self) -> Any:
        """Configuration of the part that sees images, in a model of several parts."""
        return getattr(self.config, "vision_config", None) or (self.config.encoder if self._is_pair else self.config)

    @property
    def _is_pair(self) -> bool:
        """True if the model pairs an encoder and a decoder that are models of their own (``EncoderDecoderModel``)."""
        parts = (getattr(self.config, name, None) for name in ("encoder", "decoder"))
        return all(hasattr(part, "model_type") for part in parts) and not hasattr(self.config, "vocab_size")

    @property
    def is_encoder_decoder(self) -> bool:
        """True if labels belong to a decoder, which has a length of its own."""
        return bool(getattr(self.config, "is_encoder_decoder", False))

    @property
    def has_text(self) -> bool:
        """True if the model reads text of a length that the workload can choose."""
        return "input_ids" in self.parameters

    @property
    def has_target(self) -> bool:
        """True if labels have a length of their own: those of a decoder, or a transcript.

        Without ``target_length`` they follow ``sequence_length``; a transcript without both has its own default.
        """
        return self.is_encoder_decoder or writes_transcripts(self.class_name)

    @property
    def choices(self) -> int:
        """Number of texts in a sample."""
        return CHOICES if "MultipleChoice" in self.class_name else 1

    @property
    def detects(self) -> bool:
        """True if labels are the objects of an image, or its segments."""
        return any(part in self.class_name for part in _DETECTORS)

    @property
    def image_size(self) -> tuple[int, int, int]:
        """Channels, height and width of an image, or of each of its tiles, as the encoder sees it."""
        return self.default_image_size[0], self.layout.height, self.layout.width

    @cached_property
    def layout(self) -> Layout:
        """What an image becomes before the encoder sees it.

        Raises:
            WorkloadError: The user asked for a size, and what becomes of it is not known.
        """
        rule, size = rule_of(self), self.processed_size
        _, height, width = self.default_image_size
        if rule is None and self.asked_size not in (None, (height, width)):
            raise refuse_size(self)
        if size is not None and rule is not None:
            return rule(self, *size)
        is_offered = [2 * height, 2 * width] in self.pinpoints
        return Layout(height, width, 2, 2) if is_offered else Layout(height, width)

    @property
    def processed_size(self) -> tuple[int, int] | None:
        """Height and width of an image that the processor gets; ``None`` for one of the default size."""
        if self.pixels is None:
            return self.asked_size
        _, *default = self.default_image_size
        size = scaled(self.asked_size or (default[0], default[1]), self.pixels)
        return size if self.asked_size or size != tuple(default) else None

    @property
    def default_image_size(self) -> tuple[int, int, int]:
        """Channels, height and width of an image, or of its tiles, unless the user says.

        If the configuration names no size, 224 × 224 (ResNet, ConvNeXt), for a detector 640 × 640 (RT-DETR, YOLO), for
        Florence-2 768 × 768 (the processor of its checkpoints).  RF-DETR cuts the patches of an image into windows, so
        its sides are multiples of those.
        """
        backbone: Any = getattr(self.config, "backbone_config", None)
        if self.detects and isinstance(windows := getattr(backbone, "num_windows", None), int):
            channels, *sides = image_size(backbone)
            unit = windows * int(backbone.patch_size)
            height, width = (math.ceil(side / unit) * unit for side in sides)
            return channels, height, width
        return image_size(self.vision, 768 if self._is_florence else 640 if self.detects else 224)

    @property
    def default_size_is_assumed(self) -> bool:
        """True if the configuration names no size of images."""
        backbone: Any = getattr(self.config, "backbone_config", None)
        has_windows = self.detects and isinstance(getattr(backbone, "num_windows", None), int)
        return not has_windows and not any(getattr(self.vision, name, None) for name in _SIZES)

    @property
    def _is_florence(self) -> bool:
        return getattr(self.config, "model_type", "") == "florence2"

    @property
    def image_token(self) -> int | None:
        """The placeholder token that the model replaces by a part of the image, or ``None``."""
        found = (getattr(self.config, name, None) for name in ("image_token_id", "image_token_index"))
        return next((token for token in found if isinstance(token, int)), None)

    @property
    def image_tokens(self) -> int:
        """Number of placeholder tokens per image; 0 if the configuration does not say."""
        if self.image_token is None or "pixel_values" not in self.parameters:
            return 0
        if self.pinpoints and self.layout.rows:
            return self._tile_tokens
        if "aspect_ratio_ids" in self.parameters:
            return 1  # Llama 3.2 Vision: the text attends to the image beside it
        return self.layout.views * self._view_tokens

    @property
    def _view_tokens(self) -> int:
        """Tokens of what the encoder sees at once, an image or a tile; 0 if the configuration does not say."""
        if self.takes_whole_images:
            return self._reduced_patches
        places = (self.config, self.vision, self.text, getattr(self.config, "perceiver_config", None))
        found = (getattr(place, name, None) for name in _IMAGE_TOKENS for place in places)
        return next((count for count in found if isinstance(count, int)), self._reduced_patches)

    @property
    def pinpoints(self) -> list[list[int]]:
        """Heights and widths that LLaVA-NeXT and OneVision choose from for the tiles of an image.

        Unless the user says, an image is twice as high and as wide as a tile, which both offer.
        """
        offered = getattr(self.config, "image_grid_pinpoints", None) if "image_sizes" in self.parameters else None
        return [list(size) for size in offered or ()]

    @property
    def original_size(self) -> tuple[int, int]:
        """Height and width of an image before the model's processor."""
        layout = self.layout
        return self.processed_size or (max(layout.rows, 1) * layout.height, max(layout.columns, 1) * layout.width)

    @property
    def _tile_tokens(self) -> int:
        """Tokens of the whole image and its tiles: one for each patch, and one at the end of each row of the tiles.

        Patches beside an image whose proportions are not those of its tiles are left out; OneVision shrinks what has
        more patches than 9 tiles (``_get_unpadded_features``).
        """
        layout, patch = self.layout, int(self.vision.patch_size)
        height, width = layout.height // patch, layout.width // patch
        rows, columns = layout.rows * height, layout.columns * width
        high, wide = self.original_size
        if wide / high > columns / rows:
            rows -= (rows - int(round(high * (columns / wide), 7))) // 2 * 2
        else:
            columns -= (columns - int(round(wide * (rows / high), 7))) // 2 * 2
        most = getattr(self.config, "vision_aspect_ratio", None) or ""
        ratio = math.sqrt(rows * columns / (int(most.removeprefix("anyres_max_")) * height**2)) if most else 1.0
        if ratio > _SHRUNK_FROM:
            rows, columns = int(rows // ratio), int(columns // ratio)
        return height * width + rows * (columns + 1)

    @property
    def audio(self) -> Any:
        """Configuration of the part that hears, in a model of several parts."""
        return getattr(self.config, "audio_config", None) or self.config

    @property
    def audio_token(self) -> int | None:
        """The placeholder token that the model replaces by a part of the recording, or ``None``."""
        token = getattr(self.config, "audio_token_id", None)
        return token if isinstance(token, int) else None

    @property
    def audio_tokens(self) -> int:
        """Number of placeholder tokens per recording; 0 if it is not known how the model makes them.

        The encoder halves the frames.  Qwen2-Audio halves its positions once more
        (``_get_feat_extract_output_lengths``); Voxtral joins as many as fill ``intermediate_size``
        (``get_audio_features``).
        """
        positions = getattr(self.audio, "max_source_positions", None)
        if self.audio_token is None or "input_features" not in self.parameters or not isinstance(positions, int):
            return 0
        if "feature_attention_mask" in self.parameters:
            return positions // 2
        if "Voxtral" in self.class_name:
            return positions * int(self.audio.hidden_size) // int(self.audio.intermediate_size)
        return 0

    @property
    def grid(self) -> tuple[int, int] | None:
        """Height and width of an image in patches, for models that take a list of patches and their grid.

        One token stands for ``merge × merge`` patches.
        """
        if not (unit := self.grid_unit):
            return None
        _, height, width = self.image_size
        return height // unit * self.merge, width // unit * self.merge

    @property
    def grid_unit(self) -> int:
        """Pixels per side of the patches that become one token, for models that take a list; 0 for the others."""
        patch = getattr(self.vision, "patch_size", None)
        return patch * self.merge if "image_grid_thw" in self.parameters and isinstance(patch, int) else 0

    @property
    def takes_whole_images(self) -> bool:
        """True if the encoder takes images of any size whole, beside their sizes (Pixtral)."""
        return getattr(self.vision, "model_type", "") == "pixtral"

    @property
    def joins_images(self) -> bool:
        """True if the images of all samples of a batch stand in one row, so that each may have several."""
        is_nested = "pixel_attention_mask" in self.parameters or "aspect_ratio_ids" in self.parameters
        several = self.images > 1 or (self.layout.rows > 0 and not self.pinpoints)
        return self.grid is not None or (several and not is_nested)

    @property
    def placeholders(self) -> int:
        """Number of tokens of a sample that the model replaces by parts of its images and recordings."""
        return self.images * self.image_tokens + self.audio_tokens

    @property
    def merge(self) -> int:
        """Patches per side that are merged into one token."""
        if isinstance(ratio := getattr(self.vision, "pixel_shuffle_ratio", None), float):
            return round(1 / ratio)  # Llama 4
        found = (getattr(place, name, None) for name in _MERGES for place in (self.config, self.vision))
        return next((count for count in found if isinstance(count, int)), 1)

    @property
    def _reduced_patches(self) -> int:
        """Tokens of an image, one for each patch or square of merged patches; 0 if there is no size of patches."""
        if self.grid is not None:
            return self.grid[0] * self.grid[1] // self.merge**2
        _, height, width = self.image_size
        if self._is_florence:  # one token for each patch of the last stage, and their mean
            stride = math.prod(self.vision.patch_stride)
            return 1 + (height // stride) * (width // stride)
        patch = getattr(self.vision, "patch_size", None)
        if not isinstance(patch, int):
            return 0
        return (height // patch // self.merge) * (width // patch // self.merge)


_DETECTORS = ("ObjectDetection", "InstanceSegmentation", "UniversalSegmentation", "DetrForSegmentation")

_SHRUNK_FROM = 1.1
"""From this many times as wide on, OneVision shrinks the patches of an image."""

_SIZES = ("image_size", "input_size", "crop_size")
"""Names that configurations use for the size of an image."""

_IMAGE_TOKENS = (
    "image_seq_length",
    "mm_tokens_per_image",
    "num_image_tokens",
    "num_query_tokens",
    "resampler_n_latents",
)
"""Names that configurations use for the number of tokens per image."""

_MERGES = ("spatial_merge_size", "downsample_factor", "scale_factor")
"""Names that configurations use for the number of patches per side that become one token."""


def shape_of(model: nn.Module, lengths: Lengths, data: DataSpec | None = None) -> Shape:
    """Return the ``Shape`` of ``model``; raise ``WorkloadError`` if it has no configuration."""
    inner = unwrap(model)
    config = getattr(inner, "config", None)
    if config is None:
        raise WorkloadError(
            f"data.factory: {type(inner).__name__} has no configuration from which a batch could be made: "
            "name a function that makes it",
            key="data.factory",
        )
    parameters = frozenset(inspect.signature(inner.forward).parameters)
    main_input = getattr(inner, "main_input_name", "input_ids")
    images, size = (1, None) if data is None else (data.images or 1, data.image_height_width)
    limits, pixels = (None, None) if data is None else (data.image_limits, data.image_pixels)
    return Shape(type(inner).__name__, config, parameters, main_input, lengths, images, size, limits, pixels)


def cannot_make(shape: Shape, what: str) -> WorkloadError:
    """Return the error of a model that needs something in its batch that only the user can make."""
    return WorkloadError(
        f"data.factory: trainatomy cannot make the {what} of {shape.class_name}: name a function that makes the batch",
        key="data.factory",
    )


def refuse_unused_lengths(data: DataSpec, shape: Shape) -> None:
    """Raise ``WorkloadError`` for a length that the samples of this model do not have."""
    unused = {
        "sequence_length": data.sequence_length is not None and not (shape.has_text or shape.has_target),
        "target_length": data.target_length is not None and not shape.has_target,
    }
    meaning = {"sequence_length": "reads no text", "target_length": "has no decoder with a length of its own"}
    for name, is_unused in unused.items():
        if is_unused:
            key = f"data.{name}"
            raise WorkloadError(f"{key}: {shape.class_name} {meaning[name]}: leave it out", key=key)


def refuse_unused_images(data: DataSpec, shape: Shape) -> None:
    """Raise ``WorkloadError`` for images that the samples of this model do not have."""
    of_images = data.lengths is not None and data.lengths.kind == "images"
    keys = (*(("lengths",) if of_images else ()), "image_size", "images", "image_limits")
    given = [name for name in keys if getattr(data, name) is not None]
    if not given:
        return
    key = f"data.{given[0]}"
    if not any(name in shape.parameters for name in ("pixel_values", "pixel_values_videos")):
        raise WorkloadError(f"{key}: {shape.class_name} takes no images: leave it out", key=key)
    if data.image_limits is not None and not has_limits(shape):
        message = f"the processor of {shape.class_name} has no limits that are known here: leave it out"
        raise WorkloadError(f"data.image_limits: {message}", key="data.image_limits")
    kind = str(getattr(shape.config, "model_type", ""))
    if shape.images > 1 and (kind not in SEVERAL or not shape.image_token):
        message = f"data.images: batches of {shape.class_name} are made with one image for each sample"
        raise WorkloadError(f"{message}: leave it out, or name a function that makes the batch", key="data.images")


_MEDIA = ("pixel_values", "input_features", "input_values")
"""Beginnings of the names of arguments for images and recordings."""


def refuse_varying_lengths(data: DataSpec, shape: Shape) -> None:
    """Raise ``WorkloadError`` where batches of different lengths cannot be made for a model."""
    if shape.main_input != "input_ids" or any(name.startswith(_MEDIA) for name in shape.parameters):
        raise _no_lengths(
            f"{shape.class_name} reads images or audio: give sizes in pixels (`480x640`) or seconds (`12.5s`), or "
            "predict the largest sample (data.sequence_length, data.images, data.image_size)"
        )
    if shape.is_encoder_decoder and data.target_length is None:
        raise _no_lengths(
            f"those of the decoder of {shape.class_name} are not simulated: give all targets one data.target_length"
        )
    is_causal = "CausalLM" in shape.class_name or "LMHead" in shape.class_name
    if data.padding_free and not (is_causal and "position_ids" in shape.parameters):
        key = "data.padding_free"
        raise WorkloadError(f"{key}: {shape.class_name} is no causal language model with position_ids", key=key)


def refuse_packed_images(data: DataSpec, shape: Shape) -> None:
    """Raise ``WorkloadError`` for packs of samples of which each has images or a recording of its own."""
    if data.packing and any(name.startswith(_MEDIA) for name in shape.parameters):
        message = f"data.packing: packs of {shape.class_name} would hold the images or recordings of several samples"
        raise WorkloadError(f"{message}, which is not simulated: leave it out", key="data.packing")


def _no_lengths(message: str) -> WorkloadError:
    return WorkloadError(f"data.lengths: {message}", key="data.lengths")


def image_size(config: Any, otherwise: int = 224) -> tuple[int, int, int]:
    """Return ``C, H, W``; ``otherwise`` is the side if the configuration names none."""
    named = (getattr(config, name, None) for name in _SIZES)
    size = next(filter(None, named), otherwise)
    if isinstance(size, dict):
        size = (size["height"], size["width"])
    height, width = size if isinstance(size, list | tuple) else (size, size)
    return getattr(config, "num_channels", 3), height, width


class Throughput(NamedTuple):
    """Rates of a training; ``None`` if no step was timed, tokens also if samples are not text."""

    samples_per_second: float | None
    tokens_per_second: float | None


def samples_per_step(workload: Workload) -> int:
    """Return the samples of one optimizer step, or of one forward in inference."""
    micro_steps = 1 if workload.mode != "training" else workload.train.gradient_accumulation_steps
    return workload.batch_size * micro_steps


def tokens_per_sample(workload: Workload, model: nn.Module) -> int | None:
    """Return the tokens of the text and of the decoder, if there is one; of samples that differ in length, the mean.

    A pair of answers counts twice.
    ``None`` if samples are not text or come from a function of the user's.
    """
    if workload.data.factory is not None or workload.data.varying_media or not hasattr(unwrap(model), "config"):
        return None
    shape = shape_of(model, lengths(workload, unwrap(model)), workload.data)
    sequences = sequences_of(workload)
    if shape.main_input != "input_ids":
        return None
    if workload.data.lengths is not None and not workload.data.packing:
        mean = round(fmean(sample_lengths(workload)))
        return sequences * shape.choices * mean + (shape.lengths.target if shape.is_encoder_decoder else 0)
    length = batching_of(workload).tokens_of_row(shape.lengths.sequence)
    return sequences * shape.choices * (shape.lengths.placeholders + length) + (
        shape.lengths.target if shape.is_encoder_decoder else 0
    )


def throughput(workload: Workload, tokens: int | None, step_seconds: float | None) -> Throughput:
    """Return the rates of a training whose steps take ``step_seconds`` and whose samples have ``tokens`` tokens."""
    if not step_seconds:
        return Throughput(None, None)
    samples = samples_per_step(workload) / step_seconds
    return Throughput(samples, None if tokens is None else samples * tokens)
