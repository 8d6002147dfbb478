"""Mixtures of experts: parameters that are held against those that compute for a token."""

from __future__ import annotations

from typing import Any

import pytest
from executed import predicted

from trainatomy import ops
from trainatomy.reporters import subject_sentences
from trainatomy.workload.schema import Workload

SMALL = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 100,
}


def workload(name: str, config: dict[str, Any]) -> Workload:
    return Workload.from_mapping(
        {
            "model": {"class": name, "config": {**SMALL, **config}},
            "data": {"sequence_length": 16},
            "train": {"per_device_train_batch_size": 2, "bf16": True},
            "gpu": "h200",
        }
    )


MIXTRAL = workload("MixtralForCausalLM", {"num_local_experts": 8, "num_experts_per_tok": 2})


def test_a_token_passes_some_experts_and_memory_holds_all() -> None:
    found = predicted(MIXTRAL).experts
    assert found is not None
    assert (found.layers, found.experts, found.experts_per_token) == (2, 8, 2)
    assert found.expert_parameters == 2 * 8 * 3 * 32 * 64
    assert found.parameters - found.active_parameters == found.expert_parameters * 6 // 8
    assert found.rows_per_expert == 2 * 16 * 2 / 8


def test_a_layer_with_shared_experts_counts_them_as_active() -> None:
    config = {
        "num_experts": 4,
        "num_experts_per_tok": 1,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 64,
        "decoder_sparse_step": 1,
    }
    found = predicted(workload("Qwen2MoeForCausalLM", config)).experts
    assert found is not None
    assert found.expert_parameters == 2 * 4 * 3 * 32 * 16
    assert found.parameters - found.active_parameters == found.expert_parameters * 3 // 4


def test_operations_say_the_same() -> None:
    assert ops(MIXTRAL).experts == predicted(MIXTRAL).experts


def test_a_dense_model_has_no_experts() -> None:
    assert predicted(workload("LlamaForCausalLM", {})).experts is None


@pytest.mark.parametrize(
    "words", ["2 of 8 experts in 2 layers", "assumed: the router spreads rows evenly, 8 of a batch"]
)
def test_the_sentences_state_the_assumption(words: str) -> None:
    found = predicted(MIXTRAL).experts
    assert found is not None
    assert any(words in line for line in subject_sentences.experts(found))
