"""Defaults of ``train`` that depend on the rest of a workload: checkpointing, which peft switches on."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from trainatomy.workload import Workload
from trainatomy.workload.defaults import default_checkpointing, loop_checkpoints, says_checkpointing

if TYPE_CHECKING:
    from pathlib import Path

FOUR, EIGHT = {"load_in_4bit": True}, {"load_in_8bit": True}
TORCHAO = {"quant_method": "torchao", "quant_type": "Int8WeightOnlyConfig"}
LORA = {"r": 8}


def workload(quantization: dict[str, Any] | None, lora: dict[str, Any] | None = LORA, **sections: Any) -> Workload:
    model = {"id": "openai-community/gpt2", "quantization": quantization, "lora": lora}
    return Workload.from_mapping({"model": model | sections.pop("model", {}), **sections})


@pytest.mark.parametrize("loop", ["trainer", "pytorch"])
@pytest.mark.parametrize("quantization", [FOUR, EIGHT, TORCHAO], ids=["4", "8", "torchao"])
def test_adapters_of_quantised_weights_are_trained_with_checkpointing(quantization: dict[str, Any], loop: str) -> None:
    assert workload(quantization, loop=loop).train.gradient_checkpointing
    assert not workload(quantization, loop=loop, train={"gradient_checkpointing": False}).train.gradient_checkpointing
    unprepared = {**quantization, "prepare_model_for_kbit_training": False}
    if quantization is not TORCHAO:
        assert not workload(unprepared, loop=loop).train.gradient_checkpointing


def test_who_says_how_activations_are_recomputed_says_that_they_are() -> None:
    found = workload(FOUR, train={"gradient_checkpointing_kwargs": {"use_reentrant": False}})
    assert loop_checkpoints(found)
    assert not loop_checkpoints(workload(FOUR))


@pytest.mark.parametrize(
    "other",
    [
        workload(None),
        workload(None, None),
        workload(FOUR, None, mode="inference"),
        workload(FOUR, mode="inference"),
        workload(None, model={"id": None, "class": "GPT2LMHeadModel"}),
    ],
)
def test_all_others_are_trained_without(other: Workload) -> None:
    assert default_checkpointing(other) is False
    assert not other.train.gradient_checkpointing


def test_loops_of_trl_have_their_own_default() -> None:
    for loop in ("sft", "grpo"):
        assert workload(FOUR, loop=loop).train.gradient_checkpointing
        assert workload(None, loop=loop).train.gradient_checkpointing


def test_a_checkpoint_that_is_not_known_decides_later(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    unknown = {"id": str(tmp_path)}, {"config": {"quantization_config": {"load_in_4bit": True}}}
    for model in unknown:
        found = workload(None, model=model)
        assert default_checkpointing(found) is None
        assert not says_checkpointing(found)
        assert says_checkpointing(workload(None, model=model, train={"gradient_checkpointing": False}))


@pytest.mark.parametrize("train", [{}, {"gradient_checkpointing": False}, {"gradient_checkpointing": True}])
@pytest.mark.parametrize("model", [{"quantization": FOUR}, {"id": "somewhere/else"}], ids=["named", "unknown"])
def test_what_was_said_is_written_and_read_again(train: dict[str, Any], model: dict[str, Any]) -> None:
    said = workload(None, model=model, train=train)
    read = Workload.from_mapping(said.to_mapping())
    assert said.to_mapping().get("train", {}).get("gradient_checkpointing") == train.get("gradient_checkpointing")
    assert (read, read.train, says_checkpointing(read)) == (said, said.train, bool(train))


def test_the_default_follows_a_change_of_the_weights() -> None:
    quantised = workload(None).replace("model.quantization", FOUR)
    assert quantised.train.gradient_checkpointing
    assert not quantised.replace("model.quantization", None).train.gradient_checkpointing
    assert not workload(FOUR).replace("train.gradient_checkpointing", False).train.gradient_checkpointing
