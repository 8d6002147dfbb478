"""Predictions of ranks other than the first."""

from __future__ import annotations

import pytest
from spread import workload

from trainatomy.api import predict
from trainatomy.errors import WorkloadError


def test_ranks_of_a_sharded_optimizer_hold_different_states() -> None:
    found = predict(workload(gpus=2, strategy="zero1"), timed=False, ranks=[1])
    first, second = (found.ranks[rank].memory.components.optimizer_states for rank in (0, 1))
    assert first != second
    assert first + second == pytest.approx(2 * 4 * found.bytes_per_parameter.parameters, rel=0.02)


def test_ranks_of_ddp_hold_the_same() -> None:
    found = predict(workload(gpus=4), timed=False, ranks=[3])
    assert found.ranks[3].memory.peak_allocated_bytes == found.memory.peak_allocated_bytes


@pytest.mark.parametrize("rank", [4, -1, 0])
def test_a_rank_that_does_not_exist_is_named(rank: int) -> None:
    with pytest.raises(WorkloadError, match=rf"ranks: {rank} is none of this training's other ranks \(1 to 3\)"):
        predict(workload(gpus=4), timed=False, ranks=[rank])


def test_one_gpu_has_no_other_ranks() -> None:
    with pytest.raises(WorkloadError, match="the training is on one GPU"):
        predict(workload(), timed=False, ranks=[1])
