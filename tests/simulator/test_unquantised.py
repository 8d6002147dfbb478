"""What is said of weights that stay whole beside quantised ones."""

from __future__ import annotations

from typing import Any

import pytest
from executed import simulated

from trainatomy.errors import WorkloadError
from trainatomy.results.prediction import LeadingNote
from trainatomy.workload import Workload

pytest.importorskip("bitsandbytes")
pytest.importorskip("peft")

SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 2, "num_key_value_heads": 2}
SMALL = {**SIZES, "num_hidden_layers": 1, "vocab_size": 64}
MIXTURES = {
    "MixtralForCausalLM": {"num_local_experts": 4},
    "Qwen3MoeForCausalLM": {"num_experts": 4, "moe_intermediate_size": 256, "num_experts_per_tok": 2},
    "GptOssForCausalLM": {"num_local_experts": 4, "layer_types": ["full_attention"]},
}
FOUR, EIGHT = {"load_in_4bit": True, "bnb_4bit_compute_dtype": "bfloat16"}, {"load_in_8bit": True}


def noted(name: str, config: dict[str, Any], quantization: dict[str, Any]) -> list[str]:
    model = {"class": name, "config": {**SMALL, **config}, "dtype": "bfloat16", "quantization": quantization}
    lora = {"r": 4, "target_modules": ["q_proj"]}
    described = {"model": {**model, "lora": lora}, "data": {"sequence_length": 8}, "steps": 1}
    notes = simulated(Workload.from_mapping(described)).notes
    return [note for note in notes if isinstance(note, LeadingNote) and "are not quantised" in note]


@pytest.mark.parametrize("name", MIXTURES)
def test_experts_of_one_parameter_are_named(name: str) -> None:
    (note,) = noted(name, MIXTURES[name], FOUR)
    assert "Experts, and bitsandbytes quantises the weights of linear layers only" in note
    assert "casts them to float32" in note


def test_weights_that_are_not_cast_are_said_to_stay() -> None:
    (note,) = noted(
        "MixtralForCausalLM", MIXTURES["MixtralForCausalLM"], EIGHT | {"prepare_model_for_kbit_training": False}
    )
    assert "float32" not in note


def test_linear_layers_and_embeddings_are_not_worth_a_note() -> None:
    assert noted("LlamaForCausalLM", {"vocab_size": 4000}, FOUR) == []


LORA = {"r": 4, "target_modules": ["q_proj"]}
WHOLE = {**FOUR, "bnb_4bit_quant_type": "nf4", "prepare_model_for_kbit_training": False}


def loaded(name: str, config: dict[str, Any], quantization: dict[str, Any], **lora: Any) -> Any:
    model = {"class": name, "config": config, "dtype": "bfloat16", "quantization": quantization}
    described = {"model": {**model, "lora": {**LORA, **lora}}, "data": {"sequence_length": 8}, "steps": 1}
    described["train"] = {"bf16": True}
    return simulated(Workload.from_mapping(described))


def weights(simulation: Any) -> int:
    labels, events = simulation.trace.labels, simulation.trace.events
    born = {event.allocation: event.bytes for event in events if event.action == "alloc"}
    return sum(born[number] for number, label in labels.items() if label == "weight" and number in born)


@pytest.mark.parametrize("name", MIXTURES)
def test_experts_of_one_parameter_are_packed_where_they_are_asked_to_be(name: str) -> None:
    config = {**SMALL, **MIXTURES[name]}
    whole, packed = (loaded(name, config, {**WHOLE, "bnb_4bit_experts": packs}) for packs in (False, True))
    experts = 4 * 3 * SIZES["hidden_size"] * SIZES["intermediate_size"]
    assert weights(whole) - weights(packed) == experts * 2 - experts // 2
    assert packed.parameters == whole.parameters
    assert not any("are not quantised" in note for note in packed.notes)
    assert any("2 parameters of experts have quantised weights" in note for note in packed.notes)


def test_experts_that_are_linear_layers_are_quantised_as_any() -> None:
    config = {"num_layers": 4, "num_decoder_layers": 4, "d_model": 128, "d_ff": 256, "num_heads": 2, "d_kv": 64}
    found = loaded(
        "SwitchTransformersForConditionalGeneration",
        {**config, "num_experts": 4, "vocab_size": 64},
        FOUR,
        target_modules=["q"],
    )
    assert not any("are not quantised" in note for note in found.notes)
    layers = 4 * 4 + 4 * 8 + 8 * (2 * 4 + 1)  # attention of encoder and decoder, experts and their routers
    assert any(f"{layers} linear layers have quantised weights" in note for note in found.notes)


def test_a_model_without_such_experts_is_refused() -> None:
    with pytest.raises(WorkloadError, match="bnb_4bit_experts: LlamaForCausalLM has no experts in one parameter"):
        loaded("LlamaForCausalLM", SMALL, {**WHOLE, "bnb_4bit_experts": True})
