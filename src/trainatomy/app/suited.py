"""Values that suit a model and a GPU: the precision that it computes fastest, the lengths that the model reads."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from trainatomy.catalog.architectures import architecture
from trainatomy.catalog.gpus import find_gpu
from trainatomy.errors import WorkloadError

Precision = Literal["fp32", "bf16", "fp16"]
USUAL_LENGTH = 512
LONGEST = 32_768
"""End of the slider for models with more positions."""
UNKNOWN = 8192
"""End of the slider for models whose positions are not known."""
_POSITIONS = ("max_position_embeddings", "n_positions", "n_ctx")
_AFTER_PADDING = ("roberta", "xlm-roberta", "camembert")
"""Types of models whose table of positions begins after that of the padding token."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """The lengths of samples that a model reads.

    Attributes:
        usual: The one to begin with; 0 where the model reads no text.
        most: The longest one of the slider.
    """

    usual: int = USUAL_LENGTH
    most: int = UNKNOWN

    @property
    def has_text(self) -> bool:
        return self.usual > 0


def precision_of(gpu: str) -> Precision:
    """Return the precision to begin with: bf16 where the GPU computes with it, else fp16, else fp32."""
    try:
        rates = find_gpu(gpu).rates
    except WorkloadError:
        return "bf16"
    return "bf16" if "bf16" in rates else "fp16" if "fp16" in rates else "fp32"


def lengths_of(model: str, config: str) -> Lengths:
    """Return the lengths of a model by its configuration: the pasted one, or one that ships; else the usual ones."""
    values = _configuration(model, config)
    if values is None:
        return Lengths()
    is_of_images = "image_size" in values or "num_channels" in values
    if is_of_images and "vocab_size" not in values and "text_config" not in values:
        return Lengths(0)
    positions = next((values[key] for key in _POSITIONS if isinstance(values.get(key), int)), UNKNOWN)
    if values.get("model_type") in _AFTER_PADDING:
        padding = values.get("pad_token_id", 1)
        positions -= (padding if isinstance(padding, int) else 1) + 1
    most = max(1, min(positions, LONGEST))
    return Lengths(min(USUAL_LENGTH, most), most)


def _configuration(model: str, config: str) -> Mapping[str, Any] | None:
    if config.strip():
        try:
            found = json.loads(config)
        except (ValueError, RecursionError):
            return None
        return found if isinstance(found, dict) else None
    shipped = architecture(model)
    return shipped.config if shipped is not None else None
