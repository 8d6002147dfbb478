"""Notes on what runs in the installed PyTorch although another release is asked for."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from trainatomy.catalog.files import read_yaml
from trainatomy.catalog.versions import parse_version, python_changes, version_text
from trainatomy.results.prediction import LeadingNote
from trainatomy.simulator.releases import python_part_notes
from trainatomy.workload import Workload

PARTS = {
    "FSDP2": {"loop": "pytorch", "parallel": {"gpus": 2, "strategy": "fsdp2"}},
    "FSDP1": {"train": {"fsdp": True, "fsdp_config": {"version": 1}}, "parallel": {"gpus": 2}},
    "DTensor": {"loop": "pytorch", "parallel": {"gpus": 2, "tp_size": 2}},
    "pipelining": {"loop": "pytorch", "parallel": {"gpus": 2, "pp_size": 2}},
    "ZeroRedundancyOptimizer": {"loop": "pytorch", "parallel": {"gpus": 2, "strategy": "zero1"}},
    "checkpointing": {"train": {"gradient_checkpointing": True}},
}
INSTALLED = parse_version(torch.__version__)
OLDER = "2.9" if INSTALLED != (2, 9) else "2.11"


def notes(sections: dict[str, Any], release: str | None) -> list[str]:
    software = {} if release is None else {"software": {"torch": release}}
    return list(python_part_notes(Workload.from_mapping({"model": {"id": "gpt2"}, **sections, **software})))


@pytest.mark.parametrize("part", PARTS)
def test_each_part_in_python_is_named(part: str) -> None:
    assert f"{part} runs as in PyTorch {version_text(INSTALLED)}" in notes(PARTS[part], OLDER)[0]
    assert notes(PARTS[part], None) == notes(PARTS[part], version_text(INSTALLED)) == []


def test_a_training_without_such_parts_has_no_note() -> None:
    assert notes({}, OLDER) == []
    assert notes({**PARTS["checkpointing"], "mode": "inference"}, OLDER) == []


@pytest.mark.skipif(INSTALLED < (2, 10), reason="is the older release itself")
def test_a_known_change_stands_below_the_headline() -> None:
    _, known = notes(PARTS["FSDP2"], "2.9")
    assert isinstance(known, LeadingNote)
    assert "PyTorch 2.10 changed it (before, reentrant checkpoints left the weights" in known
    assert len(notes(PARTS["FSDP2"], "2.11")) == (INSTALLED != (2, 11))


def test_changes_lie_between_the_releases_and_have_sources() -> None:
    assert python_changes((2, 10), (2, 13)) == python_changes((2, 9), (2, 9)) == ()
    assert python_changes((2, 9), (2, 10)) == python_changes((2, 10), (2, 9)) != ()
    assert all(entry["source"] for entries in read_yaml("versions.yaml")["python_parts"].values() for entry in entries)
