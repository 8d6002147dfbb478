"""Draw the images and videos of one sample: float32 in the layout that the model's configuration implies.

Shape suffixes: C channels, H × W pixels, P × P pixels of a patch, F frames.

Draw the recording of one sample: float32 in the layout that the model's configuration implies.

Shape suffixes: M mel bins, F frames.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from trainatomy.errors import WorkloadError
from trainatomy.results.lengths import SAMPLING_RATE
from trainatomy.training.image_layout import tile_grids
from trainatomy.training.positions import writes_transcripts
from trainatomy.training.shape import Shape, cannot_make
from trainatomy.units import human_bytes

LARGEST_BATCH_BYTES = 2**30
"""Host memory of a batch; a larger one, which no GPU trains on, is one sample that stands for all of them."""

PIX2STRUCT_PATCHES = 2048
"""Patches of an image, ``max_patches`` of ``Pix2StructImageProcessor``."""

REGIONS = 36
"""Regions of an image, each described by a vector of a detector (LXMERT, Tan and Bansal 2019; VisualBERT)."""


def draw_image(shape: Shape, generator: torch.Generator) -> Tensor:
    """Return ``[C, H, W]`` float32, or ``[F, C, H, W]`` for a video."""
    _refuse_large(shape)
    if shape.grid is not None:
        return _patches(shape, generator)
    if "spatial_shapes" in shape.parameters:
        vision = shape.vision
        return torch.rand((vision.num_patches, vision.num_channels * vision.patch_size**2), generator=generator)
    count, views = shape.images, shape.layout.views
    if shape.pinpoints and shape.layout.rows:
        several = (count,) if count > 1 else ()
        return torch.rand((*several, views, *shape.image_size), generator=generator)
    if "aspect_ratio_ids" in shape.parameters:  # Llama 3.2 Vision: always as many tiles
        return torch.rand((count, shape.vision.max_num_tiles, *shape.image_size), generator=generator)
    if shape.joins_images or "pixel_attention_mask" in shape.parameters:  # Idefics: a list of images
        return torch.rand((count * views, *shape.image_size), generator=generator)
    if "Video" in shape.class_name and hasattr(shape.config, "num_frames"):
        return draw_video(shape, generator)
    return torch.rand(shape.image_size, generator=generator)


def _refuse_large(shape: Shape) -> None:
    """Refuse images that take more of the host's memory than a batch may."""
    size = shape.images * shape.layout.views * math.prod(shape.image_size) * torch.float32.itemsize
    if size > LARGEST_BATCH_BYTES:
        key = "data.image_size" if shape.images == 1 else "data.images"
        taken = f"the images of a sample take {human_bytes(size)} of host memory, more than the"
        raise WorkloadError(f"{key}: {taken} {human_bytes(LARGEST_BATCH_BYTES)} of a batch", key=key)


def draw_video(shape: Shape, generator: torch.Generator) -> Tensor:
    """Return ``[F, C, H, W]`` float32: as many frames as the configuration names."""
    found = (getattr(shape.vision, name, None) for name in ("num_frames", "frames_per_clip"))
    frames = next((count for count in found if isinstance(count, int)), None)
    if frames is None:
        raise cannot_make(shape, shape.main_input)
    return torch.rand((frames, *shape.image_size), generator=generator)


def draw_placed_patches(shape: Shape, generator: torch.Generator) -> Tensor:
    """Return ``[patches, 2 + C · P · P]`` float32: each patch behind its row and column (Pix2Struct)."""
    patches = torch.rand((PIX2STRUCT_PATCHES, 2 + shape.vision.patch_embed_hidden_size), generator=generator)
    side = math.isqrt(len(patches))
    patches[:, 0] = torch.arange(len(patches)) // side
    patches[:, 1] = torch.arange(len(patches)) % side
    return patches


