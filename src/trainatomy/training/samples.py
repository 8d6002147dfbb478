"""Draw the inputs of one sample: random tensors on the CPU in the shapes that the model's configuration implies.

Shape suffixes: S input tokens, T decoder tokens, C channels, H × W pixels, M mel bins, F frames, I placeholder tokens
that the model replaces by an image.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from trainatomy.errors import WorkloadError
from trainatomy.training.shape import Shape, image_size

FIRST_TOKEN, LAST_TOKEN = 100, 30_000
"""Range of token ids, as in Hugging Face's guide; a smaller vocabulary limits it."""

PADDED_SHARE = 4
"""Tokens of a padded sample per token of padding."""

CLAP_FRAMES = 1001
"""Frames of CLAP's spectrogram: 10 seconds at 48 kHz with a hop of 480 samples (``ClapFeatureExtractor``)."""

FRAMES = 1000
"""Frames of a spectrogram of 10 seconds."""

PIX2STRUCT_PATCHES = 2048
"""Patches of an image, ``max_patches`` of ``Pix2StructImageProcessor``."""

Draw = Callable[[Shape, torch.Generator], Tensor]


def draw_tokens(config: Any, length: int, generator: torch.Generator) -> Tensor:
    """Return ``[length]`` int64 token ids; raise ``WorkloadError`` if the configuration has no vocabulary size.

    Models that hash characters read code points (CANINE).
    """
    if hasattr(config, "num_hash_functions") and not hasattr(config, "vocab_size"):
        return torch.randint(FIRST_TOKEN, sys.maxunicode, (length,), generator=generator)
    if not isinstance(getattr(config, "vocab_size", None), int):
        raise WorkloadError(
            f"data.factory: {type(config).__name__} has no vocab_size, so no batch can be made: "
            "name a function that makes it",
            key="data.factory",
        )
    vocabulary = int(config.vocab_size)
    first, last = (FIRST_TOKEN, min(LAST_TOKEN, vocabulary)) if vocabulary > FIRST_TOKEN else (0, vocabulary)
    return torch.randint(first, last, (length,), generator=generator)


def _input_ids(shape: Shape, generator: torch.Generator) -> Tensor:
    """Return token ids ``[S]``, or ``[I + S]`` with the placeholders of an image or a recording in front."""
    text = draw_tokens(shape.text, shape.lengths.sequence, generator)
    _separate(text, shape)
    for token, count in ((shape.image_token, shape.image_tokens), (shape.audio_token, shape.audio_tokens)):
        if count:
            assert token is not None
            text[text == token] = (token + 1) % int(shape.text.vocab_size)
            text = torch.cat([torch.full((count,), token), text])
    return text


def _question(shape: Shape, generator: torch.Generator) -> Tensor:
    """Return the token ids ``[S]`` of the instruction, in the vocabulary of the part that queries the image."""
    return draw_tokens(shape.config.qformer_config, shape.lengths.sequence, generator)


