"""What is said of weights that stay whole beside quantised ones."""

from __future__ import annotations

from typing import Any

import pytest
from executed import simulated

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
