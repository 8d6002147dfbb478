"""``dry_run``, the pytest fixture and the notebook magic."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import trainatomy
from trainatomy.integrations.notebook import run_cell
from trainatomy.integrations.testing import FitsOn, fits_on

__all__ = ["fits_on"]

CELL = """
import torch
model = torch.nn.Linear(64, 64).cuda()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for step in range(10):
    model(torch.ones(4, 64, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_code_in_a_block_runs_without_a_gpu() -> None:
    steps = []
    with trainatomy.dry_run(gpu="t4", steps=2) as dry:
        model = torch.nn.Linear(64, 64).cuda()
        optimizer = torch.optim.Adam(model.parameters())
        for step in range(10):
            model(torch.ones(4, 64, device="cuda")).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            steps.append(step)
    assert steps == [0, 1]
    assert dry.fits
    assert dry.prediction is not None
    assert dry.prediction.gpu.id == "t4"
    assert dry.prediction.memory.components.optimizer_states == 2 * (64 * 64 * 4 + 512)
    assert torch.ones(2).sum().item() == 2


def test_an_exception_of_the_block_passes_through() -> None:
    with pytest.raises(ZeroDivisionError), trainatomy.dry_run():
        1 / 0  # noqa: B018
    assert not torch.cuda.is_available() or torch.ones(1, device="cuda").item() == 1


def test_a_block_without_a_step_is_an_error() -> None:
    with pytest.raises(trainatomy.WorkloadError, match="without an optimizer step"), trainatomy.dry_run():
        torch.ones(2)


def test_the_magic_runs_a_cell(capsys: pytest.CaptureFixture[str]) -> None:
    shell = SimpleNamespace(user_ns={}, transform_cell=lambda text: text)
    run_cell(shell, "--gpu t4 --steps 2", CELL)
    assert "fits on T4" in capsys.readouterr().out


@pytest.mark.slow
def test_the_fixture_fails_a_test_for_a_training_that_does_not_fit(
    fits_on: FitsOn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(CELL.replace("64, 64", "70000, 70000").replace("4, 64", "4, 70000"))
    with pytest.raises(pytest.fail.Exception, match="does not fit on T4"):
        fits_on("t4", "train.py")
