"""``data.lengths``: its sources, and what it cannot be combined with."""

import json
from pathlib import Path

import pytest

from trainatomy.errors import WorkloadError
from trainatomy.workload.reading import read
from trainatomy.workload.schema import Workload


def described(data: object, **more: object) -> Workload:
    return Workload.from_mapping({"model": {"id": "gpt2"}, "data": data, **more})


@pytest.mark.parametrize(
    ("name", "text", "column"),
    [
        ("lengths.txt", "128\n256\n128\n", None),
        ("lengths.csv", "128\n256\n128\n", None),
        ("lengths.csv", "length\n128\n256\n128\n", None),
        ("lengths.csv", "name,tokens\na,128\nb,256\nc,128\n", "tokens"),
        ("lengths.tsv", "name\ttokens\na\t128\nb\t256\nc\t128\n", "tokens"),
        ("lengths.json", "[128, 256, 128]", None),
        ("lengths.json", json.dumps({"tokens": [128, 256, 128]}), "tokens"),
        ("lengths.json", json.dumps([{"tokens": 128}, {"tokens": 256}, {"tokens": 128}]), "tokens"),
        ("lengths.jsonl", '{"ids": [1, 2]}\n{"ids": [1]}\n{"ids": [5, 5]}\n', "ids"),
    ],
)
def test_a_file_becomes_a_histogram(tmp_path: Path, name: str, text: str, column: str | None) -> None:
    file = tmp_path / name
    file.write_text(text)
    lengths = described({"lengths": {"file": str(file)} | ({"column": column} if column else {})}).data.lengths
    assert lengths is not None
    assert lengths.histogram == ({1: 1, 2: 2} if column == "ids" else {128: 2, 256: 1})
    assert lengths.count == 3


def test_a_workload_with_lengths_survives_being_written(tmp_path: Path) -> None:
    short = described({"lengths": {128: 2, 256: 1}})
    assert short == described({"lengths": [128, 256, 128]}) == Workload.from_mapping(short.to_mapping())
    file = tmp_path / "w.yaml"
    (tmp_path / "lengths.txt").write_text("128 128 256")
    file.write_text("model: {id: gpt2}\ndata: {lengths: lengths.txt}\n")
    assert read(file).data == short.data


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"lengths": "nowhere.txt"}, "data.lengths: nowhere.txt cannot be read: No such file"),
        ({"lengths": {"distribution": "lognormal"}}, "mean: is needed by distribution: lognormal"),
        ({"lengths": {"distribution": "lognormal", "mean": 150, "sigma": 1}}, "mean of the logarithm, found 150"),
        ({"lengths": {"distribution": "uniform", "minimum": 9, "maximum": 5}}, "is 9, above the maximum of 5"),
        ({"lengths": {"histogram": {5: 1}, "mean": 3}}, "mean: belongs to a distribution, not to a histogram"),
        ({"lengths": {"samples": 3}}, "needs one of file, histogram and distribution; found none"),
        ({"lengths": [0, 5]}, "must be at least 1, found 0"),
        ({"packing": True}, "data.packing: needs `lengths`"),
        ({"padding": "longest"}, "data.padding: needs `lengths`"),
        ({"lengths": [5], "packing": True}, "data.packing: cuts packs of `sequence_length` tokens: give it"),
        ({"lengths": [5], "padding": "max_length"}, "max_length is `sequence_length`: give it"),
        ({"lengths": [5], "padding_free": True, "pad_to_multiple_of": 8}, "does not apply with padding_free"),
        ({"lengths": [5], "factory": "a.b:c"}, "data.lengths: cannot be combined with `factory`"),
    ],
)
def test_wrong_descriptions_are_refused_by_name(data: dict, message: str) -> None:
    with pytest.raises(WorkloadError, match=message.replace("(", r"\(").replace(".", r"\.")):
        described(data)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"mode": "inference"}, "data.lengths: are those of a training"),
        ({"train": {"torch_empty_cache_steps": 3}}, "train.torch_empty_cache_steps: cannot be combined"),
        ({"train": {"group_by_length": True}}, "train_sampling_strategy: group_by_length"),
        ({"train": {"train_sampling_strategy": "batch_rebalance"}}, "train.train_sampling_strategy: must be"),
    ],
)
def test_what_is_not_simulated_with_lengths_is_refused(more: dict, message: str) -> None:
    with pytest.raises(WorkloadError, match=message):
        described({"lengths": [5, 6]}, **more)


def test_flags_set_lengths() -> None:
    from trainatomy.workload.overrides import RawWorkload

    flags = {"model": "gpt2", "lengths_distribution": "uniform", "lengths_minimum": "5", "lengths_maximum": "9"}
    found = RawWorkload.of(None).with_flags({**flags, "pad_to_multiple_of": "8", "padding": "longest"}).validate()
    assert found.data.lengths is not None
    assert (found.data.lengths.distribution, found.data.pad_to_multiple_of, found.data.padding) == (
        "uniform",
        8,
        "longest",
    )
    assert RawWorkload.of(None).with_flags({"model": "gpt2", "padding": "true"}).validate().data.padding is True
