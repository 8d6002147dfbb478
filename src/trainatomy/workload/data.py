"""The batch of a workload."""

from __future__ import annotations

from pydantic import Field

from trainatomy.workload.factory import Factory  # pydantic reads annotations when it runs
from trainatomy.workload.section import Count, Problem, Section

DEFAULT_SEQUENCE_LENGTH = 512
"""Tokens in a sample where the workload does not say; a model with fewer positions gets what it has."""


class DataSpec(Section):
    """What one sample looks like.  Images and audio follow the model's configuration."""

    sequence_length: Count | None = Field(
        default=None,
        description="tokens in a sample of text; without it, "
        f"{DEFAULT_SEQUENCE_LENGTH}, or the model's positions where it has fewer",
    )
    target_length: Count | None = Field(
        default=None, description="tokens of the decoder in an encoder-decoder; without it, `sequence_length`"
    )
    attention_mask: bool = Field(
        default=False, description="the batch has an attention mask (all ones), as a tokenizer returns it"
    )
    padding: bool = Field(
        default=False, description="samples are padded, so that the mask has zeros and attention cannot ignore it"
    )
    factory: Factory | None = Field(
        default=None,
        description="`package.module:batch` or `path/to/file.py:batch`, a function that takes the batch size "
        "and returns a dict of tensors",
    )

    @property
    def has_mask(self) -> bool:
        """Whether the batch carries an attention mask: padded samples always do."""
        return self.attention_mask or self.padding

    def contradictions(self) -> list[Problem]:
        """A factory decides alone what a batch holds."""
        if self.factory is None:
            return []
        decided = {
            "sequence_length": self.sequence_length is not None,
            "target_length": self.target_length is not None,
            "attention_mask": self.attention_mask,
            "padding": self.padding,
        }
        return [
            Problem((key,), "cannot stand beside `factory`, which makes the batch itself")
            for key, given in decided.items()
            if given
        ]
