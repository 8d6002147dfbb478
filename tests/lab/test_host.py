"""The cases of lab/host: drawn the same each time, and predicted as what they are."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import host_compare
import pytest
from host_cases import draw

MIB = 1 << 20


def test_a_draw_depends_on_its_seed_alone() -> None:
    assert draw(5, 7) == draw(5, 7) != draw(5, 8)


@pytest.mark.parametrize("place", ["cpu", "away"])
def test_what_would_be_on_the_gpu_is_counted_on_the_cpu_only(place: str, tmp_path: Path) -> None:
    from transformers import BertConfig

    case = next(case for case in draw(40, 7) if case.model.startswith("Bert") and case.saves)
    config = {**case.config, "num_hidden_layers": 1, "hidden_size": 64, "num_attention_heads": 1, "vocab_size": 4000}
    BertConfig(**config, dtype="float32").save_pretrained(tmp_path)
    case = replace(case, place=place, config=config, objects=0)
    bill = host_compare.predicted(case, tmp_path)
    parts = {part.component for phase in bill.phases for process in phase.processes for part in process.parts}
    assert ("tensors" in parts) == (place == "cpu")
    assert ("checkpoint" in parts) == (place == "away")
    assert "cuda" not in parts or all(
        part.bytes == 0
        for phase in bill.phases
        for process in phase.processes
        for part in process.parts
        if part.component == "cuda"
    )
