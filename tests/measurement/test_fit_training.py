"""Runs of the regret benchmark on the CPU: models made on the device, steps in turn, auto_find_batch_size."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import fit_training
import pytest
import torch
import transformers
from fake_gpu import FakeEvent
from fit_cases import Setting
from fit_training import Length

from trainatomy.training.model import build_model
from trainatomy.workload.schema import Workload

if TYPE_CHECKING:
    from torch import nn

GPT2: dict[str, Any] = {
    "model": {
        "class": "GPT2LMHeadModel",
        "config": {"n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 128, "bos_token_id": 0, "eos_token_id": 0},
    },
    "data": {"sequence_length": 8},
    "train": {},
}
ADAPTED = GPT2 | {"model": GPT2["model"] | {"lora": {"r": 2, "target_modules": ["c_attn"], "fan_in_fan_out": True}}}
SHORT = Length(1, 2, 2, 0.0)


@pytest.fixture(autouse=True)
def _cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answer for CUDA; the device of the runs is the CPU."""
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    for name in ("synchronize", "current_stream", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)
    for name in ("reset_peak_memory_stats", "reset_accumulated_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)
    for name in ("memory_allocated", "max_memory_allocated", "max_memory_reserved"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: 0)
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda *_: {"num_alloc_retries": 0})


def described(model: nn.Module) -> list[tuple[str, tuple[int, ...], torch.dtype, bool]]:
    """Return what counts of the parameters, in their order."""
    return [(name, tuple(one.shape), one.dtype, one.requires_grad) for name, one in model.named_parameters()]


@pytest.mark.parametrize("mapping", [GPT2, ADAPTED], ids=["plain", "adapted"])
def test_a_model_made_on_the_device_has_the_parameters_of_a_built_one(mapping: dict[str, Any]) -> None:
    workload = Workload.from_mapping(mapping)
    made, built = fit_training.on_gpu(workload), build_model(workload)
    assert described(made) == described(built)
    assert not any(one.is_meta for one in (*made.parameters(), *made.buffers()))
    assert all(torch.isfinite(one).all() for one in made.parameters())


def test_settings_run_in_turn_on_one_model() -> None:
    model = fit_training.on_gpu(Workload.from_mapping(GPT2))
    before = dict(model.__dict__)
    for setting in (Setting(4, 1, False), Setting(1, 4, False)):
        found = fit_training.timed_steps(setting.apply(GPT2) | {"name": "x"}, model, SHORT)
        assert found["status"] == "completed" and found["updated"] and len(found["timed_step_seconds"]) == 2
        assert found["samples_per_second"] == 4 / found["step_seconds"]
        fit_training.clear(model)
        assert all(one.grad is None for one in model.parameters())
        assert set(model.__dict__) - set(before) <= {
            "main_input_name",
            "is_gradient_checkpointing",
            "_trainatomy_batch_shapes",
        }


def test_running_out_of_memory_is_an_outcome(monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_from(monkeypatch, 2)
    model = fit_training.on_gpu(Workload.from_mapping(GPT2))
    found = fit_training.timed_steps(Setting(4, 1, False).apply(GPT2), model, SHORT)
    assert found["status"] == "out of memory" and found["samples_per_second"] is None


def test_the_automatic_batch_shrinks_until_it_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_from(monkeypatch, 11)
    model = fit_training.on_gpu(Workload.from_mapping(GPT2))
    found = fit_training.automatic(Setting(16, 1, False).apply(GPT2), model, SHORT)
    assert (found["tried"], found["batch"], found["effective_batch"]) == ([16, 14, 12, 10], 10, 10)
    assert found["seconds_to_answer"] > 0 and len(found["timed_step_seconds"]) == 2


def test_no_batch_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_from(monkeypatch, 1)
    model = fit_training.on_gpu(Workload.from_mapping(GPT2))
    found = fit_training.automatic(Setting(2, 1, False).apply(GPT2), model, SHORT)
    assert (found["status"], found["tried"], found["samples_per_second"]) == ("failed", [2, 1], None)


def refuse_from(monkeypatch: pytest.MonkeyPatch, batch: int) -> None:
    """Let every batch of that many samples and more run out of memory."""
    original = transformers.Trainer.training_step

    def step(self: Any, model: Any, inputs: Any, *rest: Any) -> Any:
        if len(inputs["input_ids"]) >= batch:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 bytes.")
        return original(self, model, inputs, *rest)

    monkeypatch.setattr(transformers.Trainer, "training_step", step)
