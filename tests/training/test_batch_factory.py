"""Batches from the user's own function, whose size and names are checked."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from trainatomy.errors import FactoryError, WorkloadError
from trainatomy.training.batch import build_batch
from trainatomy.training.model import build_model

if TYPE_CHECKING:
    from collections.abc import Callable


def made(describe: Any, make: Callable[[int], dict[str, Any]]) -> dict[str, Any]:
    workload = describe(data={}, train={"per_device_train_batch_size": 4})
    return build_batch(workload, build_model(workload), make)


@pytest.mark.parametrize("rows", [5, 3, 7])
def test_a_batch_of_another_size_is_refused(describe: Any, rows: int) -> None:
    with pytest.raises(FactoryError, match=f"asked for a batch of 4 and returned {rows} rows: input_ids"):
        made(describe, lambda size: {"input_ids": torch.ones(rows, 8, dtype=torch.long)})


@pytest.mark.parametrize("shape", [(4, 8), (1, 32), (8, 8), (8, 4)])
def test_views_packed_samples_and_time_first_are_allowed(describe: Any, shape: tuple[int, int]) -> None:
    assert made(describe, lambda size: {"input_ids": torch.ones(shape, dtype=torch.long)})["input_ids"].shape == shape


def test_a_name_that_the_forward_does_not_accept_is_refused(describe: Any) -> None:
    workload = describe(data={}, train={"per_device_train_batch_size": 2})
    with pytest.raises(FactoryError, match="has 'text', which the forward of Plain does not take: it takes pixels"):
        build_batch(workload, Plain(), lambda size: {"text": torch.ones(size)})


class Plain(torch.nn.Module):
    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        return pixels.sum()


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("ViTForImageClassification", "sequence_length"),
        ("GPT2LMHeadModel", "target_length"),
        ("BertForMaskedLM", "target_length"),
    ],
)
def test_a_length_that_the_model_does_not_have_is_refused(describe: Any, name: str, key: str) -> None:
    workload = describe(name, data={key: 8})
    with pytest.raises(WorkloadError, match=f"data.{key}: {name} ") as raised:
        build_batch(workload, build_model(workload))
    assert raised.value.key == f"data.{key}"
