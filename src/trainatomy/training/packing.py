"""Packs of samples, made by TRL's own function (``trl.pack_dataset``)."""

from __future__ import annotations

from collections.abc import Sequence


def packs(lengths: Sequence[int], size: int, strategy: str) -> list[tuple[int, ...]]:
    """Return the tokens of each document in each pack.

    Args:
        lengths: Tokens of each sample, in order.
        size: Tokens that a pack holds at most.
        strategy: TRL's ``packing_strategy``. With ``wrapped``, which ignores where samples end, a pack is one document.
    """
    from datasets import Dataset
    from trl import pack_dataset

    from trainatomy.training.trl import quiet_trl

    with quiet_trl():
        packed = pack_dataset(Dataset.from_dict({"input_ids": [[0] * length for length in lengths]}), size, strategy)
    if "seq_lengths" in packed.column_names:
        return [tuple(documents) for documents in packed["seq_lengths"]]
    return [(len(ids),) for ids in packed["input_ids"]]
