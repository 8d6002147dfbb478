"""Page tables of pinned host memory, against what an H200 held outside of PyTorch's allocator."""

from __future__ import annotations

import pytest

from trainatomy.analysis.outside_allocator import page_table_bytes

MIB = 2**20


@pytest.mark.parametrize(
    ("pinned", "held"),
    [(0, 0), (192, 0), (384, 0), (4348, 8), (4380, 6), (6696, 12), (8151, 16), (10012, 18)],
    ids=["none", "checkpoints of GPT-2", "of Qwen", "BERT", "ViT", "GPT-2", "SFT less streams", "DPO less streams"],
)
def test_trainings_hold_what_was_measured(pinned: int, held: int) -> None:
    assert abs(page_table_bytes(pinned * MIB) - held * MIB) <= 2 * MIB
    assert page_table_bytes(pinned * MIB) % (2 * MIB) == 0
