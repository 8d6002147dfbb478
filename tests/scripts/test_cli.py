"""``trainatomy run`` on the command line: whose options are whose, output, exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from script_types import RunScript

from trainatomy.cli import main
from trainatomy.cli.run import DEFAULT_GPU
from trainatomy.scripts import launch
from trainatomy.scripts.job import Job, Outcome

SCRIPT = """
import sys, torch
print("said by the script")
model = torch.nn.Linear(16, 16).cuda()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for step in range(5):
    model(torch.ones(4, 16, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.fixture
def jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Job]:
    """Collect jobs instead of running them; each fails with code 3."""
    found: list[Job] = []

    def run(job: Job, output: Path | None = None) -> tuple[Outcome, ...]:
        found.append(job)
        return tuple(Outcome(gpu, None, "train.py:1 raised ValueError: no", 3) for gpu in job.gpus)

    monkeypatch.setattr(launch, "run_script", run)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(SCRIPT)
    return found


def test_options_after_the_script_are_its_own(jobs: list[Job], capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["run", "--gpu", "t4", "--time_limit=9", "--steps", "2", "train.py", "--gpu", "0", "--json", "--lr=1"])
    assert (code, jobs[0].gpus, jobs[0].steps, jobs[0].time_limit) == (3, ("t4",), 2, 9.0)
    assert jobs[0].command.arguments == ("--gpu", "0", "--json", "--lr=1")
    assert capsys.readouterr().err.strip().endswith("error: train.py:1 raised ValueError: no")


def test_modules_launchers_and_several_gpus(jobs: list[Job]) -> None:
    main(["run", "--network", "-m", "json.tool", "--sort-keys"])
    main(["run", "--gpu", "t4,h100", "torchrun", "--nproc_per_node=2", "train.py"])
    assert jobs[0].command.is_module
    assert jobs[0].network
    assert jobs[0].gpus[0].startswith(DEFAULT_GPU)
    assert jobs[1].gpus == ("t4", "h100-sxm")
    assert jobs[1].command.launch is not None


def test_a_missing_file_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["run", str(tmp_path / "nothing.py")]) == 2
    assert "no such file" in capsys.readouterr().err


@pytest.mark.slow
def test_a_process_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(SCRIPT)
    assert main(["run", "--gpu", "t4", "--json", "--script-output", "out.txt", "train.py"]) == 0
    found = json.loads(capfd.readouterr().out)
    assert found["schema"] == "trainatomy/prediction/1"
    assert found["script"]["ending"] == "steps"
    assert "said by the script" in (tmp_path / "out.txt").read_text()


def test_a_report_of_a_script(run_script: RunScript, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page, snapshot = tmp_path / "r.html", tmp_path / "s.pickle"
    outcome = run_script(SCRIPT, detail=True)
    assert outcome.prediction is not None and outcome.detail is not None
    held = sum(one.bytes for one in outcome.detail.allocations if one.born <= outcome.detail.peak_event)
    assert held >= outcome.prediction.memory.peak_allocated_bytes
    asked: list[Job] = []
    monkeypatch.setattr(launch, "run_script", lambda job, output: (asked.append(job), (outcome,))[1])
    assert main(["run", "--html", str(page), "--snapshot", str(snapshot), "train.py"]) == 0
    assert asked[0].detail
    assert 'id="chart-timeline"' in page.read_text(encoding="utf-8") and snapshot.is_file()
