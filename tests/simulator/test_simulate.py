"""A whole step from the user's own code, and the errors when it cannot run."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from trainatomy.errors import FactoryError, SimulationError
from trainatomy.simulator.simulate import simulate, steps_needed
from trainatomy.simulator.simulation import Simulation
from trainatomy.workload import Workload

Factory = Callable[..., Workload]
BATCH = """
def batch(size):
    return {"x": torch.ones(size, 8)}
"""
MODEL = """
class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, h):
        LINE

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(8, 8)
        self.head = Head()

    def forward(self, x):
        return self.head(self.body(x)).sum()

def model():
    return Net()
"""


def run(workload: Workload) -> Simulation:
    return simulate(workload, workload.resolve_gpu())


def net(line: str) -> str:
    return MODEL.replace("LINE", line) + BATCH


def test_a_plain_step(from_factory: Factory) -> None:
    found = run(from_factory(net("return self.linear(h)")))
    assert (found.parameters, found.trainable_parameters, found.steps) == (144, 144, 2)
    labels = list(found.trace.labels.values())
    assert labels.count("weight") == labels.count("gradient") // 2 == 4
    assert labels.count("optimizer_state") >= 8
    assert {mark.name for mark in found.trace.marks} >= {"loaded", "step", "forward", "forward end", "backward end"}
    assert {"cublas", "cublas_backward", "kernels", "training"} <= found.libraries


def test_a_result_that_depends_on_data_is_named_with_its_module(from_factory: Factory) -> None:
    with pytest.raises(SimulationError) as error:
        run(from_factory(net("return self.linear(h) + torch.bincount((h > 0).long().view(-1)).sum()")))
    message = str(error.value)
    assert "aten::bincount" in message
    assert "in head " in message
    assert "trainatomy measure" in message


def test_an_exception_in_user_code_has_the_users_line(from_factory: Factory) -> None:
    with pytest.raises(FactoryError) as error:
        run(from_factory(net("raise KeyError('mine')")))
    message = str(error.value)
    assert "KeyError" in message
    assert "mine.py:10, in forward" in message


def test_a_shape_mismatch_is_a_user_error(from_factory: Factory) -> None:
    with pytest.raises(FactoryError, match=r"mine\.py:\d+, in forward"):
        run(from_factory(net("return self.linear(h[:, :3])")))


@pytest.mark.parametrize("line", ["raise KeyError('mine')", "return h + torch.bincount((h > 0).long().view(-1)).sum()"])
def test_a_failure_leaves_nothing_behind(from_factory: Factory, line: str) -> None:
    available = torch.cuda.is_available()
    with pytest.raises((FactoryError, SimulationError)):
        run(from_factory(net(line)))
    assert torch.cuda.is_available() is available
    assert torch.overrides._get_current_function_mode() is None
    assert torch.empty(3).device.type == "cpu"


def test_branches_follow_the_values_of_the_batch(from_factory: Factory) -> None:
    text = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.short, self.long = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x, mask):
        return (self.short(x) if mask.all() else self.long(x)).sum()

def model():
    return Net()

def batch(size):
    return {"x": torch.ones(size, 8), "mask": torch.MASK(size, 8, dtype=torch.long)}
"""
    for mask, way in (("ones", "short"), ("zeros", "long")):
        found = run(from_factory(text.replace("MASK", mask)))
        modules = {origin.module for origin in found.trace.origins if origin.phase == "forward"}
        assert modules & {"short", "long"} == {way}


@pytest.mark.parametrize(
    ("sections", "steps"),
    [
        ({"steps": 7}, 7),
        ({}, 3),
        ({"train": {"gradient_accumulation_steps": 2}}, 3),
        ({"train": {"gradient_accumulation_steps": 8}}, 2),
        ({"mode": "inference"}, 2),
    ],
)
def test_steps_that_the_peak_needs(sections: dict[str, object], steps: int) -> None:
    assert steps_needed(Workload.from_mapping({"model": {"id": "gpt2"}, **sections})) == steps


_SMALL = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
ASKING: dict[str, dict[str, object]] = {
    "LongformerForSequenceClassification": {**_SMALL, "attention_window": 16},
    "LEDForConditionalGeneration": {
        "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
        "decoder_attention_heads": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "attention_window": 16,
    },
    "FunnelForSequenceClassification": {
        "d_model": 32, "n_head": 2, "d_head": 16, "d_inner": 32, "block_sizes": [1, 1], "num_decoder_layers": 1,
    },
    "TapasForQuestionAnswering": _SMALL,
    "ViltForQuestionAnswering": {**_SMALL, "image_size": 32, "patch_size": 16},
}  # fmt: skip
"""Text of models that read numbers computed from masks, positions and tokens."""


@pytest.mark.parametrize("name", list(ASKING))
def test_models_that_read_known_values_are_executed(name: str) -> None:
    found = run(
        Workload.from_mapping({"model": {"class": name, "config": ASKING[name]}, "data": {"sequence_length": 32}})
    )
    labels = set(found.trace.labels.values())
    assert {"weight", "gradient", "optimizer_state"} <= labels


def test_an_unchecked_release_is_reported() -> None:
    """Check that a newer, unchecked torch is simulated with a note on the prediction."""
    tiny = {
        "model": {"class": "GPT2LMHeadModel", "config": {"n_layer": 1, "n_embd": 32, "n_head": 2, "vocab_size": 64}}
    }
    sections = {"data": {"sequence_length": 8}, "loop": "pytorch"}
    for version, noted in (("2.11", False), ("2.99", True)):
        workload = Workload.from_mapping({**tiny, **sections, "software": {"torch": version}})
        notes = simulate(workload, workload.resolve_gpu()).notes
        assert any(note.startswith("torch 2.99 is simulated") for note in notes) is noted
