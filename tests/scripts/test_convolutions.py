"""Convolutions of a script: who chooses their workspaces, and what ``cudnn.benchmark`` tries."""

from __future__ import annotations

import pytest
import torch
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


def test_what_ran_before_is_not_tried(run_script: RunScript, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "installed_heuristics", lambda gpu: Answers())
    late = SCRIPT.replace("    optimizer.step()\n", "    optimizer.step()\n    torch.backends.cudnn.benchmark = True\n")
    found = run_script(late).prediction
    assert found is not None
    assert found.trials == 0
    assert found.memory.peak_allocated_bytes < LARGEST


def test_a_recomputed_convolution_is_tried_by_both_threads(
    run_script: RunScript, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "installed_heuristics", lambda gpu: Answers())
    call = "torch.utils.checkpoint.checkpoint(model, torch.ones(2, 3, 16, 16, device='cuda'), use_reentrant=False)"
    two = SCRIPT.replace("nn.Conv2d(3, 8, 3).cuda()", "nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3)).cuda()")
    again = two.replace('model(torch.ones(2, 3, 16, 16, device="cuda"))', call)
    found = run_script(again.replace("import sys, torch", "import sys, torch, torch.utils.checkpoint"), "--benchmark")
    assert found.prediction is not None
    assert found.prediction.trials == 6


@pytest.mark.parametrize(("limit", "spread"), [(1, False), (2, True), (0, True)])
def test_only_plans_within_the_limit_may_be_kept(
    run_script: RunScript, monkeypatch: pytest.MonkeyPatch, limit: int, spread: bool
) -> None:
    before = torch.backends.cudnn.benchmark_limit
    monkeypatch.setattr(session, "installed_heuristics", lambda gpu: Answers())
    found = run_script(f"import torch\ntorch.backends.cudnn.benchmark_limit = {limit}\n" + SCRIPT, "--benchmark")
    assert found.prediction is not None
    plans = found.prediction.memory.plans
    assert (plans is not None) == spread
    if plans is not None:
        assert plans.reserved_bytes[1] - plans.reserved_bytes[0] > CHOSEN / 2
    assert torch.backends.cudnn.benchmark_limit == before


def test_without_the_library_an_fft_is_tried(run_script: RunScript, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "installed_heuristics", lambda gpu: None)
    found = run_script(SCRIPT, "--benchmark").prediction
    assert found is not None
    planes = 2 * (3 * 8 + 2 * 3) * 16 * 9 * 8
    assert planes < found.memory.peak_allocated_bytes - found.memory.model_bytes < 3 * planes
