"""The tokenizer that stands in for one that is not on this machine: what libraries ask of it is as in the real one."""

from __future__ import annotations

import pytest

from trainatomy.catalog.architectures import architecture, architectures, has_chat_template
from trainatomy.scripts.standins.pretrained import made_tokenizer

CONVERSATIONS = (
    "meta-llama/Llama-3.2-1B-Instruct", "google/gemma-2-2b-it", "TinyLlama/TinyLlama-1.1B-Chat-v1.0",
    "Qwen/Qwen2.5-0.5B", "Qwen/Qwen3-0.6B", "meta-llama/Llama-2-7b-chat-hf", "Qwen/Qwen2.5-0.5B-Instruct",
)  # fmt: skip
TEXTS = (
    "meta-llama/Llama-3.2-1B", "google/gemma-2-2b", "openai-community/gpt2", "mistralai/Mistral-7B-v0.1",
    "google-bert/bert-base-uncased", "distilbert/distilbert-base-uncased", "google-t5/t5-small",
    "google/gemma-3-1b-pt", "EleutherAI/pythia-70m", "facebook/opt-125m", "google/vit-base-patch16-224",
)  # fmt: skip


@pytest.mark.parametrize(("names", "expected"), [(CONVERSATIONS, True), (TEXTS, False)])
def test_models_of_conversations_have_a_chat_template(names: tuple[str, ...], expected: bool) -> None:
    assert {name: has_chat_template(name) for name in names} == dict.fromkeys(names, expected)


def test_no_encoder_has_a_chat_template() -> None:
    encoders = [one.hub_id for one in architectures() if "CausalLM" not in one.class_name]
    assert not any(map(has_chat_template, encoders))


def test_markers_of_conversations_are_in_the_vocabulary() -> None:
    """A framework adds what is missing, behind the last row of the embedding."""
    known = architecture("Qwen/Qwen2.5-0.5B-Instruct")
    assert known is not None
    tokenizer = made_tokenizer(known.config, known.hub_id)
    size = len(tokenizer)
    assert size == known.config["vocab_size"]
    tokenizer.add_special_tokens({"eos_token": "<|im_end|>", "additional_special_tokens": ["<|im_start|>"]})
    assert len(tokenizer) == size
    assert tokenizer("a<|im_end|>").input_ids[-1] == tokenizer.eos_token_id < size


def test_a_template_that_is_not_there_cannot_be_applied() -> None:
    messages = [{"role": "user", "content": "w1 w2"}]
    for name, has_template in (("Qwen/Qwen2.5-0.5B", True), ("openai-community/gpt2", False)):
        known = architecture(name)
        assert known is not None
        tokenizer = made_tokenizer(known.config, name)
        if has_template:
            assert tokenizer.apply_chat_template(messages)
        else:
            with pytest.raises(ValueError, match="chat_template is not set"):
                tokenizer.apply_chat_template(messages)


def test_options_of_from_pretrained_are_kept() -> None:
    """sentence-transformers passes ``max_seq_length`` as one."""
    known = architecture("distilbert/distilbert-base-uncased")
    assert known is not None
    options = {
        "model_max_length": 300,
        "padding_side": "left",
        "pad_token": "w5",
        "chat_template": "{{ messages }}",
        "use_fast": True,
        "trust_remote_code": True,
        "revision": "main",
    }
    tokenizer = made_tokenizer(known.config, known.hub_id, options)
    assert (tokenizer.model_max_length, tokenizer.padding_side) == (300, "left")
    assert (tokenizer.pad_token, tokenizer.chat_template) == ("w5", "{{ messages }}")
    assert len(tokenizer("memory " * 400, truncation=True).input_ids) == 300
    assert made_tokenizer(known.config, known.hub_id).model_max_length == 512
