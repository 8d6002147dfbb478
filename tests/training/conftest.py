"""Tiny models of every family, small enough to train on the CPU in a moment."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import pytest

from trainatomy.workload.schema import Workload

if TYPE_CHECKING:
    from collections.abc import Callable

_ENCODER = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "vocab_size": 200,
}
_DECODER = {**_ENCODER, "num_key_value_heads": 1}
_SEQ2SEQ = {
    "d_model": 32,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "vocab_size": 200,
}
TINY: dict[str, dict[str, Any]] = {
    "BertForSequenceClassification": _ENCODER,
    "BertForMaskedLM": _ENCODER,
    "BertForTokenClassification": _ENCODER,
    "BertForQuestionAnswering": _ENCODER,
    "RobertaForSequenceClassification": _ENCODER,
    "GPT2LMHeadModel": {"n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 200},
    "LlamaForCausalLM": _DECODER,
    "LlamaForSequenceClassification": _DECODER,
    "GemmaForCausalLM": {**_DECODER, "head_dim": 16},
    "MixtralForCausalLM": {**_DECODER, "num_local_experts": 4},
    "T5ForConditionalGeneration": {
        "d_model": 32, "d_ff": 64, "d_kv": 16, "num_layers": 2, "num_heads": 2, "vocab_size": 200,
    },
    "BartForConditionalGeneration": _SEQ2SEQ,
    "WhisperForConditionalGeneration": {
        **_SEQ2SEQ, "max_source_positions": 50, "pad_token_id": 1, "bos_token_id": 1, "eos_token_id": 2,
        "decoder_start_token_id": 3,
    },
    "ViTForImageClassification": {
        "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64, "image_size": 32,
    },
    "ResNetForImageClassification": {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1]},
    "CLIPModel": {
        "text_config": _ENCODER,
        "vision_config": {
            "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64,
            "image_size": 32, "patch_size": 8,
        },
    },
}  # fmt: skip


_IMAGE_TOKENS = {
    "LlavaForConditionalGeneration": 16,
    "Qwen3VLForConditionalGeneration": 64,
    "Qwen2_5_VLForConditionalGeneration": 64,
    "Mistral3ForConditionalGeneration": 4,
    "AyaVisionForConditionalGeneration": 4,
}
"""Tokens of an image of tiny models, which count in the length of a sequence."""


def lengths_for(name: str) -> dict[str, int]:
    """Return the lengths that a model of this class takes: of its text, and of its decoder or transcript."""
    import transformers

    found = getattr(transformers, name, None)
    if found is None:
        return {"sequence_length": 16}
    has_target = "ForCTC" in name or bool(getattr(found.config_class(), "is_encoder_decoder", False))
    has_text = has_target or "input_ids" in inspect.signature(found.forward).parameters
    return ({"sequence_length": 16 + _IMAGE_TOKENS.get(name, 0)} if has_text else {}) | (
        {"target_length": 8} if has_target else {}
    )


@pytest.fixture
def describe() -> Callable[..., Workload]:
    """Describe the training of a tiny model by its class; keywords replace whole sections of the workload."""

    def make(name: str = "BertForSequenceClassification", **sections: Any) -> Workload:
        model = {"class": name, "config": TINY.get(name, {}), **sections.pop("model", {})}
        data = sections.pop("data", None)
        data = lengths_for(name) if data is None else data
        train = {"per_device_train_batch_size": 2, **sections.pop("train", {})}
        return Workload.from_mapping({"model": model, "data": data, "train": train, **sections})

    return make


@pytest.fixture
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "family" in metafunc.fixturenames:
        metafunc.parametrize("family", list(TINY), indirect=True)
