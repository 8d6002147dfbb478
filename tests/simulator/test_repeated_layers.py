"""Layers that are copied in calls of ``generate()``: copies are what executing them writes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from executed import simulated

from trainatomy.simulator.repeated_calls import RepeatedCalls
from trainatomy.simulator.repeated_layers import RepeatedLayers
from trainatomy.simulator.simulate import simulate
from trainatomy.workload import Workload

BASE = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 5, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 1000,
}  # fmt: skip
SLIDING = {**BASE, "num_hidden_layers": 12, "head_dim": 16, "sliding_window": 16}
DECODER = {"d_model": 64, "num_layers": 4, "num_heads": 4, "d_kv": 16, "d_ff": 128}
TOKENS = 14


def describe(name: str, config: dict[str, Any], **sections: Any) -> Workload:
    model = {"class": name, "config": config, **sections.pop("model", {})}
    generation = {"max_new_tokens": TOKENS, **sections.pop("generation", {})}
    return Workload.from_mapping(
        {
            "model": model,
            "mode": "generation",
            "data": {"sequence_length": 12},
            "generation": generation,
            "steps": 1,
            **sections,
        }
    )


@pytest.mark.parametrize(
    ("name", "config", "sections", "executed"),
    [
        ("LlamaForCausalLM", BASE, {}, 1),
        ("LlamaForCausalLM", BASE, {"train": {"bf16": True}, "generation": {"num_beams": 2}}, 1),
        ("LlamaForCausalLM", BASE, {"model": {"lora": {"r": 4}}}, 1),
        ("Gemma3ForCausalLM", SLIDING, {}, 2),
        ("MixtralForCausalLM", {**BASE, "num_local_experts": 4}, {}, 1),
        ("MambaForCausalLM", {"hidden_size": 64, "num_hidden_layers": 4, "vocab_size": 1000}, {}, 1),
        ("T5ForConditionalGeneration", DECODER, {}, 2),  # the first layer computes the position bias of all
    ],
)
def test_copied_layers_are_what_execution_writes(
    name: str, config: dict[str, Any], sections: dict[str, Any], executed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    workload, copies, original = describe(name, config, **sections), 0, RepeatedCalls.write_again

    def counted(*arguments: Any) -> Any:
        nonlocal copies
        copies += 1
        return original(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(RepeatedCalls, "write_again", counted)
        copied = simulate(workload, workload.resolve_gpu())
    layers = config.get("num_hidden_layers") or config["num_layers"]
    assert copies == (TOKENS - 3) * (layers - executed)
    with monkeypatch.context() as patch:
        patch.setattr(RepeatedLayers, "_find_kinds", lambda self: None)
        whole = simulate(workload, workload.resolve_gpu())
    assert copied.trace == whole.trace
    assert copied.operations == whole.operations
    assert copied.generation == whole.generation


@pytest.mark.parametrize("seed", [0, 7])
def test_layers_that_differ_are_executed(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers with adapters are of another kind, and those that draw numbers of the host are of none."""
    adapted = describe(
        "LlamaForCausalLM", BASE, model={"lora": {"r": 4, "layers_to_transform": [0, 3]}}, train={"seed": seed}
    )
    kinds: list[list[int | None]] = []
    original = RepeatedLayers._find_kinds

    def noted(self: RepeatedLayers) -> None:
        if seed:
            torch.rand(1)
        original(self)
        kinds.append([layer.kind for layer in self._layers])

    monkeypatch.setattr(RepeatedLayers, "_find_kinds", noted)
    simulate(adapted, adapted.resolve_gpu())
    assert kinds == [[None] * 5 if seed else [0, 1, 1, 0, 1]]


def test_a_model_has_its_own_forward_again(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []
    original = RepeatedLayers.end

    def ended(self: RepeatedLayers) -> None:
        modules = [layer.module for layer in self._layers]
        during = all("forward" in vars(module) for module in modules)
        original(self)
        seen.append(during and not any("forward" in vars(module) for module in modules))

    monkeypatch.setattr(RepeatedLayers, "end", ended)
    workload = describe("LlamaForCausalLM", BASE)
    simulate(workload, workload.resolve_gpu())
    assert seen == [True]
    assert simulated(workload).generation is not None
