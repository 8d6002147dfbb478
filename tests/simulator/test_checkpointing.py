"""Memory of a step in which every n-th layer recomputes its activations."""

from __future__ import annotations

from typing import Any

import pytest

from trainatomy import predict
from trainatomy.simulator.simulate import simulate
from trainatomy.timing.launch import checkpointed_regions
from trainatomy.workload import Workload

LAYERS = 6
SIZES = {"hidden_size": 64, "num_hidden_layers": LAYERS, "num_attention_heads": 2, "intermediate_size": 256}
LLAMA = {**SIZES, "num_key_value_heads": 1, "vocab_size": 200}


def described(train: dict[str, Any]) -> Workload:
    workload = {
        "model": {"class": "LlamaForCausalLM", "config": LLAMA},
        "steps": 2,
        "data": {"sequence_length": 128},
        "train": {"per_device_train_batch_size": 4, "bf16": True, **train},
    }
    return Workload.from_mapping(workload)


def activations(train: dict[str, Any]) -> int:
    return predict(described(train), timed=False, layouts=False).memory.components.activations


def test_each_layer_that_recomputes_saves_the_same() -> None:
    none = activations({})
    found = {
        every: activations({"gradient_checkpointing": True, "gradient_checkpointing_every": every})
        for every in (1, 2, 3, 6)
    }
    assert found[1] < found[2] < found[3] < found[6] <= none
    # with 3, 2 and 1 layers that recompute, the peak is at the end of the forward pass, where one layer differs
    assert found[3] - found[2] == found[6] - found[3]


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_layer_recomputes_once_under_its_name(reentrant: bool) -> None:
    workload = described(
        {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": reentrant}}
    )
    found = simulate(workload, workload.resolve_gpu()).operations
    assert checkpointed_regions(found) == LAYERS
    recomputed = {operation.module for operation in found.operations if operation.phase == "recompute"}
    assert {f"model.layers.{layer}" for layer in range(LAYERS)} <= recomputed  # the sums between its parts
    assert all(module.startswith("model.layers.") for module in recomputed)
