"""Logits and the loss in the memory breakdown: what PyTorch's formulas make of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from executed import predicted, simulated
from torch import nn

from trainatomy.analysis.logits import logits_and_loss
from trainatomy.reporters.json import to_json
from trainatomy.reporters.text.prediction import prediction_page
from trainatomy.reporters.text.rendering import render
from trainatomy.training.model import around, output_layers
from trainatomy.workload.schema import Workload

VOCABULARY, ROWS = 50_304, 2 * 64
NUMBERS = VOCABULARY * ROWS
GPT2 = {"class": "GPT2LMHeadModel", "config": {"n_layer": 1, "n_embd": 64, "n_head": 2, "vocab_size": VOCABULARY}}


def gpt2(**train: Any) -> Workload:
    described = {"model": GPT2, "data": {"sequence_length": 64}, "gpu": "h200"}
    return Workload.from_mapping({**described, "train": {"per_device_train_batch_size": 2, "optim": "sgd", **train}})


@pytest.mark.parametrize("train", [{}, {"bf16": True}], ids=["fp32", "bf16"])
def test_at_the_peak_they_are_probabilities_and_two_gradients(train: dict[str, Any]) -> None:
    found = predicted(gpt2(**train)).memory
    assert found.peak.operation == "aten::_log_softmax_backward_data"
    parts = found.logits_and_loss
    assert parts["activations"] == pytest.approx(4 * NUMBERS, rel=0.05)  # log_softmax's result, and the logits' block
    assert parts["temporary"] == pytest.approx(8 * NUMBERS, rel=0.05)
    assert all(size <= found.components[name] for name, size in parts.items())


def test_the_page_and_the_json_have_them() -> None:
    found = predicted(gpt2())
    total = sum(found.memory.logits_and_loss.values())
    (line,) = [line for line in render(prediction_page(found), 120).splitlines() if "of which logits and loss" in line]
    assert f"{total:,}" in line
    assert sum(to_json(found)["memory"]["logits_and_loss"].values()) == total


def test_the_trace_says_of_each_number_what_it_is() -> None:
    trace = simulated(gpt2(bf16=True)).trace
    sizes = {event.allocation: event.bytes for event in trace.events if event.action == "alloc"}
    found = [trace.origins[number] for number in sorted(logits_and_loss(trace)) if sizes[number] >= 2 * NUMBERS]
    last = max(origin.step for origin in found)
    assert [origin.operation for origin in found if origin.step == last and origin.phase == "forward"] == [
        "aten::mm", "aten::_to_copy", "aten::_log_softmax", "aten::_to_copy"
    ]  # fmt: skip  # the last is accelerate's, which makes the outputs float32
    assert [origin.operation for origin in found if origin.step == last and origin.phase == "backward"] == [
        "aten::nll_loss_backward", "aten::_log_softmax_backward_data", "aten::_to_copy"
    ]  # fmt: skip


class Own(nn.Module):
    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(100, 8), nn.Embedding(16, 8)
        self.inner = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8))
        self.to_words = nn.Linear(8, 100, bias=False)
        if tied:
            self.to_words.weight = self.tokens.weight


@pytest.mark.parametrize("tied", [False, True])
def test_the_output_layer_of_a_model_of_ones_own_is_found_by_its_shape(tied: bool) -> None:
    assert output_layers(Own(tied=tied)) == ["to_words"]
    assert output_layers(nn.Sequential(Own(tied=tied))) == ["0.to_words"]
    assert around("0.to_words") == ["", "0"]


def test_a_classifier_has_none() -> None:
    assert output_layers(nn.Sequential(nn.Embedding(100, 8), nn.Linear(8, 2))) == []
    with torch.device("meta"):
        assert output_layers(nn.Linear(8, 2)) == []


def test_a_classification_shows_no_line() -> None:
    config = {"num_hidden_layers": 1, "hidden_size": 64, "num_attention_heads": 2, "intermediate_size": 64}
    bert = {"class": "BertForSequenceClassification", "config": config}
    workload = Workload.from_mapping({"model": bert, "data": {"sequence_length": 16}, "gpu": "t4"})
    assert predicted(workload).memory.logits_and_loss == {}
