"""What notes say of the GPU and the precision of a training."""

from __future__ import annotations

import pytest
from executed import simulated

from trainatomy.workload import Workload

GPT2 = {"class": "GPT2LMHeadModel", "config": {"n_layer": 1, "n_embd": 16, "n_head": 2, "vocab_size": 50}}


@pytest.mark.parametrize(
    ("gpu", "train", "dtype", "said"),
    [
        ("t4", {"bf16": True}, "float32", "no arithmetic units for bf16: its products are timed at the rate of fp32"),
        ("t4", {}, "bfloat16", "fp16 runs on its tensor cores"),
        ("k80", {"fp16": True}, "float32", "no arithmetic units for fp16"),
        ("t4", {"fp16": True}, "float32", None),
        ("a100", {"bf16": True}, "float32", None),
    ],
)
def test_a_precision_without_units_is_noted(gpu: str, train: dict[str, bool], dtype: str, said: str | None) -> None:
    described = {"model": {**GPT2, "dtype": dtype}, "data": {"sequence_length": 4}, "train": train, "gpu": gpu}
    notes = [note for note in simulated(Workload.from_mapping(described)).notes if "arithmetic units" in note]
    assert notes == [] if said is None else len(notes) == 1 and said in notes[0]
