"""The grid of the accuracy benchmark: each row is a workload, and the draw of held-out rows is reproducible."""

from __future__ import annotations

import hashlib

import grid
import pytest

from trainatomy.catalog.architectures import architectures
from trainatomy.workload.schema import Workload

ROWS = grid.rows()


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_every_row_is_a_workload_with_its_name(row: grid.Row) -> None:
    workload = row.workload()
    assert workload.name == row.name
    assert Workload.from_mapping(workload.to_mapping()) == workload


def test_no_two_rows_are_the_same_training() -> None:
    digests = [row.workload().digest() for row in ROWS]
    assert len(set(digests)) == len(ROWS)


def test_every_model_ships_with_the_package() -> None:
    shipped = {name for entry in architectures() for name in (entry.hub_id, *entry.also)}
    assert {row.mapping["model"]["id"] for row in ROWS if "id" in row.mapping["model"]} <= shipped


def test_the_grid_is_large_enough_and_at_least_forty_rows_are_held_out() -> None:
    assert len(ROWS) >= 60
    assert sum(row.held_out for row in ROWS) >= 40
    assert sum(not row.held_out for row in ROWS) >= 40


def test_the_draw_depends_on_seed_and_name_alone() -> None:
    for row in ROWS:
        digest = hashlib.sha256(f"trainatomy accuracy grid, first draw/{row.name}".encode()).hexdigest()
        assert row.held_out == (int(digest[:16], 16) < 0.4 * 2**64)


def test_short_names_of_a_row_are_expanded() -> None:
    row = next(row for row in ROWS if row.name == "t5-base-lora")
    workload = row.workload()
    assert (workload.batch_size, workload.data.sequence_length, workload.data.target_length) == (8, 512, 128)
    assert workload.train.bf16 and workload.model.lora is not None
