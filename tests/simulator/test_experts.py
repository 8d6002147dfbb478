"""Mixtures of experts on GPUs of every generation."""

from __future__ import annotations

from typing import Any

import pytest

from trainatomy.catalog.gpus import gpus
from trainatomy.results.trace import AllocationTrace
from trainatomy.simulator.simulate import simulate
from trainatomy.workload import Workload

SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "vocab_size": 99,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "MixtralForCausalLM": {"num_local_experts": 4},
    "Qwen2MoeForCausalLM": {"num_experts": 4, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32},
    "Qwen3MoeForCausalLM": {"num_experts": 4, "moe_intermediate_size": 32},
    "OlmoeForCausalLM": {"num_experts": 4},
    "PhimoeForCausalLM": {"num_local_experts": 4},
    "GraniteMoeForCausalLM": {"num_local_experts": 4},
}


def trace_of(gpu: str, family: str = "MixtralForCausalLM", **sections: Any) -> AllocationTrace:
    model = {"class": family, "config": {**SIZES, "num_experts_per_tok": 2, **FAMILIES[family]}}
    data = {"sequence_length": 16}
    train = {"per_device_train_batch_size": 2}
    workload = Workload.from_mapping(
        {"loop": "pytorch", "gpu": gpu, "model": model, "data": data, "train": train, **sections}
    )
    return simulate(workload, workload.resolve_gpu()).trace


def one_of_each_capability() -> list[str]:
    return sorted({gpu.capability: gpu.id for gpu in gpus()}.values())


@pytest.mark.parametrize("gpu", one_of_each_capability())
def test_mixtral_runs_on_every_generation(gpu: str) -> None:
    assert len(trace_of(gpu).events) > 100


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_every_family_runs_before_ampere(family: str) -> None:
    labels = list(trace_of("v100-sxm2-16gb", family).labels.values())
    assert labels.count("weight") > 5 and labels.count("gradient") > 5


def test_mixtral_runs_in_2022_and_under_autocast() -> None:
    assert trace_of("v100-sxm2-16gb", era="2022").events
    assert trace_of("v100-sxm2-16gb", train={"fp16": True, "per_device_train_batch_size": 2}).events


def test_experts_that_select_their_tokens_are_all_trained() -> None:
    """Check that no expert is skipped: every parameter gets a gradient, as with grouped products."""
    eager = {**SIZES, **FAMILIES["MixtralForCausalLM"], "experts_implementation": "eager"}
    selecting = trace_of("h200", model={"class": "MixtralForCausalLM", "config": eager})
    sizes = {event.allocation: event.bytes for event in selecting.events if event.action == "alloc"}
    by_label = {
        label: sorted({sizes[number] for number, each in selecting.labels.items() if each == label})
        for label in ("weight", "gradient")
    }
    assert by_label["gradient"] == by_label["weight"]
