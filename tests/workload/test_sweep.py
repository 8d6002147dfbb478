"""Sweeps over any setting: syntax, resulting settings and names of the rows."""

from __future__ import annotations

from typing import Any

import pytest

from trainatomy.errors import WorkloadError
from trainatomy.workload.overrides import FLAGS, Flag
from trainatomy.workload.schema import Workload
from trainatomy.workload.sweep import parse, sweep

BASE = Workload.from_mapping({"name": "base", "model": {"class": "BertModel", "config": {"hidden_size": 64}}})
OTHER = Workload.from_mapping({"model": {"id": "gpt2"}})


def changed(*texts: str) -> list[dict[str, Any]]:
    """Return the differences of each row from the base."""
    mappings = [workload.to_mapping() for workload in sweep([BASE], texts)]
    return [{key: value for key, value in each.items() if value != BASE.to_mapping().get(key)} for each in mappings]


@pytest.mark.parametrize(
    ("text", "section", "values"),
    [
        ("per_device_train_batch_size=1,8", "train", [{}, {}]),
        ("gradient-accumulation-steps=2,4", "train", [{"gradient_accumulation_steps": each} for each in (2, 4)]),
        ("train.optim=adafactor,sgd", "train", [{"optim": each} for each in ("adafactor", "sgd")]),
        ("--bf16=true", "train", [{"bf16": True}]),
        ("data.sequence_length=128, 512", "data", [{"sequence_length": each} for each in (128, 512)]),
        ("gpu=t4,a100", "gpu", ["t4", "a100"]),
        ("model.config.num_hidden_layers=2,4", "model", [{"num_hidden_layers": 2}, {"num_hidden_layers": 4}]),
        ("config.num_hidden_layers=2,4", "model", [{"num_hidden_layers": 2}, {"num_hidden_layers": 4}]),
        ("lora_target_modules=[query,value],all-linear", "model", [["query", "value"], "all-linear"]),
    ],
)
def test_any_setting_can_be_swept(text: str, section: str, values: list[Any]) -> None:
    rows = changed(text)
    assert len(rows) == len(values)
    found = [row[section] for row in rows if section in row]
    if "batch_size" in text:
        found = [each.train.per_device_train_batch_size for each in sweep([BASE], [text])]
        values = [1, 8]
    elif "config" in text:
        assert all(each["config"].pop("hidden_size") == 64 for each in found)
        found = [each["config"] for each in found]
    elif "lora" in text:
        found = [each["lora"]["target_modules"] for each in found]
    assert found == values


@pytest.mark.parametrize("flag", [flag for flag in FLAGS if flag.kind == "pairs"], ids=lambda flag: flag.name)
def test_a_key_of_a_mapping_has_the_name_of_its_flag_or_its_place(flag: Flag) -> None:
    by_name, by_place = (parse(f"{name}.some_key=1,2") for name in (flag.name, ".".join(map(str, flag.path))))
    assert by_name.values == by_place.values


def test_several_sweeps_are_combined_the_last_changing_fastest() -> None:
    names = [each.name for each in sweep([BASE], ["per_device_train_batch_size=1,2", "fp16=true,false"])]
    assert names == [
        "per_device_train_batch_size=1, fp16=true",
        "per_device_train_batch_size=1, fp16=false",
        "per_device_train_batch_size=2, fp16=true",
        "per_device_train_batch_size=2, fp16=false",
    ]


def test_two_keys_of_one_mapping_are_combined() -> None:
    texts = ["model.config.num_hidden_layers=2,4", "model.config.hidden_size=128"]
    configs = [each.to_mapping()["model"]["config"] for each in sweep([BASE], texts)]
    assert configs == [{"hidden_size": 128, "num_hidden_layers": each} for each in (2, 4)]


def test_rows_of_several_workloads_are_prefixed_with_their_names() -> None:
    names = [each.name for each in sweep([BASE, OTHER], ["fp16=true,false"])]
    assert names == ["base, fp16=true", "base, fp16=false", "gpt2, fp16=true", "gpt2, fp16=false"]


def test_nothing_to_sweep_changes_nothing() -> None:
    assert sweep([BASE, OTHER], []) == (BASE, OTHER)


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["fp16"], "KEY=VALUE"),
        (["=1"], "KEY=VALUE"),
        (["fp16="], "KEY=VALUE"),
        (["per_device_train_batch_sise=1"], "did you mean per_device_train_batch_size"),
        (["data.sequence=1"], "unknown setting 'data.sequence'"),
        (["per_device_train_batch_size=many"], "per_device_train_batch_size=many: "),
        (["per_device_train_batch_size=1,,2"], "cannot be read"),
        (["fp16=[true"], "cannot be read"),
        (["fp16={a: b}"], "cannot be read"),
        (["per_device_train_batch_size=1,1"], "twice"),
        (["fp16=true", "train.fp16=false"], "twice"),
        (["model.config.num_hidden_layers=2", "model.config.num_hidden_layers=4"], "twice"),
        (["fsdp=full_shard"], "shards over several GPUs"),
        (["seed=" + ",".join(map(str, range(40))), "max_steps=" + ",".join(map(str, range(1, 41)))], "1,600"),
    ],
)
def test_mistakes_are_named(texts: list[str], message: str) -> None:
    with pytest.raises(WorkloadError) as caught:
        sweep([BASE], texts)
    assert message in str(caught.value) and "--sweep" in str(caught.value)
