"""The batch of a workload: the ``data`` section."""

from __future__ import annotations

from pydantic import Field

from trainatomy.workload.factory import Factory  # pydantic reads annotations when it runs
from trainatomy.workload.section import Count, Problem, Section

DEFAULT_SEQUENCE_LENGTH = 512
"""Tokens in a sample unless the workload says otherwise; a model with fewer positions gets as many as it has."""


class DataSpec(Section):
    """The shape of one sample. Images and audio follow the model's configuration."""

    sequence_length: Count | None = Field(
        default=None,
        description=f"tokens in a text sample (default: {DEFAULT_SEQUENCE_LENGTH}, or the model's maximum if smaller)",
    )
    target_length: Count | None = Field(
        default=None, description="tokens on the decoder side of an encoder-decoder (default: `sequence_length`)"
    )
    attention_mask: bool = Field(
        default=False, description="include an attention mask of ones in the batch, as tokenizers do"
    )
    padding: bool = Field(
        default=False, description="pad the samples, so that the mask has zeros and attention cannot skip it"
    )
    factory: Factory | None = Field(
        default=None,
        description="`package.module:batch` or `path/to/file.py:batch`: a function that takes the batch size "
        "and returns a dict of tensors",
    )

    eval_samples: Count | None = Field(
        default=None,
        description="samples of one evaluation (default: two batches, or two rounds of `eval_accumulation_steps`)",
    )
    compute_metrics: bool | Factory = Field(
        default=False,
        description="evaluation gathers logits and labels, as a Trainer with `compute_metrics` does: `true`, or the "
        "reference of the function, which is called with `batch_eval_metrics` only: otherwise it works on the host",
    )
    preprocess_logits_for_metrics: Factory | None = Field(
        default=None,
        description="reference of the Trainer's `preprocess_logits_for_metrics`, which reduces logits before they "
        "are gathered",
    )

    @property
    def has_mask(self) -> bool:
        """Return whether the batch has an attention mask; padded samples always do."""
        return self.attention_mask or self.padding

    def contradictions(self) -> list[Problem]:
        """Refuse other keys beside a factory, which makes the whole batch."""
        if self.factory is None:
            return []
        is_set = {
            "sequence_length": self.sequence_length is not None,
            "target_length": self.target_length is not None,
            "attention_mask": self.attention_mask,
            "padding": self.padding,
        }
        return [
            Problem((key,), "cannot be combined with `factory`, which makes the batch")
            for key, present in is_set.items()
            if present
        ]
