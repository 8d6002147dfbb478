"""The batch of a workload: the ``data`` section."""

from __future__ import annotations

import re
from typing import Any, Literal

from pydantic import Field, field_validator

from trainatomy.workload.factory import Factory  # pydantic reads annotations when it runs
from trainatomy.workload.lengths import LengthsSpec
from trainatomy.workload.section import Count, Problem, Section, Settings

DEFAULT_SEQUENCE_LENGTH = 512
"""Tokens in a sample unless the workload says otherwise; a model with fewer positions gets as many as it has."""
PREDICTED_IDS = "trainatomy.training.evaluation:predicted_ids"
"""A ``preprocess_logits_for_metrics`` that keeps the id with the largest logit."""


class DataSpec(Section):
    """The shape of one sample. Recordings follow the model's configuration, and images unless they are described."""

    sequence_length: Count | None = Field(
        default=None,
        description="tokens in a sample, with those that stand for its images and recordings, as `max_length` counts "
        f"(default: {DEFAULT_SEQUENCE_LENGTH} of text, or the model's maximum if smaller)",
    )
    target_length: Count | None = Field(
        default=None,
        description="tokens on the decoder side of an encoder-decoder (default: `sequence_length`), or of a transcript "
        "(default: what is spoken in 10 seconds, 150 letters or 35 word pieces)",
    )
    prompt_length: Count | None = Field(
        default=None,
        description="with `loop: sft`, `dpo`, `kto` and `preference`: tokens of each sample that are its prompt and "
        "outside the loss (default of `sft` and `preference`: none, a text without a prompt)",
    )
    images: Count | None = Field(default=None, description="images of each sample, for models that see (default: 1)")
    image_size: Count | tuple[Count, Count] | None = Field(
        default=None,
        description="pixels of an image before the model's processor, which resizes it and cuts it into tiles: one "
        "number for a square, or `[height, width]` (`480x640` as a flag; default: a size that the model takes)",
    )
    image_limits: tuple[Count, Count] | None = Field(
        default=None,
        description="`[low, high]`: the limits to which the model's processor resizes images, where they are not its "
        "defaults: fewest and most pixels (Qwen-VL's `min_pixels` and `max_pixels`), fewest and most tiles (InternVL's "
        "`min_patches` and `max_patches`), or pixels of the shortest and the longest edge (detectors whose processors "
        "pad, such as DETR)",
    )
    image_pixels: tuple[Count, Count] | None = Field(
        default=None,
        description="`[fewest, most]` pixels to which images are scaled, in their proportions, before the model's "
        "processor gets them, as LLaMA-Factory does (`image_min_pixels`, `image_max_pixels`); of no effect without "
        "images",
    )
    float_dtype: Literal["float32", "bfloat16", "float16"] | None = Field(
        default=None,
        description="dtype of images and recordings in the batch (default: float32 under autocast, else that of the "
        "weights)",
    )
    attention_mask: bool = Field(
        default=False, description="include an attention mask of ones in the batch, as tokenizers do"
    )
    padding: bool | Literal["longest", "max_length"] = Field(
        default=False,
        description="pad the samples, so that the mask has zeros and attention cannot skip it; with `lengths`: to the "
        "`longest` of a batch (the default) or to `max_length`, which is `sequence_length`",
    )
    pad_to_multiple_of: Count | None = Field(
        default=None,
        description="round the length of a batch up to a multiple of this, with tokens that the mask leaves out",
    )
    packing: bool = Field(
        default=False, description="with `lengths`: join samples and cut them into packs of `sequence_length` tokens"
    )
    padding_free: bool = Field(
        default=False,
        description="with `lengths`: join the samples of a batch into one row, with `position_ids` instead of padding "
        "(`DataCollatorWithFlattening`)",
    )
    lengths: LengthsSpec | None = Field(default=None, description="lengths of the samples, where they differ")
    factory: Factory | None = Field(
        default=None,
        description="`package.module:batch` or `path/to/file.py:batch`: a function that takes the batch size "
        "and returns a dict of tensors",
    )
    factory_arguments: Settings = Field(
        default_factory=dict, description="further arguments of that function, by their names"
    )

    train_samples: Count | None = Field(
        default=None,
        description="samples of the data set, for how long the whole training takes (of `lengths`: `lengths.samples`)",
    )
    eval_samples: Count | None = Field(
        default=None,
        description="samples of one evaluation (default: two batches, or two rounds of `eval_accumulation_steps`)",
    )
    compute_metrics: bool | Factory = Field(
        default=False,
        description="gather logits and labels in evaluations, as a Trainer with `compute_metrics` does: `true`, or a "
        "reference to the function, which is called only with `batch_eval_metrics` (otherwise it works on the host)",
    )
    preprocess_logits_for_metrics: Factory | None = Field(
        default=None,
        description="reference to the Trainer's `preprocess_logits_for_metrics`, which reduces logits before they "
        "are gathered",
    )

    def contradictions(self) -> list[Problem]:
        """Refuse limits of images of which the first is above the second."""
        limits = {"image_limits": self.image_limits, "image_pixels": self.image_pixels}
        return [
            Problem((name,), f"begins with {given[0]}, above {given[1]}: give the smaller one first")
            for name, given in limits.items()
            if given is not None and given[0] > given[1]
        ]

    @property
    def has_mask(self) -> bool:
        """Return whether the batch has an attention mask; padded samples always do."""
        is_padded = bool(self.padding) or self.pad_to_multiple_of is not None
        return self.attention_mask or is_padded or (self.varies and not self.padding_free)

    def rounded_up(self, length: int) -> int:
        """Return the length of a batch whose longest sample has this many tokens."""
        multiple = self.pad_to_multiple_of or 1
        return -(-length // multiple) * multiple

    @property
    def varies(self) -> bool:
        """Return whether the batches of an epoch have different lengths."""
        return self.lengths is not None and not self.packing and self.padding != "max_length"

    @property
    def varying_media(self) -> bool:
        """Return whether the images or recordings of samples differ in size."""
        return self.lengths is not None and self.lengths.kind != "tokens"

    @property
    def image_height_width(self) -> tuple[int, int] | None:
        """Return the height and width of an image, if they are given."""
        size = self.image_size
        return (size, size) if isinstance(size, int) else size

    @field_validator("image_size", "image_limits", "image_pixels", mode="before")
    @classmethod
    def _two_numbers(cls, value: Any) -> Any:
        """Read the texts of a command line: ``480x640``, ``480,640`` or ``[480, 640]``."""
        if isinstance(value, str):
            value = [part.strip() for part in re.split("[x×,]", value.strip("[]()"))]
        return value[0] if isinstance(value, list | tuple) and len(value) == 1 else value

    @field_validator("padding", mode="before")
    @classmethod
    def _padding(cls, value: Any) -> Any:
        """Read the texts of a command line; ``true`` is what tokenizers call ``longest``."""
        return {"true": True, "false": False}.get(value.lower(), value) if isinstance(value, str) else value
