"""Rules by which samples become batches: those of ``data``, or of ``trl`` for TRL's trainers."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd
from typing import TYPE_CHECKING

from trainatomy.workload.loops import loop_of
from trainatomy.workload.preference import is_of_preferences
from trainatomy.workload.sentence_transformers import sequences_of
from trainatomy.workload.trl import max_length, packing_strategy

if TYPE_CHECKING:
    from trainatomy.workload.schema import Workload


@dataclass(frozen=True, slots=True)
class Batching:
    """Rules by which samples that differ in length become batches.

    Attributes:
        cut_to: Tokens to which longer samples are cut, None if they are not.
        at_most: Tokens beyond which samples are left out, None if none are.
        multiple: The length of a batch is rounded up to a multiple of this.
        is_joined: Whether the samples of a batch lie behind each other in one row.
        packs: TRL's strategy for packing samples into rows, None without packing.
        pack_length: Tokens that a pack holds at most.
        prompt: Tokens at the beginning of each sample that are outside the loss, where a step depends on the number of
            tokens: only those in the loss have logits (TRL), or attention takes the padding out (FlashAttention 2).
            None where it depends on the shape of its batch alone.
        sequences: Sequences of a sample in the batch.
    """

    cut_to: int | None
    at_most: int | None = None
    multiple: int = 1
    is_joined: bool = False
    packs: str | None = None
    pack_length: int = 0
    prompt: int | None = None
    sequences: int = 1

    def tokens_of_row(self, length: int) -> int:
        """Return the tokens in a row of samples of one length: TRL cuts them, or packs several into a row."""
        cut = min(length, self.cut_to or length)
        if self.packs is None:
            return cut
        if self.packs == "wrapped" or cut > self.pack_length:
            return self.pack_length
        return self.pack_length // cut * cut

    def samples_of(self, rows: int, length: int) -> int:
        """Return how many samples of one length fill these rows, and none in part where samples are cut anywhere."""
        if self.packs == "wrapped":
            together = self.pack_length // gcd(self.pack_length, length)
            return -(-rows * self.pack_length // (length * together)) * together
        return rows * max(1, self.tokens_of_row(length) // length)

    def rounded_up(self, length: int) -> int:
        """Return the length that a batch of this length is padded to."""
        return -(-length // self.multiple) * self.multiple


def batching_of(workload: Workload) -> Batching:
    """Return how a workload's samples become batches."""
    data = workload.data
    if loop_of(workload).settings is not None:
        return _of_trl(workload)
    fixed = workload.preference.framework.multiple if is_of_preferences(workload) else 1
    return Batching(
        data.sequence_length,
        multiple=data.pad_to_multiple_of or fixed,
        is_joined=data.padding_free,
        prompt=0 if _takes_padding_out(workload) and not data.padding_free else None,
    )


def _takes_padding_out(workload: Workload) -> bool:
    """Return whether attention gathers the tokens of padded samples (transformers' ``_upad_input``)."""
    return workload.model.attn_implementation == "flash_attention_2"


def _of_trl(workload: Workload) -> Batching:
    """Return how TRL's trainer makes batches: from its settings, and the prompts that ``data`` describes."""
    cut_to, longest, packs = workload.data.sequence_length, max_length(workload), packing_strategy(workload)
    prompt = workload.data.prompt_length or 0
    if workload.loop == "sft" and not workload.trl.get("completion_only_loss", True):
        prompt = 0
    if workload.loop != "reward" and packs in (None, "bfd"):
        cut_to = min((each for each in (cut_to, longest) if each is not None), default=None)
    multiple = str(workload.trl.get("pad_to_multiple_of"))
    return Batching(
        cut_to,
        at_most=longest if workload.loop == "reward" else None,
        multiple=int(multiple) if multiple.isdigit() else 1,  # None and "auto" pad to no multiple on a GPU
        is_joined=bool(workload.trl.get("padding_free")) or packs in ("bfd", "bfd_split"),
        packs=packs,
        pack_length=longest or 0,
        prompt=None if workload.loop == "reward" and not _takes_padding_out(workload) else prompt,
        sequences=sequences_of(workload),
    )
