"""Changed copies of a workload, and several sources validated once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from trainatomy.errors import WorkloadError
from trainatomy.workload import Workload, merge, read_all
from trainatomy.workload.schema import MAX_STEPS

BASE = Workload.from_mapping({
    "model": {"id": "gpt2", "config": {"n_layer": 2}},
    "train": {"bf16": True, "output_dir": "x"},
    "gpu": "h100",
})  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"train.per_device_train_batch_size": 8}, {"train": {"bf16": True}}),
        ({"train.per_device_train_batch_size": 4}, {"train": {"bf16": True, "per_device_train_batch_size": 4}}),
        ({"train.fp16": True}, {"train": {"fp16": True}}),
        ({"train.bf16": False, "gpu": "t4"}, {"gpu": "t4"}),
        ({"gpu.memory_bytes": "1 GiB"}, {"gpu": {"base": "h100", "memory_bytes": 2**30}}),
        ({"model.config.n_head": 3}, {"model": {"id": "gpt2", "config": {"n_layer": 2, "n_head": 3}}}),
        ({"model.config": {"n_head": 3}}, {"model": {"id": "gpt2", "config": {"n_head": 3}}}),
        ({"model.lora": {"r": 4}}, {"model": {"id": "gpt2", "config": {"n_layer": 2}, "lora": {"r": 4}}}),
    ],
)  # fmt: skip
def test_keys_are_replaced_and_validated(changes: dict[str, Any], expected: dict[str, Any]) -> None:
    original = BASE.to_mapping()
    rest = {key: value for key, value in original.items() if key not in expected}
    if "train" not in expected and "train.bf16" in changes:
        rest.pop("train")
    changed = BASE.replace(changes)
    assert changed.to_mapping() == {**rest, **expected}
    assert changed.train.ignored == ("output_dir",)
    assert BASE.to_mapping() == original


def test_what_needs_a_setting_goes_when_it_is_switched_off() -> None:
    every = BASE.replace({"train.gradient_checkpointing": True, "train.gradient_checkpointing_every": 3})
    assert every.replace("train.gradient_checkpointing", False) == BASE
    assert merge(every, {"gradient_checkpointing": "false"}) == BASE
    assert every.replace("train.gradient_checkpointing", True) == every
    with pytest.raises(WorkloadError, match="needs gradient_checkpointing: true"):
        every.replace({"train.gradient_checkpointing": False, "train.gradient_checkpointing_every": 2})


def test_one_key_needs_no_mapping_and_the_gpu_follows() -> None:
    assert BASE.resolve_gpu() is BASE.resolve_gpu()
    changed = BASE.replace("gpu", "a100-40gb")
    assert (changed.resolve_gpu().id, BASE.resolve_gpu().id) == ("a100-40gb", "h100-sxm")


@pytest.mark.parametrize(
    ("key", "value", "problem"),
    [
        (
            "train.per_device_train_batch_sise",
            8,
            "unknown key; did you mean per_device_train_batch_size or per_device_eval_batch_size?",
        ),
        ("train.batch_size", 8, "unknown key; did you mean per_device_train_batch_size?"),
        ("per_device_train_batch_size", 8, "unknown key here; it belongs under `train`"),
        ("train.per_device_train_batch_size", "many", "must be a whole number, found 'many'"),
        ("train.per_device_train_batch_size", 10**9, "is too large for any GPU: 1,000,000,000 samples"),
        (
            "train.gradient_accumulation_steps",
            10**6,
            "1,000,000 micro-batches are more than are simulated in a step (10,000): use larger ones",
        ),
        ("train", 3, "must be a mapping of names to values, found 3"),
        ("steps", 10_000_000, f"must be at most {MAX_STEPS}, found 10000000"),
        ("software.torch", "1.0", "torch 1.0 cannot be simulated: rules are known from torch 1.10 on"),
    ],
)
def test_an_invalid_replacement_names_its_key(key: str, value: Any, problem: str) -> None:
    with pytest.raises(WorkloadError) as caught:
        BASE.replace(key, value)
    assert str(caught.value) == f"{key}: {problem}"
    assert caught.value.key == key


def test_several_mistakes_have_no_single_key() -> None:
    with pytest.raises(WorkloadError) as caught:
        BASE.replace({"steps": 0, "train.fp61": True})
    assert len(str(caught.value).splitlines()) == 2
    assert caught.value.key is None


def test_a_file_and_flags_are_validated_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "w.yaml"
    file.write_text("model: {id: gpt2}\nrows: [{name: a}, {name: b, train: {fp16: true, output_dir: x}}]\n")
    validated: list[Any] = []
    validate = Workload.model_validate
    monkeypatch.setattr(Workload, "model_validate", lambda mapping: validated.append(mapping) or validate(mapping))
    first, second = read_all(file, {"bf16": True, "logging_steps": 3})
    assert len(validated) == 2
    assert (first.train.bf16, second.train.bf16, second.train.fp16) == (True, True, False)
    assert second.train.ignored == ("output_dir", "logging_steps")


def test_mistakes_of_a_file_and_of_flags_are_reported_together(tmp_path: Path) -> None:
    file = tmp_path / "w.yaml"
    file.write_text("model: {id: gpt2}\ndata: 3\ntrain: {class_: 1, max_grad_norm: big}\n")
    with pytest.raises(WorkloadError) as caught:
        read_all(file, {"sequence_length": 4, "fp61": True, "steps": 0})
    places = [line.removeprefix(str(tmp_path)).partition(": ")[0] for line in str(caught.value).splitlines()]
    assert sorted(places) == ["--fp61", "--steps", "/w.yaml:2", "/w.yaml:3", "/w.yaml:3"]


def test_names_of_other_tools_are_understood() -> None:
    with pytest.raises(WorkloadError, match="did you mean learning_rate"):
        merge(BASE, {"lr": 1e-3})


def test_a_workload_stays_frozen() -> None:
    with pytest.raises(ValidationError):
        BASE.gpu = "t4"  # type: ignore[misc]
