"""Flags: derived from the schema, over a file or alone."""

# ruff: noqa: E501 - tables read better in long lines

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from trainatomy.errors import WorkloadError
from trainatomy.workload import FLAGS, Workload, merge, read
from trainatomy.workload.overrides import BY_NAME

if TYPE_CHECKING:
    from pathlib import Path

BASE = Workload.from_mapping({"model": {"id": "gpt2"}, "train": {"bf16": True}, "gpu": "h100"})


def refusal(base: Workload | None, overrides: dict[str, Any]) -> list[str]:
    with pytest.raises(WorkloadError) as error:
        merge(base, overrides)
    return str(error.value).splitlines()


def test_names_are_unique_and_every_flag_sets_its_key() -> None:
    assert len(BY_NAME) == sum(1 + len(flag.aliases) for flag in FLAGS)
    assert len({flag.path for flag in FLAGS}) == len(FLAGS)


def test_flags_carry_the_names_of_training_arguments() -> None:
    flag = BY_NAME["per_device_train_batch_size"]
    assert flag.option == "--per-device-train-batch-size"
    assert (flag.kind, flag.panel, flag.metavar) == ("integer", "TrainingArguments", "INT")
    assert {name: BY_NAME[name].kind for name in ("fp16", "tf32", "config", "lora_target_modules", "dtype", "optim")} == {
        "fp16": "switch", "tf32": "switch", "config": "pairs", "lora_target_modules": "list", "dtype": "choice", "optim": "text",
    }  # fmt: skip


def test_flags_alone_describe_a_training() -> None:
    typed = {
        "--model": "google-bert/bert-large-uncased", "--sequence-length": "512", "--per-device-train-batch-size": "4",
        "--gradient_accumulation_steps": "4", "gradient-checkpointing": True, "fp16": "true", "optim": "adafactor",
        "gpu": "v100-16gb", "bf16": None, "config": (), "class": "BertForSequenceClassification",
    }  # fmt: skip
    assert merge(None, typed).to_mapping() == {
        "model": {"id": "google-bert/bert-large-uncased", "class": "BertForSequenceClassification"},
        "data": {"sequence_length": 512},
        "train": {
            "per_device_train_batch_size": 4, "gradient_accumulation_steps": 4, "gradient_checkpointing": True,
            "fp16": True, "optim": "adafactor",
        },
        "gpu": "v100-16gb",
    }  # fmt: skip


def test_no_flags_change_nothing() -> None:
    assert merge(BASE, {}) == BASE
    assert merge(BASE, {"fp16": None, "freeze": ()}) == BASE


@pytest.mark.parametrize(
    ("overrides", "path", "value"),
    [
        ({"bf16": False}, ("train", "bf16"), False),
        ({"bf16": "false"}, ("train", "bf16"), False),
        ({"fp16": True}, ("train", "bf16"), False),
        ({"fp16": "no"}, ("train", "bf16"), True),
        ({"gpu": "t4"}, ("gpu",), "t4"),
        ({"learning_rate": "1e-3"}, ("train", "learning_rate"), 1e-3),
        ({"config": ["num_hidden_layers=2", "a.b=[1, x]"]}, ("model", "config"), {"num_hidden_layers": 2, "a": {"b": [1, "x"]}}),
        ({"config": {"n_layer": 2}}, ("model", "config"), {"n_layer": 2}),
        ({"lora_r": 4}, ("model", "lora", "r"), 4),
        ({"lora_target_modules": "q_proj,v_proj"}, ("model", "lora", "target_modules"), ("q_proj", "v_proj")),
        ({"lora_target_modules": ("q_proj", "v_proj")}, ("model", "lora", "target_modules"), ("q_proj", "v_proj")),
        ({"lora_target_modules": ["all-linear"]}, ("model", "lora", "target_modules"), "all-linear"),
        ({"lora_target_modules": r".*\.(q|v)_proj"}, ("model", "lora", "target_modules"), r".*\.(q|v)_proj"),
        ({"gradient_checkpointing_kwargs": "use_reentrant=false"}, ("train", "gradient_checkpointing_kwargs"), {"use_reentrant": False}),
        ({"torch": "2.10"}, ("software", "torch"), "2.10"),
    ],
)  # fmt: skip
def test_flags_override_the_file(overrides: dict[str, Any], path: tuple[str, ...], value: Any) -> None:
    found: Any = merge(BASE, overrides)
    for key in path:
        found = getattr(found, key)
    assert found == value
    assert BASE.train.bf16 and BASE.model.lora is None  # the workload of the file is unchanged


