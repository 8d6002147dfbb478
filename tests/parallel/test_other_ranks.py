"""Predictions of ranks other than the first."""

from __future__ import annotations

import pytest
import torch
from spread import workload

from trainatomy.api import predict
from trainatomy.errors import WorkloadError
from trainatomy.simulator import simulate


def test_ranks_of_a_sharded_optimizer_hold_different_states() -> None:
    found = predict(workload(gpus=2, strategy="zero1"), timed=False, ranks=[1])
    first, second = (found.ranks[rank].memory.components.optimizer_states for rank in (0, 1))
    assert first != second
    assert first + second == pytest.approx(2 * 4 * found.bytes_per_parameter.parameters, rel=0.02)


def test_ranks_of_ddp_hold_the_same() -> None:
    found = predict(workload(gpus=4), timed=False, ranks=[3])
    assert found.ranks[3].memory.peak_allocated_bytes == found.memory.peak_allocated_bytes


@pytest.fixture
def no_simulation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail where a training is simulated before it is refused."""
    monkeypatch.setattr(simulate, "simulate", lambda *_, **__: pytest.fail("simulated"))


@pytest.mark.usefixtures("no_simulation")
@pytest.mark.parametrize("rank", [4, -1, 0])
def test_a_rank_that_does_not_exist_is_named(rank: int) -> None:
    with pytest.raises(WorkloadError, match=rf"ranks: {rank} is none of this training's other ranks \(1 to 3\)"):
        predict(workload(gpus=4), timed=False, ranks=[rank])


@pytest.mark.usefixtures("no_simulation")
def test_one_gpu_has_no_other_ranks() -> None:
    with pytest.raises(WorkloadError, match="the training is on one GPU"):
        predict(workload(), timed=False, ranks=[1])
    with pytest.raises(WorkloadError, match="a live module is predicted on one GPU"):
        predict(torch.nn.Linear(2, 2), batch={"input": torch.ones(2, 2)}, timed=False, ranks=[1])
