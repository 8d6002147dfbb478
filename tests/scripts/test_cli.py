"""``trainatomy run`` on the command line: whose options are whose, output, exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from script_types import RunScript

import trainatomy
from trainatomy.cli import main
from trainatomy.cli.run import DEFAULT_GPU
from trainatomy.errors import WorkloadError
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


@pytest.mark.parametrize(
    ("words", "right"),
    [
        (["train.py", "--gpu", "t4"], "trainatomy run --gpu t4 train.py"),
        (["train.py", "--lr", "1", "--gpu=t4"], "trainatomy run --gpu t4 train.py --lr 1"),
        (["--steps", "2", "train.py", "--gpu", "rtx-9999", "x"], "trainatomy run --gpu rtx-9999 train.py x"),
        (["-m", "json.tool", "--gpu", "h100,t4"], "trainatomy run --gpu h100,t4 -m json.tool"),
        (
            ["torchrun", "--nproc_per_node=2", "train.py", "--gpu", "4090"],
            "trainatomy run --gpu 4090 torchrun --nproc_per_node=2 train.py",
        ),
        (["--gpu", "t4", "train.py", "--check"], "trainatomy run --check train.py"),
        (["--gpu", "t4", "accelerate", "launch", "train.py", "--check"], "trainatomy run --check accelerate launch"),
    ],
)
def test_options_that_change_the_answer_are_refused_after_the_script(
    jobs: list[Job], capsys: pytest.CaptureFixture[str], words: list[str], right: str
) -> None:
    assert main(["run", *words]) == 2
    assert not jobs
    assert f"Write {right}" in capsys.readouterr().err


def test_a_gpu_among_the_arguments_is_refused_by_the_search_and_in_python(
    jobs: list[Job], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["fit", "--script", "train.py --gpu t4", "--flag", "lr=1,2"]) == 2
    assert "Write trainatomy fit --gpu t4 --script 'train.py'" in capsys.readouterr().err
    with pytest.raises(WorkloadError, match=r"Write run_script\('train.py', gpu='t4'\)"):
        trainatomy.run_script("train.py --gpu t4")
    assert not jobs


@pytest.mark.parametrize(
    "words",
    [
        ["--gpu", "h200", "train.py", "--gpu", "t4"],
        ["train.py", "--gpu", "0"],
        ["train.py", "--gpu", "cuda:1"],
        ["train.py", "--gpu"],
        ["--check", "train.py", "--check"],
        ["--", "train.py", "--gpu", "t4", "--check"],
    ],
)
def test_a_script_may_have_options_of_the_same_names(jobs: list[Job], words: list[str]) -> None:
    assert main(["run", *words]) == 3
    assert jobs[0].command.arguments == tuple(words[words.index("train.py") + 1 :])


@pytest.mark.parametrize(
    "words", [["--gpus", "8"], ["--time_limit=9"], ["--torch", "2.9"], ["--steps", "9"], ["--no-compile"]]
)
def test_other_options_after_the_script_are_said_first(
    run_script: RunScript,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
) -> None:
    outcome = run_script(SCRIPT)
    capsys.readouterr()
    monkeypatch.setattr(launch, "run_script", lambda job, output: (outcome,))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(SCRIPT)
    for before, said in (([], f"note: {' '.join(words)}: for the script"), (words, "fits on"), (["--"], "fits on")):
        assert main(["run", *before, "train.py", *words]) == 0
        assert capsys.readouterr().out.startswith(said)


def test_the_usage_puts_options_before_the_script(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--help"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("Usage: trainatomy run [OPTIONS] SCRIPT ARGUMENTS…")
    assert "options of `trainatomy run` stand before it" in " ".join(said.split())


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
