"""Copied micro-batches are what execution writes, and what does not repeat is executed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from trainatomy.simulator.repetition import Repetition
from trainatomy.simulator.simulate import simulate
from trainatomy.simulator.simulation import Simulation
from trainatomy.workload import Workload

Factory = Callable[..., Workload]
ACCUMULATION = {"gradient_accumulation_steps": 4}
TEXT = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64, "vocab_size": 200}
BATCH = 'def batch(size):\n    return {"x": torch.ones(size, 8), "labels": torch.zeros(size, dtype=torch.long)}\n'
NET = """
import random
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last, self.calls = nn.Linear(8, 8), nn.Linear(8, 2), 0
    def count(self):
        self.calls += 1
        return self.calls
    def forward(self, x, labels):
        for _ in range({repeats}):
            x = self.first(x)
        return {{"loss": nn.functional.cross_entropy(self.last(x), labels)}}
def model():
    return Net()
"""


def executed_and_copied(workload: Workload, monkeypatch: pytest.MonkeyPatch) -> tuple[Simulation, Simulation, int]:
    """Simulate without and with copies; return both, and the number of micro-batches that were copied."""
    copies = 0
    repeat = Repetition.repeat

    def counted(self: Repetition, *arguments: Any, **keywords: Any) -> Any:
        nonlocal copies
        loss = repeat(self, *arguments, **keywords)
        copies += loss is not None
        return loss

    with monkeypatch.context() as patch:
        patch.setattr(Repetition, "repeat", lambda *arguments, **keywords: None)
        executed = simulate(workload, workload.resolve_gpu())
    with monkeypatch.context() as patch:
        patch.setattr(Repetition, "repeat", counted)
        copied = simulate(workload, workload.resolve_gpu())
    return executed, copied, copies


def assert_equal(executed: Simulation, copied: Simulation) -> None:
    assert copied.trace == executed.trace
    assert copied.operations == executed.operations
    assert copied == executed


COPIED = {1: 1, 2: 2, 4: 4, 6: 4}
"""Micro-batches that are copied, by accumulation steps: the first of step 3, all of it, also the last and further ones
of step 2, and with some left out."""


@pytest.mark.parametrize(
    ("loop", "accumulation", "train"),
    [
        ("trainer", 1, {}),
        ("trainer", 2, {"fp16": True}),
        ("trainer", 4, {"optim": "adamw_bnb_8bit"}),
        ("trainer", 6, {"gradient_checkpointing": True}),
        ("pytorch", 1, {"fp16": True}),
        ("pytorch", 2, {"gradient_checkpointing": True}),
        ("pytorch", 6, {}),
    ],
    ids=str,
)
def test_copies_are_what_execution_writes(
    loop: str, accumulation: int, train: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    layers = 2 if "gradient_checkpointing" in train else 1  # as many regions that are recomputed
    described = Workload.from_mapping(
        {
            "loop": loop,
            "model": {"class": "BertForMaskedLM", "config": {**TEXT, "num_hidden_layers": layers}},
            "data": {"sequence_length": 16},
            "train": {"gradient_accumulation_steps": accumulation, **train},
            "gpu": "h200",
        }
    )
    executed, copied, copies = executed_and_copied(described, monkeypatch)
    assert_equal(executed, copied)
    assert copies == COPIED[accumulation]


@pytest.mark.parametrize(
    ("parallel", "copied"),
    [
        ({"strategy": "ddp"}, 1),
        ({"strategy": "ddp", "gradient_as_bucket_view": True}, 1),
        ({"strategy": "ddp", "sync_each_batch": True}, 0),
        ({"strategy": "zero1"}, 1),
        ({"strategy": "fsdp2"}, 0),
    ],
    ids=str,
)
def test_micro_batches_of_ranks_are_copied_where_they_exchange_nothing(
    parallel: dict[str, Any], copied: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last micro-batch of a step reduces the gradients; with FSDP each one gathers weights."""
    described = Workload.from_mapping(
        {
            "loop": "pytorch",
            "model": {"class": "BertForMaskedLM", "config": {**TEXT, "num_hidden_layers": 1}},
            "data": {"sequence_length": 16},
            "train": {"gradient_accumulation_steps": 6, "bf16": True},
            "parallel": {"gpus": 2, **parallel},
            "gpu": "h200",
        }
    )
    executed, with_copies, copies = executed_and_copied(described, monkeypatch)
    assert_equal(executed, with_copies)
    assert copies == copied


