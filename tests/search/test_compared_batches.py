"""Searches over a loss that compares the samples of a batch: the batch stays, and mini-batches are an axis."""

from __future__ import annotations

from typing import Any

import pytest

from trainatomy.errors import WorkloadError
from trainatomy.search.across import fewer_gpus
from trainatomy.search.axes import axes_of, batch_sizes
from trainatomy.workload import Workload


def describe(size: int = 64, steps: int = 1, gpus: int = 1, **spec: Any) -> Workload:
    return Workload.from_mapping(
        {
            "model": {"id": "bert-base-uncased"},
            "loop": "sentence_transformers",
            "sentence_transformers": spec,
            "train": {"per_device_train_batch_size": size, "gradient_accumulation_steps": steps},
            "parallel": {"gpus": gpus},
        }
    )


def test_a_batch_is_not_divided_into_accumulation_steps() -> None:
    assert batch_sizes(describe(), 64) == (64,)
    assert batch_sizes(describe(), 256) == (256,)
    assert batch_sizes(describe(steps=4), 256) == (64,)
    with pytest.raises(WorkloadError, match="give a multiple of 4"):
        batch_sizes(describe(steps=4), 90)
    assert batch_sizes(describe(loss="CosineSimilarityLoss"), 64) == (1, 2, 4, 8, 16, 32, 64)


@pytest.mark.parametrize(
    ("spec", "given", "options"),
    [
        ({}, "off", {"off", "16", "4"}),
        ({"loss": "CachedMultipleNegativesRankingLoss"}, "32", {"off", "16", "4", "32"}),
        ({"loss": "CachedMultipleNegativesSymmetricRankingLoss", "mini_batch_size": 4}, "4", {"off", "16", "4"}),
    ],
)
def test_mini_batches_are_an_axis_that_changes_no_training(spec: dict[str, Any], given: str, options: set[str]) -> None:
    workload = describe(**spec)
    (axis,) = (axis for axis in axes_of(workload, 64) if axis.name == "mini_batch")
    assert (axis.given, {option.name for option in axis.options}, axis.permission) == (given, options, "")
    for option in axis.options:
        changed = workload.replace(dict(option.settings)).sentence_transformers
        plain = changed.row.plain or changed.loss
        assert plain == (workload.sentence_transformers.row.plain or workload.sentence_transformers.loss)
        assert (changed.row.plain is None) == (option.name == "off")


def test_a_loss_without_a_cached_one_has_no_mini_batches() -> None:
    assert "mini_batch" not in [axis.name for axis in axes_of(describe(loss="CoSENTLoss"), 64)]


def test_fewer_gpus_are_searched_only_where_they_compare_the_same_samples() -> None:
    assert not list(fewer_gpus(describe(gpus=4)))
    assert list(fewer_gpus(describe(gpus=4, gather_across_devices=True)))
