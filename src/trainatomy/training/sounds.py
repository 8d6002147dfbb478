"""Draw the recording of one sample: float32 in the layout that the model's configuration implies.

Shape suffixes: M mel bins, F frames.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from trainatomy.training.positions import writes_transcripts
from trainatomy.training.shape import Shape, cannot_make

CLAP_FRAMES = 1001
"""Frames of CLAP's spectrogram: 10 seconds at 48 kHz with a hop of 480 samples (``ClapFeatureExtractor``)."""

FRAMES = 1000
"""Frames of a spectrogram of 10 seconds."""


def has_assumed_length(shape: Shape, name: str) -> bool:
    """Return whether a recording has 10 seconds because neither the model nor the user says how long it is."""
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
        raise cannot_make(shape, "input_features")
    if audio is not None and not shape.audio_tokens:
        raise cannot_make(shape, "input_features and the tokens that they replace")
    return torch.rand((hears.num_mel_bins, 2 * hears.max_source_positions), generator=generator)


def draw_waveform(shape: Shape, generator: torch.Generator) -> Tensor:
    """Return 10 seconds of a waveform at 16 kHz, ``[samples]`` float32, or a spectrogram ``[F, M]``.

    A configuration with ``num_mel_bins`` and ``max_length`` asks for a spectrogram.
    """
    if hasattr(shape.config, "num_mel_bins") and isinstance(getattr(shape.config, "max_length", None), int):
        return torch.rand((shape.config.max_length, shape.config.num_mel_bins), generator=generator)
    return torch.rand((160_000,), generator=generator)


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
