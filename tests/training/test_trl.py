"""TRL's trainers on the CPU: real steps of a tiny model, with observer events in the documented order."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from trainatomy.training.model import build_model
from trainatomy.training.observer import Silent
from trainatomy.training.run import run
from trainatomy.workload import Workload

pytest.importorskip("trl")
pytest.importorskip("datasets")

LLAMA = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "vocab_size": 500, "eos_token_id": 1,
}  # fmt: skip


class Events(Silent):
    def __init__(self) -> None:
        self.entries: list[str] = []
        self.losses: list[float] = []

    def loaded(self, model: Any) -> None:
        self.entries.append("loaded")

    def reference_loaded(self, model: Any) -> None:
        self.entries.append("reference loaded")

    def ready(self, model: Any, optimizer: Any) -> None:
        self.entries.append("ready")

    def step_begin(self, step: int) -> None:
        self.entries.append(f"step {step}")

    def generation_begin(self, tokens: int) -> None:
        self.entries.append(f"generate {tokens}")

    def generation_end(self) -> None:
        self.entries.append("generated")

    def micro_step_begin(self, micro_step: int) -> None:
        self.entries.append(f"micro {micro_step}")

    def forward_end(self) -> None:
        self.entries.append("forward end")

    def loss_kept(self, loss: torch.Tensor) -> None:
        self.losses.append(float(loss))

    def micro_step_end(self, micro_step: int) -> None:
        self.entries.append(f"micro {micro_step} end")

    def optimizer_begin(self) -> None:
        self.entries.append("optimizer")


@pytest.mark.parametrize(
    ("loop", "data", "settings", "before", "of_a_step"),
    [
        ("sft", {"prompt_length": 4}, {}, [], []),
        ("dpo", {"prompt_length": 4}, {}, ["reference loaded"], []),
        ("grpo", {}, {"num_generations": 2, "max_completion_length": 3}, [], ["generate 3", "generated"]),
    ],
)
def test_the_observer_receives_all_events_in_order(
    loop: str, data: dict[str, Any], settings: dict[str, Any], before: list[str], of_a_step: list[str]
) -> None:
    train = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "bf16": False}
    workload = Workload.from_mapping(
        {
            "model": {"class": "LlamaForCausalLM", "config": LLAMA},
            "loop": loop,
            "data": {"sequence_length": 8, **data},
            "train": train,
            "trl": settings,
        }
    )
    events = Events()
    torch.manual_seed(0)
    run(workload, build_model(workload), device="cpu", steps=2, observer=events)
    micro = [entry for i in range(2) for entry in (f"micro {i}", "forward end", f"micro {i} end")]
    steps = [entry for i in range(2) for entry in (f"step {i}", *of_a_step, *micro, "optimizer")]
    assert events.entries == ["loaded", *before, "ready", *steps]
    assert len(events.losses) == 4
    assert all(torch.tensor(events.losses).isfinite())
