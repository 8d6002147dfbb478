"""Arguments that a prediction of a live module rejects."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import trainatomy
from trainatomy.errors import WorkloadError
from trainatomy.simulator.live import described


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).sum()


def batch(rows: int) -> dict[str, torch.Tensor]:
    return {"x": torch.ones(rows, 8)}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"model": Net}, r"the class Net, not a module: pass an instance, Net\(...\)"),
        ({"model": "gpt2"}, "got the text 'gpt2'"),
        ({"model": 3}, "not a int"),
        ({"optimizer": torch.optim.SGD(Net().parameters(), lr=1.0)}, "an instance of SGD"),
        ({"optimizer": 3}, "got an object of type int; it takes a name, a class"),
        ({"batch": 4}, "a mapping of names to tensors"),
        ({"batch": None}, "a batch is needed"),
        ({"train": {"per_device_train_batch_size": 4}}, "has 256 rows, but per_device_train_batch_size is 4"),
    ],
)
def test_meaningless_input_is_an_error(arguments: dict[str, Any], message: str) -> None:
    defaults: dict[str, Any] = {"model": Net(), "batch": batch(256), "optimizer": None, "gpu": None, "train": {}}
    with pytest.raises(WorkloadError, match=message):
        described(**{**defaults, **arguments})


def test_a_batch_function_must_return_the_requested_size() -> None:
    with pytest.raises(WorkloadError, match=r"batch\(4\) has 5 rows"):
        trainatomy.predict(Net(), batch=lambda size: batch(size + 1), per_device_train_batch_size=4)
    assert trainatomy.predict(Net(), batch=batch, per_device_train_batch_size=4).memory.peak_allocated_bytes > 0


def test_one_row_for_the_whole_batch_is_allowed() -> None:
    made = {"positions": torch.zeros(1, 8), **batch(4)}
    described(Net(), made, None, None, {"per_device_train_batch_size": 4})
