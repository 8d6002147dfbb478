"""What one sample of a model holds: random tensors on the CPU, in the shapes that its configuration implies.

Shape suffixes: S tokens of the input, T tokens of the decoder, C channels, H × W pixels, M mel bins, F frames.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from trainatomy.errors import WorkloadError
from trainatomy.training.model import unwrap

if TYPE_CHECKING:
    from trainatomy.training.positions import Lengths

FIRST_TOKEN, LAST_TOKEN = 100, 30_000
"""The guide draws its tokens from this range; a smaller vocabulary bounds it."""

PADDED_SHARE = 4
"""Of a padded sample, one token in so many is padding."""

Draw = Callable[["Shape", torch.Generator], Tensor]


@dataclass(frozen=True)
class Shape:
    """What a sample depends on: the model's class and configuration, and the lengths."""

    class_name: str
    config: Any
    parameters: frozenset[str]
    main_input: str
    lengths: Lengths

    @property
    def text(self) -> Any:
        """The configuration of the text part, where a model has several."""
        return getattr(self.config, "text_config", None) or self.config

    @property
    def vision(self) -> Any:
        """The configuration of the vision part, where a model has several."""
        return getattr(self.config, "vision_config", None) or self.config

    @property
    def is_encoder_decoder(self) -> bool:
        """Whether labels belong to a decoder with a length of its own."""
        return bool(getattr(self.config, "is_encoder_decoder", False))


def shape_of(model: nn.Module, lengths: Lengths) -> Shape:
    """Read off ``model`` what its samples depend on; raises ``WorkloadError`` where it has no configuration."""
    inner = unwrap(model)
    config = getattr(inner, "config", None)
    if config is None:
        raise WorkloadError(
            f"data.factory: {type(inner).__name__} has no configuration that says what its batches look like: "
            "name a function that makes one"
        )
    parameters = frozenset(inspect.signature(inner.forward).parameters)
    main_input = getattr(inner, "main_input_name", "input_ids")
    return Shape(type(inner).__name__, config, parameters, main_input, lengths)


def draw_tokens(config: Any, length: int, generator: torch.Generator) -> Tensor:
    """``[length]`` int64 token ids."""
    vocabulary = int(config.vocab_size)
    first, last = (FIRST_TOKEN, min(LAST_TOKEN, vocabulary)) if vocabulary > FIRST_TOKEN else (0, vocabulary)
    return torch.randint(first, last, (length,), generator=generator)


def _input_ids(shape: Shape, generator: torch.Generator) -> Tensor:
    return draw_tokens(shape.text, shape.lengths.sequence, generator)


def _pixel_values(shape: Shape, generator: torch.Generator) -> Tensor:
    """``[C, H, W]`` float32; 224 × 224 where the configuration leaves the size open (ResNet, ConvNeXt)."""
    config = shape.vision
    size = getattr(config, "image_size", None) or 224
    if isinstance(size, dict):
        size = (size["height"], size["width"])
    height, width = size if isinstance(size, list | tuple) else (size, size)
    return torch.rand((getattr(config, "num_channels", 3), height, width), generator=generator)


def _input_features(shape: Shape, generator: torch.Generator) -> Tensor:
    """``[M, F]`` float32: Whisper's encoder halves the frames, so that F is twice its positions (3000: 30 seconds)."""
    config = shape.config
    if not hasattr(config, "max_source_positions") or not hasattr(config, "num_mel_bins"):
        raise _unknown(shape, "input_features")
    return torch.rand((config.num_mel_bins, 2 * config.max_source_positions), generator=generator)


def _input_values(shape: Shape, generator: torch.Generator) -> Tensor:
    """``[samples]`` float32: 10 seconds of a waveform at 16 kHz."""
    return torch.rand((160_000,), generator=generator)


INPUTS: dict[str, Draw] = {
    "input_ids": _input_ids,
    "pixel_values": _pixel_values,
    "input_features": _input_features,
    "input_values": _input_values,
}
"""How to draw each input that trainatomy knows."""


def _unknown(shape: Shape, name: str) -> WorkloadError:
    return WorkloadError(
        f"data.factory: trainatomy does not know what {name} of {shape.class_name} looks like: "
        "name a function that makes the batch"
    )


def draw_inputs(shape: Shape, generator: torch.Generator) -> dict[str, Tensor]:
    """The inputs of one sample: the model's main input, and the others of ``INPUTS`` where it joins text and images."""
    if shape.main_input not in INPUTS:
        raise _unknown(shape, shape.main_input)
    names = [shape.main_input]
    if hasattr(shape.config, "text_config") and hasattr(shape.config, "vision_config"):
        names += [name for name in ("input_ids", "pixel_values") if name in shape.parameters and name not in names]
    return {name: INPUTS[name](shape, generator) for name in names}
