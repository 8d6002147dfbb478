"""Towers and projectors that are not trained, and the dtype of what is."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import trainatomy
from trainatomy.errors import WorkloadError
from trainatomy.training.model import build_model
from trainatomy.workload.schema import Workload

TEXT = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 64,
}
LLAVA = {
    "class": "LlavaForConditionalGeneration",
    "config": {
        "text_config": {"model_type": "llama", **TEXT},
        "vision_config": {
            "model_type": "clip_vision_model",
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": 28,
            "patch_size": 14,
        },
        "image_token_index": 63,
    },
}
QWEN = {
    "class": "Qwen2_5_VLForConditionalGeneration",
    "config": {
        "text_config": {**TEXT, "rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3]}},
        "vision_config": {
            "depth": 1,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_heads": 2,
            "out_hidden_size": 32,
        },
    },
}


def trained(model: dict[str, Any]) -> set[str]:
    """Return the names of the parameters that are trained."""
    with torch.device("meta"):
        built = build_model(Workload.from_mapping({"model": model}))
    return {name for name, parameter in built.named_parameters() if parameter.requires_grad}


@pytest.mark.parametrize("model", [LLAVA, QWEN], ids=["llava", "qwen"])
def test_towers_and_projectors_are_frozen_apart(model: dict[str, Any]) -> None:
    everything = trained(model)
    no_tower = trained({**model, "freeze_vision_tower": True})
    no_projector = trained({**model, "freeze_multi_modal_projector": True})
    language = trained({**model, "freeze_vision_tower": True, "freeze_multi_modal_projector": True})
    assert language == no_tower & no_projector < no_tower < everything
    assert all("language_model" in name or name.startswith("lm_head") for name in language)
    assert any("projector" in name or "merger" in name for name in no_tower)
    assert not any("projector" in name or "merger" in name for name in no_projector)
    assert no_tower | no_projector == everything


@pytest.mark.parametrize("model", [LLAVA, QWEN], ids=["llava", "qwen"])
def test_frozen_towers_get_no_adapters(model: dict[str, Any]) -> None:
    pytest.importorskip("peft")
    lora = {"r": 2, "target_modules": "all-linear"}
    everywhere = trained({**model, "lora": lora})
    outside = trained({**model, "lora": lora, "freeze_vision_tower": True, "freeze_multi_modal_projector": True})
    assert outside < everywhere and all("language_model" in name for name in outside)
    fewer = {**lora, "exclude_modules": ["q_proj"]}
    assert not any("q_proj" in name for name in trained({**model, "lora": fewer, "freeze_vision_tower": True}))


def test_a_frozen_tower_keeps_for_backward_what_the_framework_lets_it_keep() -> None:
    pytest.importorskip("peft")
    frozen = {"freeze_vision_tower": True, "freeze_multi_modal_projector": True}
    tokens = {"image_token_id": 50, "video_token_id": 51, "vision_start_token_id": 52, "vision_end_token_id": 53}
    vision = {**QWEN["config"]["vision_config"], "depth": 8}
    text = {**QWEN["config"]["text_config"], "vocab_size": 20_000}  # the peak is in the loss
    config = {**QWEN["config"], **tokens, "text_config": text, "vision_config": vision}
    model = {**QWEN, "config": config, **frozen, "lora": {"r": 2, "target_modules": "all-linear"}}
    run = {
        "data": {"image_size": 560, "sequence_length": 900},
        "train": {"gradient_checkpointing": True, "bf16": True},
        "gpu": "l4",
    }
    run["train"] |= {"per_device_train_batch_size": 1, "gradient_checkpointing_kwargs": {"use_reentrant": True}}

    def kept(name: str) -> int:
        workload = Workload.from_mapping({**run, "model": {**model, "frozen_tower": name}})
        return trainatomy.predict(workload).memory.peak_allocated_bytes

    assert kept("without_grad") < kept("checkpointed") < kept("kept")


def test_a_model_without_a_tower_is_left_alone() -> None:
    text = {"class": "LlamaForCausalLM", "config": TEXT}
    assert trained({**text, "freeze_vision_tower": True}) == trained(text)


def test_weights_that_are_trained_are_cast() -> None:
    """Frozen embeddings stay in 16 bits; optimizer states follow the weights."""
    text = {"class": "LlamaForCausalLM", "config": TEXT, "dtype": "bfloat16"}
    run = {"train": {"per_device_train_batch_size": 1, "bf16": True}, "data": {"sequence_length": 8}, "gpu": "l4"}

    def weights(**model: Any) -> int:
        prediction = trainatomy.predict(Workload.from_mapping({"model": {**text, **model}, **run}))
        return prediction.memory.components.weights

    half, whole = weights(), weights(trainable_dtype="float32")
    tables = 2 * TEXT["vocab_size"] * TEXT["hidden_size"] * 2  # bytes of the embeddings and the output layer
    assert weights(float32_parameters=[".*embed_tokens", "lm_head"]) == half + tables
    with pytest.raises(WorkloadError, match=r"model\.float32_parameters: no parameter's name begins with a match"):
        weights(float32_parameters=["embed"])
    assert 1.9 < whole / half < 2.2  # tables of rotary positions stay
    assert half < weights(trainable_dtype="float32", freeze=["*embed*", "lm_head*"]) < whole


def test_parameters_are_trained_alone_that_are_named() -> None:
    text = {"class": "LlamaForCausalLM", "config": TEXT}
    named = {**text, "freeze_except": [r"lm_head", r"model\.layers\.0\.mlp"]}
    assert trained(named) == {name for name in trained(text) if name.startswith(("lm_head", "model.layers.0.mlp"))}
    with pytest.raises(
        WorkloadError, match=r"no parameter's name begins with a match of 'mlp'; the first is model\.emb"
    ):
        trained({**text, "freeze_except": ["mlp"]})
    with pytest.raises(WorkloadError, match=r"'\(' is no regular expression"):
        trained({**text, "freeze_except": ["("]})


def test_gradients_reach_the_embeddings_where_inputs_require_them() -> None:
    """Without, nothing below the first layer that is trained has a backward pass."""
    text = {"class": "LlamaForCausalLM", "config": TEXT, "freeze_except": ["lm_head"]}
    run = {"train": {"per_device_train_batch_size": 1}, "data": {"sequence_length": 8}, "gpu": "l4"}
    kept, more = (
        trainatomy.predict(Workload.from_mapping({"model": {**text, **model}, **run})).memory.components.activations
        for model in ({}, {"enable_input_require_grads": True})
    )
    assert more > kept


def test_methods_of_peft_leave_frozen_towers_out() -> None:
    rotated = {"peft_type": "OFT", "r": 0, "oft_block_size": 8, "target_modules": "all-linear"}
    names = trained({**LLAVA, "peft": rotated, "freeze_vision_tower": True})
    assert names and not any("vision_tower" in name for name in names)
    assert any("vision_tower" in name for name in trained({**LLAVA, "peft": rotated}))
