"""Waiting for the DataLoader: the time of the CPU, and how much of it the GPU waited too."""

from __future__ import annotations

import pytest
import torch
from fake_clock import Machine
from torch.utils.data import DataLoader, Dataset, dataloader

from trainatomy.measurement.step.instruments import DataWaits
from trainatomy.reporters import run_sentences
from trainatomy.results.loader import DataWait


class Slow(Dataset[torch.Tensor]):
    """Dataset that takes a second a sample; the last one two."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        self.machine.now += 2.0 if index == 3 else 1.0
        return torch.zeros(1)


@pytest.mark.parametrize(("work", "waited"), [(0.5, (0.5, 0.5, 1.5)), (3.0, (0.0, 0.0, 0.0)), (1.2, (0.0, 0.0, 0.4))])
def test_the_gpu_waits_only_when_it_has_nothing_left_to_do(
    monkeypatch: pytest.MonkeyPatch, work: float, waited: tuple[float, ...]
) -> None:
    machine = Machine()
    machine.install(monkeypatch)
    original = dataloader._BaseDataLoaderIter.__next__
    waits = DataWaits()
    waits.attach()
    batches = iter(DataLoader(Slow(machine)))
    next(batches)
    machine.compute(work)
    waits.begin()
    for _ in range(3):
        next(batches)
        machine.compute(work)
        waits.end_step()
    waits.detach()
    found = waits.result()
    assert found is not None
    assert found.host_seconds == pytest.approx((1.0, 1.0, 2.0))
    assert found.gpu_seconds == pytest.approx(waited)
    assert dataloader._BaseDataLoaderIter.__next__ is original
    skipped = waits.result(skipped=1)
    assert skipped is not None and len(skipped.gpu_seconds) == 2


def test_a_loop_without_a_dataloader_has_no_waits() -> None:
    waits = DataWaits()
    waits.attach()
    waits.begin()
    waits.end_step()
    waits.detach()
    assert waits.result() is None


def test_a_page_says_how_long_the_gpu_waited() -> None:
    lines = run_sentences.data_wait(DataWait((0.02, 0.02, 0.09), (0.01, 0.01, 0.08)), (0.1, 0.1, 0.2))
    assert lines == [
        "the GPU waited for data 33 ms per step, 25.0 % of the time; the CPU spent 43 ms per step fetching batches",
        "longest in timed step 3: 80 ms",
        "`trainatomy data` says how many worker processes the DataLoader needs",
    ]
    assert len(run_sentences.data_wait(DataWait((0.02,), (0.0,)), (0.1,))) == 1