def test_a_model_that_was_loaded_in_eval_mode_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Adapters are made in training mode, the quantised weights below them are loaded in eval mode."""
    pytest.importorskip("bitsandbytes")
    described = Workload.from_mapping(
        {
            "model": {
                "class": "LlamaForCausalLM",
                "config": {**TEXT, "num_key_value_heads": 2, "attention_dropout": 0.0},
                "quantization": {"load_in_4bit": True},
                "lora": {"r": 2, "target_modules": "all-linear"},
            },
            "data": {"sequence_length": 16},
            "train": {"bf16": True, "gradient_checkpointing": True},
            "gpu": "h200",
        }
    )
    executed, copied, copies = executed_and_copied(described, monkeypatch)
    assert_equal(executed, copied)
    assert copies == 1


def test_gradients_that_stay_are_not_copied(from_factory: Factory, monkeypatch: pytest.MonkeyPatch) -> None:
    described = from_factory(NET.format(repeats=1) + BATCH, zero_grad_set_to_none=False, steps=3)
    executed, copied, copies = executed_and_copied(described, monkeypatch)
    assert_equal(executed, copied)
    assert copies == 0


def test_a_long_run_copies_in_every_step(from_factory: Factory, monkeypatch: pytest.MonkeyPatch) -> None:
    described = from_factory(NET.format(repeats=1) + BATCH, train=ACCUMULATION, steps=4)
    executed, copied, copies = executed_and_copied(described, monkeypatch)
    assert_equal(executed, copied)
    assert copies == 1 + 3 + 4 + 3  # after a copied first micro-batch the next one is executed


@pytest.mark.parametrize(
    "repeats",
    ["1 + random.randrange(2)", "1 + int(torch.rand(()) < 0.5)", "1 + self.count() % 2", "1 + self.count() // 5"],
    ids=["random", "tensor", "alternating", "counting"],
)
def test_what_changes_is_executed(repeats: str, from_factory: Factory, monkeypatch: pytest.MonkeyPatch) -> None:
    described = from_factory(NET.format(repeats=repeats) + BATCH, train=ACCUMULATION)
    executed, copied, copies = executed_and_copied(described, monkeypatch)
    assert_equal(executed, copied)
    assert copies == 0


def test_batches_of_other_shapes_are_executed(from_factory: Factory, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = """
calls = 0
def batch(size):
    global calls
    calls = calls % 8 + 1
    rows = size * (1 + calls // 4)
    return {"x": torch.ones(rows, 8), "labels": torch.zeros(rows, dtype=torch.long)}
"""
    described = from_factory(NET.format(repeats=1) + batch, train=ACCUMULATION)
    executed, copied, _ = executed_and_copied(described, monkeypatch)
    assert_equal(executed, copied)


def test_a_cache_that_some_steps_empty_is_emptied_in_those(monkeypatch: pytest.MonkeyPatch) -> None:
    for every in (1, 2):
        described = Workload.from_mapping(
            {
                "model": {"class": "BertForMaskedLM", "config": {**TEXT, "num_hidden_layers": 1}},
                "data": {"sequence_length": 16},
                "train": {**ACCUMULATION, "torch_empty_cache_steps": every},
                "gpu": "h200",
            }
        )
        executed, copied, copies = executed_and_copied(described, monkeypatch)
        assert_equal(executed, copied)
        assert copies == (4 if every == 1 else 2)


def test_a_model_that_keeps_a_tensor_of_each_micro_batch_is_executed(
    from_factory: Factory, monkeypatch: pytest.MonkeyPatch
) -> None:
    keeping = "self.kept = [*getattr(self, 'kept', ()), x * 2]"
    text = NET.format(repeats=1).replace("x = self.first(x)", f"x = self.first(x); {keeping}")
    executed, copied, copies = executed_and_copied(from_factory(text + BATCH, train=ACCUMULATION), monkeypatch)
    assert_equal(executed, copied)
    assert copies == 0
