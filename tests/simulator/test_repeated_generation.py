"""Calls of ``generate()`` that repeat the one before are what execution writes."""

from __future__ import annotations

from typing import Any

import pytest

from trainatomy import Workload
from trainatomy.simulator.generation import RepeatedGeneration
from trainatomy.simulator.simulate import simulate

pytest.importorskip("trl")

CONFIG = {"n_layer": 3, "n_embd": 32, "n_head": 2, "vocab_size": 200}


@pytest.mark.parametrize("train", [{}, {"bf16": True, "gradient_accumulation_steps": 2}])
def test_the_calls_of_grpo_repeat_the_first(train: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    workload = Workload.from_mapping(
        {
            "model": {"class": "GPT2LMHeadModel", "config": CONFIG},
            "gpu": "h100-sxm",
            "loop": "grpo",
            "data": {"sequence_length": 16},
            "train": {"per_device_train_batch_size": 2, **train},
            "trl": {"num_generations": 2, "max_completion_length": 8},
        }
    )
    copies = 0
    original = RepeatedGeneration._write_again

    def counted(*arguments: Any) -> Any:
        nonlocal copies
        copies += 1
        return original(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(RepeatedGeneration, "_write_again", counted)
        copied = simulate(workload, workload.resolve_gpu())
    assert copies == 1
    with monkeypatch.context() as patch:
        patch.setattr(RepeatedGeneration, "repeat", lambda *_: None)
        whole = simulate(workload, workload.resolve_gpu())
    assert copied.trace == whole.trace
    assert copied.operations == whole.operations
