"""Convolutions of a script: who chooses their workspaces, and what ``cudnn.benchmark`` tries."""

from __future__ import annotations

import pytest
from script_types import RunScript

from trainatomy.operators.allocation.cudnn.convolution import Convolution, Kind
from trainatomy.operators.allocation.cudnn.heuristics import EnginePlan
from trainatomy.scripts import session

SCRIPT = """
import sys, torch
from torch import nn
torch.backends.cudnn.benchmark = "--benchmark" in sys.argv
model = nn.Conv2d(3, 8, 3).cuda()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for step in range(5):
    model(torch.ones(2, 3, 16, 16, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
CHOSEN, LARGEST = 10**8, 10**9


class Answers:
    """A library whose plans need the same for all convolutions."""

    version = "9.19.0"

    def plan(self, kind: Kind, one: Convolution, **settings: bool) -> EnginePlan:
        return EnginePlan(62, (), (), CHOSEN)

    def offered(self, kind: Kind, one: Convolution, **settings: bool) -> tuple[EnginePlan, ...]:
        return tuple(EnginePlan(62, (), (), size) for size in (CHOSEN, LARGEST))


def test_the_library_chooses_where_it_is_installed(run_script: RunScript, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "installed_heuristics", lambda gpu: Answers())
    found = run_script(SCRIPT).prediction
    assert found is not None
    assert CHOSEN < found.memory.peak_allocated_bytes < 2 * CHOSEN
    assert [(one.value, one.source) for one in found.facts if one.name == "convolutions"] == [("library", "9.19.0")]


def test_a_benchmark_tries_all_plans_in_the_first_step(run_script: RunScript, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "installed_heuristics", lambda gpu: Answers())
    found = run_script(SCRIPT, "--benchmark").prediction
    assert found is not None
    assert LARGEST < found.memory.peak_allocated_bytes < LARGEST + CHOSEN
    assert found.memory.peak.step == 0
    assert found.trials == 2
    assert any("cudnn.benchmark is on" in note and "for 2 convolutions" in note for note in found.notes)


def test_a_benchmark_without_the_library_is_noted(run_script: RunScript, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "installed_heuristics", lambda gpu: None)
    found = run_script(SCRIPT, "--benchmark").prediction
    assert found is not None
    assert any("cudnn.benchmark is on" in note for note in found.notes)
