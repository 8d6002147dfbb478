"""A script that runs for real is stopped at the step where a dry run stops; CUDA is pretended, as there is none."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from trainatomy.errors import DeviceError, MissingLibrary, WorkloadError
from trainatomy.integrations import measured_script
from trainatomy.integrations.measured_script import StepClock, compared, measure_here
from trainatomy.results.measurement import Measurement, Utilization
from trainatomy.scripts.command import read_command, variables, with_gpus
from trainatomy.scripts.job import Job
from trainatomy.scripts.launch import started_by, visible_gpus

SCRIPT = """
import torch
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for step in range(10):
    model(torch.ones(6, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    print(step)
"""


@pytest.fixture
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Measurement:
    """Measure the script on a pretended GPU."""
    (tmp_path / "train.py").write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)
    held = Utilization("GPU", 9, 1, 7, 0, 0, 0, 5, 4)
    monkeypatch.setattr(measured_script, "utilization", lambda device: held)
    monkeypatch.setattr(measured_script, "driver_version", lambda: "1")
    monkeypatch.setattr("sys.argv", [])
    answers = {"is_available": True, "device_count": 1, "synchronize": None, "current_device": 0, "memory_stats": {}}
    answers |= {"max_memory_allocated": 4, "max_memory_reserved": 5}
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, answer=answer: answer)
    return measure_here(Job(read_command(["train.py"]), ("h200",), steps=2))


def test_it_stops_after_its_steps(measured: Measurement, capsys: pytest.CaptureFixture[str]) -> None:
    assert (measured.status, measured.steps, len(measured.timed_step_seconds)) == ("completed", 2, 1)
    assert (measured.peak_allocated_bytes, measured.device_bytes) == (4, 5 + 2)
    assert measured.samples_per_second == pytest.approx(6 / measured.timed_step_seconds[-1])
    assert measured.step_seconds == measured.timed_step_seconds[-1]
    assert measured.workload["script"] == ["train.py"]
    assert compared(measured, None) is measured


def test_without_a_gpu_it_says_so() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(DeviceError, match="without --measure needs none"):
        measure_here(Job(read_command(["train.py"]), ("h200",)))


def test_a_clock_counts_no_samples_of_a_scalar() -> None:
    clock = StepClock()
    clock.batch((torch.ones(()),), {})
    assert clock.samples.in_step(1) is None


@pytest.mark.parametrize(
    ("typed", "started"),
    [
        ("train.py --lr 1", []),
        ("python -u train.py", []),
        ("torchrun --nproc-per-node 2 train.py --lr 1", ["torch.distributed.run", "--nproc-per-node", "2"]),
        (
            "python -m torch.distributed.run --nproc-per-node=2 -m train",
            ["torch.distributed.run", "--nproc-per-node=2"],
        ),
        (
            "accelerate launch --mixed_precision bf16 -m train --lr 1",
            ["accelerate.commands.launch", "--num_processes=1", "--mixed_precision", "bf16"],
        ),
    ],
)
def test_a_measured_script_is_started_by_its_launcher(typed: str, started: list[str]) -> None:
    assert started_by(read_command(typed.split())) == [sys.executable, *(["-m", *started] if started else [])]


def test_gpus_are_started_as_torchrun_does() -> None:
    command = with_gpus(read_command(["train.py"]), 2)
    assert started_by(command)[1:] == ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]


def test_several_machines_are_not_measured() -> None:
    with pytest.raises(WorkloadError, match="starts 2 machines; this is one"):
        started_by(read_command("torchrun --nnodes 2 --nproc-per-node 8 train.py".split()))


def test_more_processes_than_gpus(measured: Measurement, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    with pytest.raises(DeviceError, match="starts 2 or more processes, one for each GPU; there are 1 here"):
        measure_here(Job(read_command(["train.py"]), ("h200",)))


def test_what_accelerate_says_by_variables() -> None:
    pytest.importorskip("accelerate")
    command = read_command("accelerate launch --mixed_precision bf16 --dynamo_backend inductor train.py".split())
    found = variables(command)
    assert (found["ACCELERATE_MIXED_PRECISION"], found["ACCELERATE_DYNAMO_BACKEND"]) == ("bf16", "INDUCTOR")
    assert variables(read_command(["torchrun", "train.py"])) == {}


def test_what_accelerate_refuses() -> None:
    pytest.importorskip("accelerate")
    with pytest.raises(WorkloadError, match="accelerate refuses this"):
        variables(read_command("accelerate launch --multi_gpu --num_processes 1 train.py".split()))


def test_what_accelerate_says_of_deepspeed(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("accelerate")
    command = read_command("accelerate launch --use_deepspeed --zero_stage 2 --num_processes 2 train.py".split())
    with monkeypatch.context() as patches:
        patches.setitem(sys.modules, "deepspeed", None)
        with pytest.raises(MissingLibrary, match="deepspeed"):
            variables(command)
    if find_spec("deepspeed") is not None:
        found = variables(command)
        assert (found["ACCELERATE_USE_DEEPSPEED"], found["ACCELERATE_DEEPSPEED_ZERO_STAGE"]) == ("true", "2")


@pytest.mark.parametrize(
    ("typed", "given", "visible"),
    [
        ("train.py", {}, "0"),
        ("train.py", {"CUDA_VISIBLE_DEVICES": "3,1"}, "3"),
        ("torchrun --nproc-per-node 2 train.py", {}, "0,1"),
        ("torchrun --nproc-per-node 2 train.py", {"CUDA_VISIBLE_DEVICES": "3,1,2"}, "3,1"),
    ],
)
def test_a_measured_script_sees_as_many_gpus_as_the_dry_run(typed: str, given: dict[str, str], visible: str) -> None:
    found = visible_gpus(read_command(typed.split()), {"A": "1", **given})
    assert found == {"A": "1", "CUDA_VISIBLE_DEVICES": visible}
