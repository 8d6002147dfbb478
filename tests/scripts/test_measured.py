"""A script that runs for real is stopped at the step where a dry run stops; CUDA is pretended, as there is none."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from trainatomy.errors import DeviceError
from trainatomy.integrations import measured_script
from trainatomy.integrations.measured_script import StepClock, compared, measure_here
from trainatomy.integrations.utilization import Utilization
from trainatomy.results.measurement import Measurement
from trainatomy.scripts.command import read_command
from trainatomy.scripts.job import Job

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
    answers = {"is_available": True, "synchronize": None, "current_device": 0, "memory_stats": {}}
    answers |= {"max_memory_allocated": 4, "max_memory_reserved": 5}
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, answer=answer: answer)
    return measure_here(Job(read_command(["train.py"]), ("h200",), steps=2))


def test_it_stops_after_its_steps(measured: Measurement, capsys: pytest.CaptureFixture[str]) -> None:
    assert (measured.status, measured.steps, len(measured.timed_step_seconds)) == ("completed", 2, 2)
    assert (measured.peak_allocated_bytes, measured.device_bytes) == (4, 5 + 2)
    assert measured.samples_per_second == pytest.approx(6 / measured.timed_step_seconds[-1])
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
    assert clock.samples == 0
