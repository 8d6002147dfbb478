"""The section ``trl``: settings of TRL's configurations, their defaults, and what is refused."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from trainatomy.errors import WorkloadError
from trainatomy.simulator.simulate import steps_needed
from trainatomy.workload import Workload
from trainatomy.workload.loops import LOOPS
from trainatomy.workload.trl import trl_settings


def describe(loop: str = "sft", **sections: Any) -> Workload:
    return Workload.from_mapping({"model": {"id": "gpt2"}, "loop": loop, **sections})


def test_the_defaults_are_those_of_trls_configurations() -> None:
    train = describe().train
    assert (train.bf16, train.gradient_checkpointing, train.learning_rate) == (True, True, 2e-5)
    assert describe("grpo").train.learning_rate == 1e-6
    assert describe("reward").train.learning_rate == 1e-4
    assert describe("kto", data={"prompt_length": 4}).train.train_sampling_strategy == "sequential"
    assert describe("trainer").train.bf16 is False
    assert describe(mode="inference").train.bf16 is False


def test_another_precision_replaces_the_default_one() -> None:
    train = describe(train={"fp16": True}).train
    assert (train.fp16, train.bf16) == (True, False)


def test_a_default_that_is_switched_off_stays_off_when_the_workload_is_written() -> None:
    workload = describe(train={"bf16": False, "gradient_checkpointing": False})
    again = Workload.from_mapping(workload.to_mapping())
    assert (again.train.bf16, again.train.gradient_checkpointing) == (False, False)
    assert again == workload
    assert describe().replace("train.bf16", False).train.bf16 is False


@pytest.mark.parametrize(
    ("loop", "sections", "message"),
    [
        ("grpo", {"trl": {"use_vllm": True}}, "trl.use_vllm: not supported: vLLM"),
        (
            "sft",
            {"activation_offloading": "pinned"},
            "activation_offloading: is for loop: pytorch; with loop: sft there is trl.activation_offloading",
        ),
        ("sft", {"trl": {"packin": True}}, "trl.packin: unknown key; did you mean packing"),
        ("trainer", {"trl": {"packing": True}}, "trl: needs a loop of TRL"),
        ("trainer", {"data": {"prompt_length": 4}}, "data.prompt_length: is of loop: sft, dpo, kto and preference"),
        ("dpo", {}, "data.prompt_length: loop: dpo scores the tokens after the prompt"),
        ("sft", {"data": {"prompt_length": 9, "sequence_length": 9}}, "data.prompt_length: must be below"),
        ("grpo", {"data": {"prompt_length": 9}}, "data.prompt_length: does not apply to loop: grpo"),
        ("kto", {}, "data.prompt_length: loop: kto scores the tokens after the prompt"),
        ("reward", {"data": {"prompt_length": 9}}, "data.prompt_length: does not apply to loop: reward"),
        (
            "kto",
            {"data": {"prompt_length": 9}, "train": {"train_sampling_strategy": "random"}},
            "train.train_sampling_strategy: loop: kto pairs each prompt with the answer beside it",
        ),
        (
            "kto",
            {"data": {"prompt_length": 9}, "train": {"per_device_train_batch_size": 1}},
            "train.per_device_train_batch_size: must be at least 2 with loop: kto",
        ),
        (
            "dpo",
            {"data": {"prompt_length": 9}, "train": {"train_sampling_strategy": "group_by_length"}},
            "train.train_sampling_strategy: group_by_length needs input_ids",
        ),
        ("sft", {"trl": {"packing": True, "max_length": None}}, "trl.max_length: is the length of packs"),
        ("sft", {"trl": {"padding_free": True}}, "trl.padding_free: needs trl.max_length: null without packing"),
        ("grpo", {"activation_offloading": "pinned"}, "with loop: grpo there is train.gradient_checkpointing_kwargs"),
        ("kto", {"trl": {"sync_ref_model": True}}, "trl.sync_ref_model: not supported"),
        ("sft", {"data": {"padding": True}}, "data.padding: is not simulated with loop: sft"),
        ("grpo", {"train": {"eval_strategy": "steps"}}, "train.eval_strategy: is not simulated with loop: grpo"),
        ("sft", {"train": {"predict_with_generate": True}}, "train.predict_with_generate: is not simulated with TRL"),
        ("sft", {"data": {"compute_metrics": True}}, "data.compute_metrics: is not simulated with loop: sft"),
        ("sft", {"parallel": {"gpus": 2, "tp_size": 2}}, "parallel.tp_size: is not simulated with TRL's trainers"),
        (
            "dpo",
            {"parallel": {"gpus": 2, "strategy": "dp"}},
            "parallel.strategy: DataParallel is not simulated with TRL",
        ),
        ("dpo", {"parallel": {"gpus": 2, "strategy": "fsdp2"}}, "parallel.strategy: belongs to loop: pytorch"),
        (
            "grpo",
            {"parallel": {"gpus": 2}, "train": {"fsdp": True}},
            "train.fsdp: loop: grpo is simulated .* with DDP only",
        ),
        (
            "dpo",
            {"parallel": {"gpus": 2}, "train": {"fsdp": True}, "trl": {"precompute_ref_log_probs": True}},
            "trl.precompute_ref_log_probs: with FSDP",
        ),
        ("dpo", {"data": {"sequence_length": 2048, "prompt_length": 1024}}, "leaves out those that are all prompt"),
        ("reward", {"data": {"sequence_length": 2048}}, "leaves out samples of more than 1024 tokens"),
    ],
)
def test_what_is_not_simulated_is_refused_by_name(loop: str, sections: dict[str, Any], message: str) -> None:
    with pytest.raises(WorkloadError, match=message):
        describe(loop, **sections)


@pytest.mark.parametrize(
    ("loop", "sections", "reason"),
    [
        ("grpo", {}, "loop: grpo, whose answers"),
        ("kto", {"data": {"prompt_length": 4}}, "loop: kto, whose step also depends on"),
        ("dpo", {"data": {"prompt_length": 4}, "trl": {"precompute_ref_log_probs": True}}, "trl.precompute_ref_log"),
        (
            "sft",
            {"data": {"prompt_length": 4}, "trl": {"packing": True, "packing_strategy": "wrapped"}},
            "data.prompt_length and trl.packing_strategy: wrapped",
        ),
        (
            "sft",
            {"train": {"train_sampling_strategy": "sequential"}, "trl": {"shuffle_dataset": True}},
            "trl.shuffle_dataset in the order of the samples",
        ),
    ],
)
def test_lengths_are_refused_where_a_step_depends_on_more(loop: str, sections: dict[str, Any], reason: str) -> None:
    data = {"lengths": [5, 9], **sections.get("data", {})}
    with pytest.raises(WorkloadError, match=f"data.lengths: are not simulated with {reason}"):
        describe(loop, **{**sections, "data": data})


@pytest.mark.parametrize("name", ["packing", "padding_free", "pad_to_multiple_of"])
def test_batches_that_trl_makes_are_described_by_its_settings(name: str) -> None:
    data = {"lengths": [5, 9], "sequence_length": 9, name: 8 if name == "pad_to_multiple_of" else True}
    with pytest.raises(WorkloadError, match=rf"data\.{name}: TRL makes the batches of loop: sft: give trl\.{name}"):
        describe(data=data)


@pytest.mark.parametrize("loop", [name for name, loop in LOOPS.items() if loop.settings])
def test_every_setting_of_trls_configurations_has_a_decision(loop: str) -> None:
    trl = pytest.importorskip("trl")
    from transformers import TrainingArguments

    theirs = {field.name for field in dataclasses.fields(TrainingArguments)}
    own = {field.name for field in dataclasses.fields(getattr(trl, str(LOOPS[loop].settings)))} - theirs
    assert own - trl_settings().names() == set()


def test_values_that_change_nothing_are_accepted() -> None:
    describe("grpo", trl={"use_vllm": False, "vllm_mode": "colocate", "log_completions": True})


@pytest.mark.parametrize(
    ("settings", "accumulation", "steps"),
    [
        ({}, 4, 2),
        ({"steps_per_generation": 8}, 2, 5),
        ({"num_iterations": 2}, 1, 3),
        ({"generation_batch_size": 32}, 2, 3),
    ],
)
def test_grpo_is_executed_until_it_generates_again(settings: dict[str, Any], accumulation: int, steps: int) -> None:
    train = {"gradient_accumulation_steps": accumulation, "per_device_train_batch_size": 8}
    assert steps_needed(describe("grpo", trl=settings, train=train)) == steps