def _separate(text: Tensor, shape: Shape) -> None:
    """Write the separator tokens into ``text`` ``[S]`` that the model looks for.

    An encoder-decoder that classifies pools at the end-of-sequence token (BART); global attention covers the question,
    which a separator ends (Longformer).
    """
    length = len(text)
    marks: dict[str, tuple[int, ...]] = {}
    if shape.is_encoder_decoder and "SequenceClassification" in shape.class_name:
        marks["eos_token_id"] = (length - 1,)
    elif "global_attention_mask" in shape.parameters and ("QuestionAnswering" in shape.class_name or shape.choices > 1):
        marks["sep_token_id"] = (length // 4, length // 4 + 1, length - 1)
    for name, places in marks.items():
        token = getattr(shape.text, name, None)
        if isinstance(token, int):
            text[text == token] = (token + 1) % int(shape.text.vocab_size)
            text[list(places)] = token


def _boxes(shape: Shape, generator: torch.Generator) -> Tensor:
    """Return ``[S, 4]`` int64: each token's left, top, right and bottom on the page, in thousandths."""
    corners = torch.randint(0, 1000, (shape.lengths.sequence, 2, 2), generator=generator)
    return corners.sort(dim=1).values.flatten(1)


def _pixel_values(shape: Shape, generator: torch.Generator) -> Tensor:
    """Return ``[C, H, W]`` float32, or ``[F, C, H, W]`` for a video.

    If the configuration names no size it is 224 × 224 (ResNet, ConvNeXt), for a detector 640 × 640 (RT-DETR, YOLO).
    """
    if shape.grid is not None:
        return _patches(shape, generator)
    if "spatial_shapes" in shape.parameters:
        vision = shape.vision
        return torch.rand((vision.num_patches, vision.num_channels * vision.patch_size**2), generator=generator)
    if shape.tiles:
        return torch.rand((1 + shape.tiles**2, *image_size(shape.vision)), generator=generator)
    if "pixel_attention_mask" in shape.parameters:
        return torch.rand((1, *image_size(shape.vision)), generator=generator)  # Idefics: a list of images
    if "Video" in shape.class_name and hasattr(shape.config, "num_frames"):
        return _video(shape, generator)
    return torch.rand(image_size(shape.vision, 640 if shape.detects else 224), generator=generator)


def _video(shape: Shape, generator: torch.Generator) -> Tensor:
    """Return ``[F, C, H, W]`` float32: as many frames as the configuration names."""
    found = (getattr(shape.vision, name, None) for name in ("num_frames", "frames_per_clip"))
    frames = next((count for count in found if isinstance(count, int)), None)
    if frames is None:
        raise _unknown(shape, shape.main_input)
    return torch.rand((frames, *image_size(shape.vision)), generator=generator)


def _flattened_patches(shape: Shape, generator: torch.Generator) -> Tensor:
    """Return ``[patches, 2 + C · P · P]`` float32: each patch behind its row and column (Pix2Struct)."""
    patches = torch.rand((PIX2STRUCT_PATCHES, 2 + shape.vision.patch_embed_hidden_size), generator=generator)
    side = math.isqrt(len(patches))
    patches[:, 0] = torch.arange(len(patches)) // side
    patches[:, 1] = torch.arange(len(patches)) % side
    return patches


def _patches(shape: Shape, generator: torch.Generator) -> Tensor:
    """Return ``[patches, C · frames · P · P]`` float32: an image cut into patches, as by Qwen2-VL's processor."""
    assert shape.grid is not None
    vision = shape.vision
    found = (getattr(vision, name, None) for name in ("in_channels", "in_chans", "num_channels"))
    channels = next((count for count in found if isinstance(count, int)), 3)
    frames = getattr(vision, "temporal_patch_size", 1)
    return torch.rand((shape.grid[0] * shape.grid[1], channels * frames * vision.patch_size**2), generator=generator)


def _input_features(shape: Shape, generator: torch.Generator) -> Tensor:
    """Return a spectrogram, float32, in the layout of the model.

    Whisper takes ``[M, F]``; its encoder halves the frames, so F is twice its positions (3000: 30 seconds).
    Speech2Text (``input_feat_per_channel``) and encoders that convolve the frames (Parakeet, LASR) take ``[F, M]``,
    here 10 seconds of 100 frames each; models with ``feature_projection_input_dim`` take frames that are stacked by
    twos (Wav2Vec2-BERT, SeamlessM4T).  CLAP takes ``[1, F, M]``, or four views of a long recording with
    ``enable_fusion``.
    """
    config = shape.config
    if isinstance(stacked := getattr(config, "feature_projection_input_dim", None), int):
        return torch.rand((FRAMES // 2, stacked), generator=generator)
    encoder: Any = getattr(config, "encoder_config", None)
    if hasattr(encoder, "num_mel_bins") and not hasattr(encoder, "max_source_positions"):
        return torch.rand((FRAMES, encoder.num_mel_bins), generator=generator)
    audio: Any = getattr(config, "audio_config", None)
    if isinstance(getattr(audio, "spec_size", None), int):
        return torch.rand((4 if audio.enable_fusion else 1, CLAP_FRAMES, audio.num_mel_bins), generator=generator)
    if isinstance(getattr(config, "input_feat_per_channel", None), int):
        bins = config.input_feat_per_channel * getattr(config, "input_channels", 1)
        return torch.rand((min(FRAMES, config.max_source_positions), bins), generator=generator)
    hears = shape.audio
    if not hasattr(hears, "max_source_positions") or not hasattr(hears, "num_mel_bins"):
        raise _unknown(shape, "input_features")
    if audio is not None and not shape.audio_tokens:
        raise _unknown(shape, "input_features and the tokens that they replace")
    return torch.rand((hears.num_mel_bins, 2 * hears.max_source_positions), generator=generator)


def _input_values(shape: Shape, generator: torch.Generator) -> Tensor:
    """Return 10 seconds of a waveform at 16 kHz, ``[samples]`` float32, or a spectrogram ``[F, M]``.

    A configuration with ``num_mel_bins`` and ``max_length`` asks for a spectrogram.
    """
    if hasattr(shape.config, "num_mel_bins") and isinstance(getattr(shape.config, "max_length", None), int):
        return torch.rand((shape.config.max_length, shape.config.num_mel_bins), generator=generator)
    return torch.rand((160_000,), generator=generator)


def _past_values(shape: Shape, generator: torch.Generator) -> Tensor:
    """Return ``[context, channels]`` float32: the past of ``num_input_channels`` time series."""
    config = shape.config
    if not hasattr(config, "context_length") or not hasattr(config, "num_input_channels"):
        raise _unknown(shape, "past_values")
    return torch.rand((config.context_length, config.num_input_channels), generator=generator)


INPUTS: dict[str, Draw] = {
    "input_ids": _input_ids,
    "qformer_input_ids": _question,
    "pixel_values": _pixel_values,
    "pixel_values_videos": _video,
    "flattened_patches": _flattened_patches,
    "input_features": _input_features,
    "input_values": _input_values,
    "bbox": _boxes,
    "past_values": _past_values,
}
"""Functions that draw each known input, by the name of the model's argument."""


def _unknown(shape: Shape, name: str) -> WorkloadError:
    return WorkloadError(
        f"data.factory: trainatomy cannot make the {name} of {shape.class_name}: name a function that makes the batch",
        key="data.factory",
    )


def draw_inputs(shape: Shape, generator: torch.Generator) -> dict[str, Tensor]:
    """Return the inputs of one sample.

    These are the model's main input and the others of ``INPUTS`` if the model joins text with images or audio, or reads
    text from a page.  A multiple-choice model gets ``[choices, …]`` of each.
    """
    if not isinstance(shape.main_input, str) or shape.main_input not in INPUTS:
        raise _unknown(shape, shape.main_input)
    names = [shape.main_input]
    if _joins_text_and_images(shape):
        both = ("input_ids", "pixel_values", "qformer_input_ids")
        names += [name for name in both if name in shape.parameters and name not in names]
    if "input_features" in shape.parameters and hasattr(shape.config, "audio_config"):
        names += ["input_features"] if "input_features" not in names else []
    if "input_ids" in names and "bbox" in shape.parameters:
        names.append("bbox")
    if shape.choices > 1:
        return {name: torch.stack([INPUTS[name](shape, generator) for _ in range(shape.choices)]) for name in names}
    drawn = {name: INPUTS[name](shape, generator) for name in names}
    return {**drawn, **_grid(shape, drawn), **_heard(shape, drawn), **_token_types(shape)}


def _joins_text_and_images(shape: Shape) -> bool:
    """Return whether the configuration has parts for both, or a vocabulary beside a vision part or a patch size."""
    config = shape.config
    has_vision = hasattr(config, "vision_config")
    has_words = isinstance(getattr(config, "vocab_size", None), int)
    return (has_vision and (has_words or hasattr(config, "text_config"))) or (
        has_words and hasattr(config, "patch_size")
    )


def _grid(shape: Shape, drawn: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the size of the image as an input, if the model takes it.

    ``[1, 3]`` int64: frames, height and width in patches.  ``[2]`` int64: height and width in pixels, for a model that
    takes an image of any size whole and merges its patches (Mistral 3).
    """
    if "pixel_values" not in drawn:
        return {}
    if "spatial_shapes" in shape.parameters:
        side = math.isqrt(len(drawn["pixel_values"]))
        whole = torch.ones(len(drawn["pixel_values"]), dtype=torch.long)
        return {"pixel_attention_mask": whole, "spatial_shapes": torch.tensor([side, side])}
    if shape.tiles:
        _, height, width = image_size(shape.vision)
        return {"image_sizes": torch.tensor([shape.tiles * height, shape.tiles * width])}
    if "image_sizes" in shape.parameters and shape.merge > 1:
        return {"image_sizes": torch.tensor(drawn["pixel_values"].shape[-2:])}
    if shape.grid is None:
        return {}
    _check_width(shape)
    return {"image_grid_thw": torch.tensor([[1, *shape.grid]])}


def _heard(shape: Shape, drawn: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return ``[F]`` int64 ones, the frames that are not padding, for models that ask for them."""
    if "input_features" not in drawn:
        return {}
    if shape.audio_tokens and "feature_attention_mask" in shape.parameters:
        return {"feature_attention_mask": torch.ones(drawn["input_features"].shape[-1], dtype=torch.long)}
    if "ForCTC" in shape.class_name and hasattr(shape.config, "encoder_config"):  # they count the frames of the mask
        return {"attention_mask": torch.ones(len(drawn["input_features"]), dtype=torch.long)}
    return {}


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


def _token_types(shape: Shape) -> dict[str, Tensor]:
    """Return ``[I + S]`` int64, 1 for the image's tokens, for models that require it in training."""
    if not shape.image_tokens:
        return {}
    kinds = torch.zeros(shape.image_tokens + shape.lengths.sequence, dtype=torch.long)
    kinds[: shape.image_tokens] = 1
    return {name: kinds.clone() for name in ("token_type_ids", "mm_token_type_ids") if name in shape.parameters}
