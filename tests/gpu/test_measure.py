"""The parent's side of a measurement, with workers that are played by small scripts."""

from __future__ import annotations

import json
import os
import sys
import time
from typing import TYPE_CHECKING

import pytest
from fake_gpu import FakeNvml

from trainatomy.errors import DeviceError, MissingLibrary, WorkloadError
from trainatomy.gpu import measure as measuring
from trainatomy.gpu import nvml
from trainatomy.gpu.job import read_result, set_environment, write_result
from trainatomy.results.bill import Measurement
from trainatomy.workload.schema import Workload

if TYPE_CHECKING:
    from pathlib import Path

RESULT = Measurement(
    name="tiny",
    workload={"model": {"class": "BertModel"}},
    status="completed",
    gpu="NVIDIA H200",
    driver="580",
    versions={"torch": "2.11.0"},
    date="2026-11-21",
    peak_allocated_bytes=10,
    peak_reserved_bytes=20,
    device_bytes=None,
    process_bytes=None,
    nvml_used_bytes=None,
    idle_bytes=None,
    context_bytes=None,
    model_bytes=5,
    num_alloc_retries=0,
    step_seconds=0.1,
    steps=4,
    message="",
    tape_file=None,
)


def play(tmp_path: Path, script: str, *, allocator: str = "", time_limit: float | None = 20) -> Measurement:
    """Run ``script`` as the worker; ``RESULT`` in it is the path of the result."""
    result = tmp_path / "result.json"
    command = [sys.executable, "-c", script.replace("RESULT", repr(str(result)))]
    return measuring.run_worker(command, result, tmp_path / "log", allocator, time_limit)


def test_a_result_is_written_whole_and_read_again(tmp_path: Path) -> None:
    write_result(tmp_path / "result.json", RESULT)
    assert read_result(tmp_path / "result.json") == RESULT
    assert [path.name for path in tmp_path.iterdir()] == ["result.json"]


def test_the_workers_own_error_is_raised_here(tmp_path: Path) -> None:
    write_result(tmp_path / "result.json", WorkloadError("train.optim: unknown"))
    with pytest.raises(WorkloadError, match=r"train\.optim: unknown"):
        read_result(tmp_path / "result.json")


def test_a_worker_gets_the_workloads_allocator_and_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "from the shell")
    content = json.dumps({"error": "WorkloadError", "message": "PLACE"})
    script = (
        "import os, pathlib; "
        "found = [os.environ.get(n, '') for n in ('PYTORCH_ALLOC_CONF', 'PYTORCH_CUDA_ALLOC_CONF')]; "
        f"pathlib.Path(RESULT).write_text({content!r}.replace('PLACE', '/'.join(found)))"
    )
    with pytest.raises(WorkloadError, match=r"^expandable_segments:True/expandable_segments:True$"):
        play(tmp_path, script, allocator="expandable_segments:True")
    with pytest.raises(WorkloadError, match=r"^/$"):
        play(tmp_path, script)


def test_a_worker_that_dies_is_a_device_error_with_its_last_lines(tmp_path: Path) -> None:
    with pytest.raises(DeviceError, match=r"(?s)exit code 3.*CUDA error: misaligned"):
        play(tmp_path, "import sys; print('CUDA error: misaligned', file=sys.stderr); sys.exit(3)")


def test_a_worker_that_is_killed_hints_at_host_memory(tmp_path: Path) -> None:
    with pytest.raises(DeviceError, match=r"signal 9.*host memory"):
        play(tmp_path, "import os; os.kill(os.getpid(), 9)")


def test_a_worker_that_hangs_is_stopped(tmp_path: Path) -> None:
    script = "import os, pathlib, time; pathlib.Path(RESULT + '.pid').write_text(str(os.getpid())); time.sleep(60)"
    began = time.monotonic()
    with pytest.raises(DeviceError, match=r"did not end within 1 s"):
        play(tmp_path, script, time_limit=1)
    assert time.monotonic() - began < 15
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "result.json.pid").read_text()), 0)


def test_ctrl_c_stops_the_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started = []
    real = measuring.subprocess.Popen

    class Interrupted(real):  # type: ignore[type-arg, misc, valid-type]
        def wait(self, timeout: float | None = None) -> int:
            if not started:
                started.append(self)
                raise KeyboardInterrupt
            return int(super().wait(timeout))

    monkeypatch.setattr(measuring.subprocess, "Popen", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        play(tmp_path, "import time; time.sleep(60)")
    assert started[0].returncode == -9


def test_without_a_gpu_nothing_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvml, "_library", lambda: FakeNvml(driver_answers=False))
    monkeypatch.setattr(measuring.subprocess, "Popen", lambda *_, **__: pytest.fail("started a process"))
    workload = Workload.from_mapping({"model": {"class": "BertModel"}})
    with pytest.raises(DeviceError, match=r"(?s)No NVIDIA driver.*trainatomy predict"):
        measuring.measure(workload)


def test_hidden_gpus_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(DeviceError, match="CUDA_VISIBLE_DEVICES=''"):
        measuring.require_gpu()


def test_without_the_binding_the_driver_library_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise MissingLibrary("pip install nvidia-ml-py")

    monkeypatch.setattr(nvml, "_library", missing)
    monkeypatch.setattr(measuring, "_has_driver", lambda: True)
    assert measuring.require_gpu() == "this machine's GPU"
    monkeypatch.setattr(measuring, "_has_driver", lambda: False)
    with pytest.raises(DeviceError, match="No NVIDIA driver is installed"):
        measuring.require_gpu()


def test_the_environment_of_the_shell_is_replaced() -> None:
    environment = {"PYTORCH_ALLOC_CONF": "a", "PYTORCH_CUDA_ALLOC_CONF": "b", "OTHER": "c"}
    set_environment(environment, "")
    assert environment == {"OTHER": "c"}
