"""Selecting records, and resolving a reference to one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from trainatomy.errors import TrainatomyError
from trainatomy.records.query import Query, resolve, split_path
from trainatomy.records.store import Store
from trainatomy.results.record import Record

IDS = ("20261120-090000000-aaaa0001", "20261121-090000000-aaab0002", "20261121-100000000-bbbb0003")


@pytest.fixture
def four(store: Store, vanilla: Record, checkpointed: Record, fp16: Record, failed: Record) -> Store:
    for record in (failed, fp16, replace(checkpointed, group="nine"), vanilla):
        store.write(record)
    return store


@pytest.mark.parametrize(
    ("query", "names"),
    [
        (Query(), ["notebook-vanilla", "notebook-ckpt", "notebook-fp16", "too big"]),
        (Query(gpu="h200"), ["notebook-vanilla", "notebook-ckpt", "notebook-fp16"]),
        (Query(gpu="RTX"), ["too big"]),
        (Query(name="FP16"), ["notebook-fp16"]),
        (Query(status="out"), ["too big"]),
        (Query(status="completed", last=1), ["notebook-fp16"]),
        (Query(since="2026-11-22"), ["too big"]),
        (Query(since="2026-11-21T12:30"), ["notebook-fp16", "too big"]),
        (Query(since="2026-11-21T14:30:00+01:00"), ["too big"]),
        (Query(since="2026-11-21T13:30:00+01:00"), ["notebook-fp16", "too big"]),
        (Query(group="nine"), ["notebook-ckpt"]),
        (Query(group=""), ["notebook-vanilla", "notebook-fp16", "too big"]),
        (Query(last=2), ["notebook-fp16", "too big"]),
        (Query(last=9), ["notebook-vanilla", "notebook-ckpt", "notebook-fp16", "too big"]),
        (Query(where=("train.fp16=true",)), ["notebook-fp16"]),
        (Query(where=("train.fp16=false", "train.gradient_checkpointing=true")), ["notebook-ckpt"]),
        (Query(where=("train.per_device_train_batch_size=4",)), ["notebook-vanilla", "notebook-fp16", "too big"]),
        (Query(where=("train.per_device_train_batch_size = 4.0",), last=1), ["too big"]),
        (Query(where=("train.adam_epsilon=1e-8",), last=1), ["too big"]),
        (Query(where=("train.adam_epsilon=1e-7",)), []),
        (Query(where=("model.id=google-bert/bert-large-uncased",), gpu="h200", last=1), ["notebook-fp16"]),
        (Query(where=("model.lora.r=null",), last=1), ["too big"]),
        (Query(where=("loop=pytorch",)), []),
    ],
)
def test_conditions(four: Store, query: Query, names: list[str]) -> None:
    assert [row.name for row in four.list(query)] == names


@pytest.mark.parametrize(
    ("conditions", "message"),
    [
        ({"where": ("train.bf61=true",)}, "'train.bf61' is not a setting of a workload; did you mean train.bf16"),
        ({"where": ("train.bf16",)}, "is not a condition: write KEY=VALUE"),
        ({"where": ("=true",)}, "is not a condition"),
        ({"since": "yesterday"}, "'yesterday' is not a date: write 2026-11-21"),
        ({"last": 0}, "last must be 1 or more"),
    ],
)
def test_invalid_queries_are_reported_before_reading_anything(conditions: dict[str, object], message: str) -> None:
    with pytest.raises(TrainatomyError, match=message):
        Query(**conditions)  # type: ignore[arg-type]


def test_a_workload_of_another_version_is_queried_by_its_own_keys(store: Store, vanilla: Record) -> None:
    later = {**vanilla.measurement.workload, "planet": "mars", "train": {"bf16": True, "warp": 9}}
    store.write(replace(vanilla, measurement=replace(vanilla.measurement, workload=later)))
    assert len(store.list(Query(where=("train.bf16=true",)))) == 1
    assert store.list(Query(where=("train.bf16=false",))) == ()


@pytest.mark.parametrize(
    ("text", "index"),
    [
        (IDS[1], 1),
        ("20261120", 0),
        ("20261121-09", 1),
        ("aaaa", 0),
        ("bbbb0003", 2),
        ("last", 2),
        ("last~0", 2),
        ("last~2", 0),
    ],
)
def test_a_reference_with_one_match(text: str, index: int) -> None:
    assert resolve(text, IDS, "runs") == IDS[index]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "20261121",
            "matches 2 records of runs: 20261121-090000000-aaab0002, 20261121-100000000-bbbb0003. Write",
        ),
        ("aaa", "matches 2 records"),
        ("bbbd0003", "no record 'bbbd0003' in runs; the nearest: 20261121-100000000-bbbb0003.*trainatomy history"),
        ("20261121-090000000-aaab0020", "the nearest: 20261121-090000000-aaab0002"),
        ("zzz", r"no record 'zzz' in runs\. `trainatomy history`"),
        ("", "no record ''"),
        ("last~3", "There is no last~3: runs has 3 records"),
    ],
)
def test_a_reference_with_no_or_several_matches(text: str, message: str) -> None:
    with pytest.raises(TrainatomyError, match=message):
        resolve(text, IDS, "runs")


def test_long_lists_of_candidates_are_shortened() -> None:
    ids = [f"20261121-{count:09d}-aaaa" for count in range(30)]
    with pytest.raises(TrainatomyError, match=r"matches 30 records of runs: 20261121-000000022.* and 22 older\."):
        resolve("2026", ids, "runs")


def test_an_empty_store_explains_how_to_fill_it(store: Store) -> None:
    with pytest.raises(TrainatomyError, match=r"holds none\. `trainatomy measure` writes them"):
        store.read("last")


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("runs/a.json", ("runs", "a.json")),
        ("runs/a", ("runs", "a.json")),
        ("a.json", (".", "a.json")),
        ("/a.json", ("/", "a.json")),
        ("s3://bucket/runs/a.json", ("s3://bucket/runs", "a.json")),
        ("20261121", None),
    ],
)
def test_paths_and_ids_are_distinguished(text: str, parts: tuple[str, str] | None) -> None:
    assert split_path(text) == parts


def test_a_path_that_leads_nowhere(store: Store) -> None:
    with pytest.raises(TrainatomyError, match=r"There is no file runs/a\.json"):
        store.read("runs/a.json")
