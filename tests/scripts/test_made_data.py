"""Rows and images that stand in for data sets that are not on this machine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from trainatomy.catalog.files import read_yaml
from trainatomy.scripts.standins.data import _IMAGES, _made, _MadeImages, _schema

datasets = pytest.importorskip("datasets")
SIZES: Any = SimpleNamespace(samples=8, lengths=20)


def rows(path: str, configuration: str | None = None, split: str | None = None) -> Any:
    schema = _schema(path, configuration)
    assert schema is not None
    return _made(datasets, schema, configuration, split, SIZES)


def test_every_known_data_set_can_be_made() -> None:
    for path, known in read_yaml("datasets.yaml")["datasets"].items():
        for configuration in (None, "de-en", *known.get("configurations", {})):
            if configuration is None and "translation" in known["columns"]:
                continue
            if "image" not in known["columns"].values():
                assert len(rows(path, configuration)["train"]) == 8


@pytest.mark.parametrize(
    ("task", "columns", "split"),
    [
        ("mrpc", ["sentence1", "sentence2", "label", "idx"], "validation"),
        ("sst2", ["sentence", "label", "idx"], "validation"),
        ("mnli", ["premise", "hypothesis", "label", "idx"], "validation_mismatched"),
    ],
)
def test_tasks_of_glue_have_their_own_columns_and_splits(task: str, columns: list[str], split: str) -> None:
    made = rows("nyu-mll/glue", task)
    assert made[split].column_names == columns and ("validation" in made) is (split == "validation")


def test_answers_and_translations_have_their_structure() -> None:
    row = rows("rajpurkar/squad")["train"][3]
    start, text = row["answers"]["answer_start"][0], row["answers"]["text"][0]
    assert row["context"][start:].startswith(text)
    assert set(rows("wmt16", "ro-en", "train")[0]["translation"]) == {"ro", "en"}
    assert isinstance(rows("glue", "stsb")["train"][0]["label"], float)


@pytest.mark.parametrize(
    ("name", "arguments", "options", "count"),
    [
        ("MNIST", (), {}, 60_000),
        ("MNIST", (False, str), {}, 10_000),
        ("CIFAR10", (), {"train": False}, 10_000),
        ("SVHN", (), {"split": "train"}, 73_257),
        ("Food101", ("test",), {}, 25_250),
        ("ImageNet", (), {}, 1_281_167),
    ],
)
def test_made_images_are_as_many_as_the_real_ones(
    name: str, arguments: tuple[Any, ...], options: dict[str, Any], count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_MadeImages, "shape", _IMAGES[name])
    made = _MadeImages("data", *arguments, **options)
    assert len(made) == len(made.targets) == len(made.data) == count
    assert made.data.shape[1] == _IMAGES[name].side


def test_prompts_completions_and_labels_of_preferences() -> None:
    made = rows("trl-lib/kto-mix-14k")["train"]
    first = made[0]
    assert [one["role"] for one in first["prompt"]] == ["user"]
    assert [one["role"] for one in first["completion"]] == ["assistant"]
    assert {row["label"] for row in made} == {True, False}
    assert [one["role"] for one in rows("trl-lib/Capybara")["train"][0]["messages"]] == ["user", "assistant"]
