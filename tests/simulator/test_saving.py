"""Checkpoints in a simulated training: sizes of files, and what saving takes of the GPU."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from executed import predicted
from safetensors.torch import save

from trainatomy.errors import WorkloadError
from trainatomy.simulator.evaluation import safetensors_bytes
from trainatomy.simulator.simulate import simulate
from trainatomy.training.model import build_model
from trainatomy.training.observer import Observer
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


class Files(Observer):
    """Keeps the files of the checkpoint that is saved after the first step."""

    def __init__(self) -> None:
        self.sizes: dict[str, int] = {}

    def evaluates_after(self, step: int) -> bool:
        return step == 0

    def saving_end(self, files: Mapping[str, int], folder: Path) -> None:
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
    plain = predicted(describe("GPT2LMHeadModel", GPT2)).checkpoint
    experts = predicted(describe("MixtralForCausalLM", MIXTRAL))
    assert plain is not None and experts.checkpoint is not None
    assert plain.allocated_after_bytes == plain.allocated_before_bytes
    held = experts.memory.components.weights + experts.memory.components.optimizer_states
    assert experts.checkpoint.own_allocated_bytes > held


def test_the_bill_counts_states_and_limits() -> None:
    found = predicted(describe("GPT2LMHeadModel", GPT2, save_total_limit=2)).checkpoint
    assert found is not None and found.kept == 2
    assert found.files["optimizer.pt"] > 2 * found.weights_bytes > 0
    alone = predicted(describe("GPT2LMHeadModel", GPT2, save_only_model=True)).checkpoint
    assert alone is not None and "optimizer.pt" not in alone.files
    assert predicted(describe("GPT2LMHeadModel", GPT2, save_strategy="no")).checkpoint is None


def test_what_is_not_counted_is_named() -> None:
    with pytest.raises(WorkloadError, match="saves no checkpoints"):
        Workload.from_mapping({"model": {"id": "gpt2"}, "loop": "pytorch", "train": {"save_strategy": "steps"}})


def test_saving_copies_a_file_of_weights_to_the_host_and_states_one_by_one() -> None:
    found = predicted(describe("GPT2LMHeadModel", GPT2)).checkpoint
    assert found is not None and found.host_bytes is not None
    assert 0 <= found.weights_bytes - found.host_bytes < 8192  # the header


ADAPTERS = {"r": 4, "target_modules": ["c_attn"]}


@pytest.mark.parametrize("lora", [None, ADAPTERS], ids=["whole", "lora"])
def test_a_resumed_training_holds_its_states_before_the_first_step(lora: Any) -> None:
    workload = describe("GPT2LMHeadModel", GPT2, lora, save_strategy="no")
    plain, resumed = predicted(workload), predicted(workload.replace("train.resume_from_checkpoint", True))
    (found,) = resumed.restored
    assert plain.restored == ()
    assert resumed.memory.components.optimizer_states == plain.memory.components.optimizer_states > 0
    before = found.allocated_after_bytes - found.allocated_before_bytes
    assert before >= resumed.memory.components.optimizer_states
    assert resumed.memory.peak_allocated_bytes == plain.memory.peak_allocated_bytes
    assert found.purpose == "resume" and found.host_bytes is not None and found.host_bytes > before // 2


def test_loaded_states_share_no_tables_and_are_not_paged() -> None:
    wide = {**GPT2, "vocab_size": 4000}

    def added(optim: str) -> int:
        workload = describe("GPT2LMHeadModel", wide, save_strategy="no", optim=optim)
        resumed = workload.replace("train.resume_from_checkpoint", True)
        states = [predicted(each).memory.components.optimizer_states for each in (workload, resumed)]
        return states[1] - states[0]

    assert added("adamw_bnb_8bit") % 1024 == 0 < added("adamw_bnb_8bit")  # a table of 256 fp32 for each state
    assert added("paged_adamw_32bit") == 2 * 4 * 4000 * 64


def test_paged_states_are_noted_with_what_the_gpu_may_show() -> None:
    def paged(**train: Any) -> list[str]:
        found = predicted(describe("GPT2LMHeadModel", {**GPT2, "vocab_size": 4000}, save_strategy="no", **train)).notes
        return [note for note in found if "paged optimizer states" in note]

    (note,) = paged(optim="paged_adamw_32bit")
    assert note.startswith("2.0 MiB of paged") and "up to 128 MiB more" in note
    assert paged(optim="adamw_bnb_8bit") == []


def test_a_checkpoint_without_states_restores_none() -> None:
    (found,) = predicted(
        describe("GPT2LMHeadModel", GPT2, save_only_model=True, resume_from_checkpoint="earlier/checkpoint-500")
    ).restored
    assert found.allocated_after_bytes == found.allocated_before_bytes


@pytest.mark.parametrize(("lora", "is_on_gpu"), [(None, False), (ADAPTERS, True)], ids=["whole", "lora"])
def test_the_best_model_is_read_by_the_host_and_adapters_by_the_gpu(lora: Any, is_on_gpu: bool) -> None:
    workload = describe("GPT2LMHeadModel", GPT2, lora, load_best_model_at_end=True, eval_strategy="steps")
    simulation = simulate(workload, workload.resolve_gpu())
    assert simulation.saving is not None
    weights = {name: size for name, size in simulation.saving.files.items() if name.endswith(".safetensors")}
    restored = simulation.restored["best"]
    assert restored.host_bytes == sum(weights.values())
    events = [simulation.trace.events[number] for number in restored.events]
    loaded = sum(event.bytes for event in events if event.action == "alloc")
    assert (loaded > 0) is is_on_gpu
    assert loaded < 2 * sum(weights.values())


def test_a_real_checkpoint_is_resumed_and_the_best_model_loaded(tmp_path: Path) -> None:
    class Copied(Files):
        def saving_end(self, files: Mapping[str, int], folder: Path) -> None:
            super().saving_end(files, folder)
            folder.rename(tmp_path / "checkpoint")

    workload = describe("GPT2LMHeadModel", GPT2)
    run(workload, build_model(workload), device="cpu", steps=2, observer=Copied())
    seen: list[Any] = []

    class Events(Files):
        def step_begin(self, step: int) -> None:
            seen.append(step)

        def restoring_begin(self, purpose: str) -> None:
            seen.append(purpose)

    again = workload.replace(
        {
            "train.resume_from_checkpoint": str(tmp_path / "checkpoint"),
            "train.load_best_model_at_end": True,
            "train.eval_strategy": "steps",
        }
    )
    run(again, build_model(again), device="cpu", steps=2, observer=Events())
    assert seen == ["resume", "resume", 0, 1, "best"]


@pytest.mark.parametrize("given", [True, "nowhere"])
def test_a_measurement_needs_a_real_checkpoint(given: Any) -> None:
    workload = describe("GPT2LMHeadModel", GPT2, resume_from_checkpoint=given)
    with pytest.raises(WorkloadError, match="a measurement needs the folder of a checkpoint"):
        run(workload, build_model(workload), device="cpu", steps=1, observer=Observer())


@pytest.mark.parametrize(
    ("train", "message"),
    [
        ({"load_best_model_at_end": True}, "needs eval_strategy and save_strategy to be equal, found no and steps"),
        ({"load_best_model_at_end": True, "eval_strategy": "epoch", "save_strategy": "steps"}, "found epoch and steps"),
    ],
)
def test_a_best_model_needs_evaluations(train: dict[str, Any], message: str) -> None:
    with pytest.raises(WorkloadError, match=message):
        Workload.from_mapping({"model": {"id": "gpt2"}, "train": train})


def test_a_plain_loop_loads_no_checkpoints() -> None:
    with pytest.raises(WorkloadError, match=r"train\.resume_from_checkpoint: .* saves no checkpoints"):
        Workload.from_mapping({"model": {"id": "gpt2"}, "loop": "pytorch", "train": {"resume_from_checkpoint": True}})


def test_ranks_of_ddp_resume_as_one_gpu_does() -> None:
    alone = describe("GPT2LMHeadModel", GPT2, save_strategy="no", resume_from_checkpoint=True)
    found, several = predicted(alone), predicted(alone.replace("parallel.gpus", 2))
    (one,), (other,) = found.restored, several.restored
    assert (one.purpose, one.host_bytes) == (other.purpose, other.host_bytes)
    assert several.memory.components.optimizer_states == found.memory.components.optimizer_states
