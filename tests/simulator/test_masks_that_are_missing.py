"""The note where equal lengths decide that attention stores all its scores."""

from __future__ import annotations

from typing import Any

import pytest
from executed import simulated

from trainatomy.results.prediction import LeadingNote
from trainatomy.workload import Workload

SIZES = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
QWEN = {"class": "Qwen2ForCausalLM", "config": {**SIZES, "num_hidden_layers": 1, "vocab_size": 64}, "dtype": "float32"}


def noted(gpu: str = "a100-80gb", model: dict[str, Any] | None = None, **sections: Any) -> list[str]:
    train = {"per_device_train_batch_size": 2, **sections.pop("train", {})}
    data = {"sequence_length": 64, **sections.pop("data", {})}
    described = {"model": {**QWEN, **(model or {})}, "data": data, "train": train, "gpu": gpu, "steps": 1}
    described |= {"software": {"torch": "2.13"}, **sections}
    notes = simulated(Workload.from_mapping(described)).notes
    return [note for note in notes if isinstance(note, LeadingNote) and "stores all its scores" in note]


def test_samples_of_equal_length_have_no_mask() -> None:
    assert "data.padding: true or data.lengths" in noted()[0]
    assert noted("t4", train={"fp16": True})
    assert noted(data={"attention_mask": True}), "a mask of ones is left out"
    assert noted(data={"padding": True}) == []
    assert noted(software={"torch": "2.14"}) == [], "its memory-efficient kernel takes grouped queries"


@pytest.mark.parametrize(
    "other",
    [
        {"train": {"bf16": True}},
        {"model": {"config": {**QWEN["config"], "num_key_value_heads": 4}}},
        {"model": {"attn_implementation": "eager"}},
    ],
    ids=["fused", "not grouped", "eager"],
)
def test_where_a_mask_changes_nothing_there_is_no_note(other: dict[str, Any]) -> None:
    assert noted(**other) == []