def _patches(shape: Shape, generator: torch.Generator) -> Tensor:
    """Return ``[patches, C · frames · P · P]`` float32: an image cut into patches, as by Qwen2-VL's processor.

    PaddleOCR-VL takes ``[patches, C, P, P]``.
    """
    assert shape.grid is not None
    vision = shape.vision
    found = (getattr(vision, name, None) for name in ("in_channels", "in_chans", "num_channels"))
    channels = next((count for count in found if isinstance(count, int)), 3)
    count, side = shape.images * shape.grid[0] * shape.grid[1], vision.patch_size
    if "PaddleOCR" in shape.class_name:  # its processor leaves a patch as it lies in the image
        return torch.rand((count, channels, side, side), generator=generator)
    frames = getattr(vision, "temporal_patch_size", 1)
    return torch.rand((count, channels * frames * side**2), generator=generator)


def draw_regions(shape: Shape, generator: torch.Generator) -> Tensor:
    """Return ``[regions, features]`` float32: what a detector says of the regions of an image (LXMERT, VisualBERT)."""
    config = shape.config
    width = getattr(config, "visual_feat_dim", None) or config.visual_embedding_dim
    return torch.rand((REGIONS, width), generator=generator)


def draw_region_boxes(shape: Shape, generator: torch.Generator) -> Tensor:
    """Return ``[regions, 4]`` float32: the left, top, right and bottom of each region, as shares of the image."""
    corners = torch.rand((REGIONS, shape.config.visual_pos_dim // 2, 2), generator=generator)
    return corners.sort(dim=1).values.flatten(1)


def image_sizes(shape: Shape, drawn: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the sizes of the images as inputs, if the model takes them.

    ``[images, 3]`` int64: frames, height and width in patches.  ``[2]`` or ``[images, 2]`` int64: height and width in
    pixels, for a model that takes an image of any size whole and merges its patches (Mistral 3).
    """
    if "pixel_values" not in drawn:
        return {}
    if "spatial_shapes" in shape.parameters:
        side = math.isqrt(len(drawn["pixel_values"]))
        whole = torch.ones(len(drawn["pixel_values"]), dtype=torch.long)
        return {"pixel_attention_mask": whole, "spatial_shapes": torch.tensor([side, side])}
    of_each = drawn["pixel_values"].shape[:-3]
    if shape.pinpoints and shape.layout.rows:
        return {"image_sizes": torch.tensor(shape.original_size).repeat(*of_each[:-1], 1).view(*of_each[:-1], 2)}
    if "image_sizes" in shape.parameters and (shape.merge > 1 or shape.takes_whole_images):
        return {"image_sizes": torch.tensor(drawn["pixel_values"].shape[-2:]).repeat(*of_each, 1).view(*of_each, 2)}
    if "aspect_ratio_ids" in shape.parameters:
        return _tiles(shape)
    if shape.grid is None:
        return {}
    _check_width(shape)
    return {"image_grid_thw": torch.tensor([[1, *shape.grid]] * shape.images)}


def _tiles(shape: Shape) -> dict[str, Tensor]:
    """Return which tiles of Llama 3.2 Vision images fill, and that all text sees all of them.

    ``aspect_ratio_ids [images]``, ``aspect_ratio_mask [images, tiles]``, ``cross_attention_mask [S, images, tiles]``:
    int64.
    """
    grid = (max(shape.layout.rows, 1), max(shape.layout.columns, 1))
    filled = torch.zeros(shape.images, shape.vision.max_num_tiles, dtype=torch.long)
    filled[:, : math.prod(grid)] = 1
    text = shape.lengths.placeholders + shape.lengths.sequence
    return {
        "aspect_ratio_ids": torch.full((shape.images,), tile_grids(shape).index(grid) + 1),
        "aspect_ratio_mask": filled,
        "cross_attention_mask": filled.expand(text, *filled.shape).clone(),
    }


def _check_width(shape: Shape) -> None:
    """Refuse a vision part whose output does not have the width of the text part, as in Qwen2-VL's defaults."""
    if not str(getattr(shape.config, "model_type", "")).startswith("qwen"):
        return
    vision, name = shape.vision, "out_hidden_size"
    if not isinstance(getattr(vision, name, None), int) and hasattr(vision, "embed_dim"):
        name = "hidden_size"
    width, wanted = getattr(vision, name, None), getattr(shape.text, "hidden_size", None)
    if isinstance(width, int) and isinstance(wanted, int) and name in vars(vision) and width != wanted:
        key = f"model.config.vision_config.{name}"
        raise WorkloadError(f"{key}: {width} must equal the text part's hidden_size, {wanted}", key=key)


CLAP_FRAMES = 1001
"""Frames of CLAP's spectrogram: 10 seconds at 48 kHz with a hop of 480 samples (``ClapFeatureExtractor``)."""

FRAMES = 100
"""Frames of a spectrogram in a second."""


def has_assumed_length(shape: Shape, name: str) -> bool:
    """Return whether a recording may have any length, so that one of 10 seconds is assumed unless the user says."""
    config = shape.config
    if name == "input_values":
        return not (hasattr(config, "num_mel_bins") and isinstance(getattr(config, "max_length", None), int))
    encoder: Any = getattr(config, "encoder_config", None)
    convolves = hasattr(encoder, "num_mel_bins") and not hasattr(encoder, "max_source_positions")
    marks = ("feature_projection_input_dim", "input_feat_per_channel")
    return name == "input_features" and (
        convolves or any(isinstance(getattr(config, mark, None), int) for mark in marks)
    )


def draw_spectrogram(shape: Shape, generator: torch.Generator) -> Tensor:
    """Return a spectrogram, float32, in the layout of the model.

    Whisper takes ``[M, F]``; its encoder halves the frames, so F is twice its positions (3000: 30 seconds).
    Speech2Text (``input_feat_per_channel``) and encoders that convolve the frames (Parakeet, LASR) take ``[F, M]``,
    100 of them in a second; models with ``feature_projection_input_dim`` take frames that are stacked by
    twos (Wav2Vec2-BERT, SeamlessM4T).  CLAP takes ``[1, F, M]``, or four views of a long recording with
    ``enable_fusion``.
    """
    config, frames = shape.config, int(FRAMES * shape.seconds)
    if isinstance(stacked := getattr(config, "feature_projection_input_dim", None), int):
        return torch.rand((frames // 2, stacked), generator=generator)
    encoder: Any = getattr(config, "encoder_config", None)
    if hasattr(encoder, "num_mel_bins") and not hasattr(encoder, "max_source_positions"):
        return torch.rand((frames, encoder.num_mel_bins), generator=generator)
    audio: Any = getattr(config, "audio_config", None)
    if isinstance(getattr(audio, "spec_size", None), int):
        return torch.rand((4 if audio.enable_fusion else 1, CLAP_FRAMES, audio.num_mel_bins), generator=generator)
    if isinstance(getattr(config, "input_feat_per_channel", None), int):
        bins = config.input_feat_per_channel * getattr(config, "input_channels", 1)
        return torch.rand((min(frames, config.max_source_positions), bins), generator=generator)
    hears = shape.audio
    if not hasattr(hears, "max_source_positions") or not hasattr(hears, "num_mel_bins"):
        raise cannot_make(shape, "input_features")
    if audio is not None and not shape.audio_tokens:
        raise cannot_make(shape, "input_features and the tokens that they replace")
    return torch.rand((hears.num_mel_bins, 2 * hears.max_source_positions), generator=generator)


def draw_waveform(shape: Shape, generator: torch.Generator) -> Tensor:
    """Return a waveform at 16 kHz, ``[samples]`` float32, or a spectrogram ``[F, M]``.

    A configuration with ``num_mel_bins`` and ``max_length`` asks for a spectrogram.
    """
    if hasattr(shape.config, "num_mel_bins") and isinstance(getattr(shape.config, "max_length", None), int):
        return torch.rand((shape.config.max_length, shape.config.num_mel_bins), generator=generator)
    return torch.rand((round(shape.seconds * SAMPLING_RATE),), generator=generator)


def heard_frames(shape: Shape, drawn: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return ``[F]`` int64 ones, the frames that are not padding, for models that ask for them."""
    if "input_features" not in drawn:
        return {}
    if shape.audio_tokens and "feature_attention_mask" in shape.parameters:
        return {"feature_attention_mask": torch.ones(drawn["input_features"].shape[-1], dtype=torch.long)}
    if writes_transcripts(shape.class_name) and hasattr(
        shape.config, "encoder_config"
    ):  # they count the frames of the mask
        return {"attention_mask": torch.ones(len(drawn["input_features"]), dtype=torch.long)}
    return {}
