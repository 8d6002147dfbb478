"""Checkpoints in a simulated training: sizes of files, and what saving takes of the GPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from safetensors.torch import save

from trainatomy.api import predict
from trainatomy.errors import WorkloadError
from trainatomy.simulator.saving import safetensors_bytes
from trainatomy.simulator.simulate import simulate
from trainatomy.training.model import build_model
from trainatomy.training.observer import Silent
from trainatomy.training.run import run
from trainatomy.workload import Workload

GPT2 = {"n_embd": 64, "n_layer": 2, "n_head": 2, "vocab_size": 1000, "n_positions": 64}
MIXTRAL = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 1000, "num_local_experts": 4,
}  # fmt: skip


def describe(model: str, config: dict[str, Any], lora: dict[str, Any] | None = None, **train: Any) -> Workload:
    described = {"class": model, "config": config, **({} if lora is None else {"lora": lora})}
    settings = {"save_strategy": "steps", "per_device_train_batch_size": 2, **train}
    return Workload.from_mapping({"model": described, "data": {"sequence_length": 16}, "steps": 2, "train": settings})


class Files(Silent):
    """Keeps the files of the checkpoint that is saved after the first step."""

    def __init__(self) -> None:
        self.sizes: dict[str, int] = {}

    def evaluates_after(self, step: int) -> bool:
        return step == 0

    def saving_end(self, files: Mapping[str, int]) -> None:
        self.sizes = dict(files)


@pytest.mark.parametrize(
    ("model", "config", "lora"),
    [
        ("GPT2LMHeadModel", GPT2, None),
        ("GPT2LMHeadModel", GPT2, {"r": 4, "target_modules": ["c_attn"]}),
        ("MixtralForCausalLM", MIXTRAL, None),
    ],
    ids=["tied", "lora", "experts"],
)
def test_files_are_as_large_as_those_that_are_written(model: str, config: Any, lora: Any) -> None:
    workload = describe(model, config, lora)
    simulation = simulate(workload, workload.resolve_gpu())
    assert simulation.saving is not None
    predicted, real = simulation.saving.files, Files()
    run(workload, build_model(workload), device="cpu", steps=2, observer=real)
    assert predicted.keys() == real.sizes.keys()
    for name, size in predicted.items():
        if name.endswith(".safetensors"):
            assert size == real.sizes[name]
        assert abs(size - real.sizes[name]) < 0.01 * real.sizes[name] + 1024  # zip pads each record


def test_the_size_of_safetensors_counts_header_and_data() -> None:
    tensors = {
        "b": torch.zeros(3, dtype=torch.bfloat16),
        "a": torch.zeros(2, 5),
        "c": torch.zeros(7, dtype=torch.uint8),
    }
    assert safetensors_bytes(tensors, {"format": "pt"}) == len(save(tensors, {"format": "pt"}))


def test_saving_copies_experts_on_the_gpu_and_plain_weights_not() -> None:
    plain = predict(describe("GPT2LMHeadModel", GPT2)).checkpoint
    experts = predict(describe("MixtralForCausalLM", MIXTRAL))
    assert plain is not None and experts.checkpoint is not None
    assert plain.allocated_after_bytes == plain.allocated_before_bytes
    held = experts.memory.components.weights + experts.memory.components.optimizer_states
    assert experts.checkpoint.own_allocated_bytes > held


def test_the_bill_counts_states_and_limits() -> None:
    found = predict(describe("GPT2LMHeadModel", GPT2, save_total_limit=2)).checkpoint
    assert found is not None and found.kept == 2
    assert found.files["optimizer.pt"] > 2 * found.weights_bytes > 0
    alone = predict(describe("GPT2LMHeadModel", GPT2, save_only_model=True)).checkpoint
    assert alone is not None and "optimizer.pt" not in alone.files
    assert predict(describe("GPT2LMHeadModel", GPT2, save_strategy="no")).checkpoint is None


def test_what_is_not_counted_is_named() -> None:
    with pytest.raises(WorkloadError, match="saves no checkpoints"):
        Workload.from_mapping({"model": {"id": "gpt2"}, "loop": "pytorch", "train": {"save_strategy": "steps"}})
    notes = describe("GPT2LMHeadModel", GPT2, resume_from_checkpoint=True).train.notes()
    assert len(notes) == 1 and "states are loaded before the first step" in notes[0]