def test_configuration_is_laid_over_the_file() -> None:
    base = merge(BASE, {"config": ["a=1", "b=2"]})
    assert merge(base, {"config": ["b=3"]}).model.config == {"a": 1, "b": 3}


def test_the_gpu_of_a_file_can_be_changed() -> None:
    changed = merge(BASE, {"gpu_memory_bytes": "1 TiB"})
    assert changed.resolve_gpu().memory_bytes == 2**40
    assert changed.resolve_gpu().capability == (9, 0)
    assert merge(changed, {"gpu": "t4"}).gpu == "t4"


def test_a_factory_replaces_the_model_of_the_file_and_vice_versa(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    made = merge(
        merge(BASE, {"dtype": "bf16", "sequence_length": 8}),
        {"model_factory": "net.py:build", "data_factory": "net.py:batch"},
    )
    assert (made.model.id, made.model.dtype, made.data.sequence_length) == (None, "auto", None)
    assert made.model.factory == f"{tmp_path.resolve()}/net.py:build"
    named = merge(made, {"model": "gpt2", "sequence_length": 4})
    assert (named.model.factory, named.data.factory, named.model.id) == (None, None, "gpt2")


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ({"fp61": True}, ["--fp61: unknown flag; did you mean fp16?"]),
        ({"fp16": True, "bf16": True}, ["--fp16: cannot be combined with bf16: choose one precision"]),
        ({"per_device_train_batch_size": "0"}, ["--per-device-train-batch-size: must be at least 1, found '0'"]),
        ({"per_device_train_batch_size": "four"}, ["--per-device-train-batch-size: must be a whole number, found 'four'"]),
        ({"config": "num_labels"}, ["--config: must look like KEY=VALUE, found 'num_labels'"]),
        ({"config": "a=[1"}, ["--config: the value of a cannot be read: '[1'"]),
        ({"model": "x", "model_factory": "a:b"}, ["--model: cannot be combined with `factory`, which builds the model"]),
        ({"fsdp": "full_shard"}, ["--fsdp: shards over several GPUs: set parallel.gpus"]),
        ({"per_gpu_train_batch_size": 1}, ["--per-gpu-train-batch-size: is called per_device_train_batch_size today"]),
        ({"gradient_checkpointing_kwargs": ["use_reentrant=maybe"]}, ["--gradient-checkpointing-kwargs: use_reentrant: must be true or false, found 'maybe'"]),
        ({"gpu": "h1000"}, None),
        ({"steps": 0, "fp61": 1}, ["--fp61: unknown flag; did you mean fp16?", "--steps: must be at least 1, found 0"]),
    ],
)  # fmt: skip
def test_mistakes_name_the_flag(overrides: dict[str, Any], expected: list[str] | None) -> None:
    found = refusal(BASE, overrides)
    assert found == expected if expected else found[0].startswith("--gpu: unknown GPU 'h1000'; did you mean h100")


def test_a_missing_model_lists_the_flags_that_select_one() -> None:
    (line,) = refusal(None, {"fp16": True})
    assert line.startswith("no model: give --model,")


def test_arguments_that_change_nothing_are_accepted_as_flags() -> None:
    merged = merge(merge(BASE, {"output_dir": "x"}), {"--logging-steps": "10", "steps": 2})
    assert merged.train.ignored == ("output_dir", "logging_steps")


def test_a_key_remembers_whether_the_file_or_a_flag_set_it(tmp_path: Path) -> None:
    file = tmp_path / "w.yaml"
    file.write_text("model: {id: gpt2}\ndata:\n  sequence_length: 99\n  target_length: 9\n")
    merged = merge(read(file), {"sequence_length": 4096})
    assert merged.where("data", "sequence_length") == "--sequence-length"
    assert merged.where("data", "target_length") == f"{file}:4: data.target_length"


@pytest.mark.parametrize(("typed", "value"), [("true", True), ("false", None), ("full_shard", ("full_shard",))])
def test_fsdp_is_switched_on_as_it_is_typed(typed: str, value: Any) -> None:
    assert merge(None, {"model": "gpt2", "gpus": "2", "fsdp": typed}).train.fsdp == value
