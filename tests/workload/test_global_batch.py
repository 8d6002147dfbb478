"""The effective batch size of trainings on several GPUs, and the accumulation that keeps it."""

from __future__ import annotations

from typing import Any

import pytest

from trainatomy.errors import WorkloadError
from trainatomy.workload.schema import Workload
from trainatomy.workload.sweep import accumulation_for, effective_batch_size_of, sweep, with_effective_batch_size


def training(**parallel: Any) -> Workload:
    return Workload.from_mapping(
        {
            "model": {"class": "GPT2LMHeadModel", "config": {"model_type": "gpt2"}},
            "loop": "pytorch",
            "train": {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 3},
            "parallel": parallel,
        }
    )


@pytest.mark.parametrize(
    ("parallel", "ranks"),
    [({}, 1), ({"gpus": 8}, 8), ({"gpus": 4, "nodes": 2}, 8), ({"gpus": 8, "strategy": "fsdp2", "tp_size": 4}, 2)],
)
def test_ranks_that_process_other_samples_are_counted(parallel: dict[str, Any], ranks: int) -> None:
    assert effective_batch_size_of(training(**parallel)) == 4 * 3 * ranks


def test_accumulation_keeps_the_samples_of_a_step() -> None:
    rows = with_effective_batch_size(sweep([training()], ["gpus=1,2,4,8"]), 64)
    assert [row.train.gradient_accumulation_steps for row in rows] == [16, 8, 4, 2]
    assert {effective_batch_size_of(row) for row in rows} == {64}


def test_every_row_that_does_not_divide_is_named() -> None:
    rows = sweep([training()], ["gpus=1,3,8,32"])
    with pytest.raises(WorkloadError) as raised:
        with_effective_batch_size(rows, 64)
    message = str(raised.value)
    assert "gpus=3: 4 samples × 3 data-parallel ranks = 12 does not divide 64; give a multiple of 3" in message
    assert "gpus=32: 4 samples × 32" in message and "a per_device_train_batch_size that divides 2" in message
    assert "gpus=1:" not in message and "gpus=8:" not in message


def test_another_batch_size_needs_other_steps() -> None:
    assert accumulation_for(training(gpus=2), 64, 16) == 2
    assert accumulation_for(training(gpus=2), 64, 5) is None
    assert accumulation_for(training(gpus=32), 16, 1) is None
