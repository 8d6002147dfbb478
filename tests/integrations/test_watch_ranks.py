"""Watching in one process of a training on several GPUs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist
from measured import FULL
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from trainatomy.integrations.live_measurement import predict_live, process_place
from trainatomy.integrations.watch import Watch


@pytest.fixture
def second_of_two() -> Iterator[None]:
    dist.init_process_group("fake", rank=1, world_size=2, store=FakeStore())
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("second_of_two")
def test_a_rank_is_named_and_is_not_predicted_as_if_it_were_alone() -> None:
    assert process_place() == (1, 2)
    with pytest.warns(RuntimeWarning, match="this training has 2 processes"):
        assert predict_live(nn.Linear(1, 1), None, None, FULL) is None


def test_a_process_without_a_group_is_alone() -> None:
    assert process_place() == (0, 1)


@pytest.mark.parametrize(("rank", "records"), [(0, 1), (1, 0)])
@pytest.mark.filterwarnings("ignore:trainatomy finds no GPU")
def test_only_rank_0_writes_the_record(tmp_path: Path, rank: int, records: int) -> None:
    watch = Watch(nn.Linear(1, 1))
    watch.measurement = replace(FULL, rank=rank)
    assert (watch.write(tmp_path) is not None) is bool(records)
    assert len(list(tmp_path.glob("*.json"))) == records
