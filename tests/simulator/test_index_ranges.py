"""Indices outside of what they index are refused where their values are known."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional as F

from trainatomy import api
from trainatomy.errors import SimulationError
from trainatomy.simulator.process import SimulatedProcess
from trainatomy.workload import Workload

ROWS = 8


def positions(end: int) -> torch.Tensor:
    return torch.arange(end, device="cuda")


@pytest.mark.parametrize(
    "read",
    [
        lambda table, end: F.embedding(positions(end), table),
        lambda table, end: table[positions(end)],
        lambda table, end: table[:, positions(end)],
        lambda table, end: table.index_select(1, positions(end)),
        lambda table, end: table.gather(0, positions(end)[:, None]),
    ],
    ids=["embedding", "index", "second dimension", "index_select", "gather"],
)
def test_an_index_beyond_the_last_entry_is_refused(
    process: SimulatedProcess, read: Callable[[torch.Tensor, int], torch.Tensor]
) -> None:
    table = torch.empty(ROWS, ROWS, device="cuda")
    read(table, ROWS)
    with pytest.raises(IndexError, match="reads entry 8 of a dimension of 8"):
        read(table, ROWS + 1)


def test_indices_count_from_the_end_and_unknown_ones_are_inside(process: SimulatedProcess) -> None:
    table = torch.empty(ROWS, ROWS, device="cuda")
    assert table[-1 - positions(ROWS)].shape == table.shape
    with pytest.raises(IndexError, match="entry -9"):
        table[-2 - positions(ROWS)]
    unknown = torch.randn(4, 99, device="cuda").argmax(1)
    assert table[unknown].shape == (4, ROWS)


def test_a_sequence_beyond_the_sines_of_a_ctrl_is_refused() -> None:
    sizes = {"n_layer": 1, "n_embd": 64, "n_head": 2, "dff": 128, "vocab_size": 99}
    model = {"class": "CTRLForSequenceClassification", "config": sizes}

    def predicted(length: int) -> api.Prediction:
        mapping = {"gpu": "h200", "model": model, "data": {"sequence_length": length}}
        return api.predict(Workload.from_mapping({**mapping, "train": {"per_device_train_batch_size": 1}}))

    assert predicted(256).memory.peak_allocated_bytes > 0
    with pytest.raises(SimulationError, match="entry 256 of a dimension of 256") as refused:
        predicted(257)
    assert "data.sequence_length" in str(refused.value) and "report a bug" not in str(refused.value)
