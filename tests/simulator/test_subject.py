"""What a simulation says of its training: model, precision, attention, batch, and the head of an encoder."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from executed import predicted, simulated
from torch import nn

from trainatomy.api import predict
from trainatomy.prediction.subject import subject_of
from trainatomy.results.prediction import LeadingNote, Subject
from trainatomy.workload.schema import Workload

SMALL = {"num_hidden_layers": 1, "hidden_size": 64, "num_attention_heads": 2, "intermediate_size": 64}


def subject(**sections: Any) -> Subject:
    train = {"per_device_train_batch_size": 2, **sections.pop("train", {})}
    workload = Workload.from_mapping({"train": train, "gpu": "h100", **sections})
    return subject_of(workload, simulated(workload))


BERT = {"id": "google-bert/bert-base-uncased", "config": SMALL}
LLAMA = {
    "class": "LlamaForCausalLM",
    "config": {**SMALL, "num_key_value_heads": 2, "vocab_size": 128, "max_position_embeddings": 64},
}
VIT = {"class": "ViTForImageClassification", "config": SMALL}


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        ({"model": BERT}, {"models": ("BertForMaskedLM",), "attention": "sdpa", "attention_kernels": ("efficient",)}),
        (
            {"model": {**BERT, "attn_implementation": "eager"}, "train": {"fp16": True}},
            {"attention": "eager", "attention_kernels": (), "autocast": "fp16", "weights_dtype": "float32"},
        ),
        ({"model": VIT}, {"inputs": {"pixel_values": (3, 224, 224), "labels": ()}}),
        (
            {"model": {**LLAMA, "dtype": "bfloat16", "lora": {"r": 4}}, "data": {"sequence_length": 32}},
            {"models": ("LlamaForCausalLM",), "lora_rank": 4, "trained_share": None, "weights_dtype": "bfloat16"},
        ),
        (
            {"model": LLAMA, "mode": "generation", "generation": {"max_new_tokens": 3, "num_beams": 2}},
            {"optimizer": None, "new_tokens": 3, "beams": 2, "autocast": None},
        ),
        ({"model": {**BERT, "freeze": ["bert.embeddings.*"]}}, {"lora_rank": None}),
        (
            {
                "model": LLAMA,
                "data": {"sequence_length": 32},
                "parallel": {"gpus": 2},
                "train": {"fsdp": True, "gradient_accumulation_steps": 2},
            },
            {"inputs": {"input_ids": (32,), "labels": (32,)}, "accumulation_steps": 2},
        ),
    ],
)
def test_a_simulation_knows_what_it_executed(sections: dict[str, Any], expected: dict[str, Any]) -> None:
    found = subject(**sections)
    assert {name: getattr(found, name) for name in expected} == expected


def test_frozen_parameters_leave_a_share_that_is_trained() -> None:
    share = subject(model={**BERT, "freeze": ["bert.embeddings.*"]}).trained_share
    assert share is not None and 0 < share < 1


def test_a_module_of_the_users_is_known_by_its_class_and_its_batch() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(16, 4)

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return nn.functional.cross_entropy(self.layer(x), y)

    batch = {"x": torch.zeros(8, 16), "y": torch.zeros(8, dtype=torch.long)}
    found = predict(Net(), batch=batch, gpu="h100").subject
    assert found is not None and (found.models, found.batch_size) == (("Net",), 8)
    assert (found.inputs, found.attention, found.loop) == ({"x": (16,), "y": ()}, None, "pytorch")


@pytest.mark.parametrize(
    ("model", "usual"),
    [
        (BERT, "BertForSequenceClassification"),
        ({"id": "FacebookAI/roberta-base", "config": SMALL}, "RobertaForSequenceClassification"),
        ({**BERT, "class": "BertForMaskedLM"}, None),  # as asked for
        ({"id": "gpt2", "config": {"n_layer": 1}}, None),
    ],
)
def test_the_head_of_pre_training_is_no_surprise(model: dict[str, Any], usual: str | None) -> None:
    workload = Workload.from_mapping({"model": model, "train": {"per_device_train_batch_size": 2}, "gpu": "h100"})
    noted = [note for note in simulated(workload).notes if isinstance(note, LeadingNote)]
    assert [usual in note for note in noted] == ([True] if usual else [])
    prediction = predicted(workload)
    assert prediction.leading_notes == tuple(noted) and not set(noted) & set(prediction.notes)


@pytest.mark.parametrize(("vocabulary", "padded"), [(4095, [4096]), (4096, [])])
def test_a_vocabulary_that_tensor_cores_take_badly_is_found(vocabulary: int, padded: list[int]) -> None:
    workload = Workload.from_mapping(
        {
            "model": {**LLAMA, "config": {**LLAMA["config"], "vocab_size": vocabulary}},  # type: ignore[dict-item]
            "data": {"sequence_length": 512},
            "train": {"fp16": True},
            "gpu": "t4",
        }
    )
    assert [each.padded_value for each in predicted(workload).paddings if each.kind == "vocab"] == padded
