"""The parent process of a measurement, with small scripts in place of workers."""

from __future__ import annotations

import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from fake_gpu import FakeNvml
from measured import FULL, RESULT
from processes import read_result, write_result

from trainatomy.errors import DeviceError, MissingLibrary, WorkloadError
from trainatomy.measurement import measure as measuring
from trainatomy.measurement.device import nvml
from trainatomy.measurement.device import nvml as visible
from trainatomy.measurement.process import pool
from trainatomy.measurement.process.job import Job, Progress, from_plain, set_environment, to_plain
from trainatomy.measurement.process.pool import TimeLimit, WorkerProcess
from trainatomy.results.measurement import Measurement
from trainatomy.results.memory import Instant, OutOfMemoryPoint
from trainatomy.workload.schema import Workload

SAYS = """
import json, os, signal, sys, time
def say(**content): print(json.dumps(content), flush=True)
def job(): return json.loads(sys.stdin.readline())
def at(stage, **more): say(progress={"run": "control", "stage": stage, **more})
"""
"""Beginning of every script that acts as a worker."""
DONE = to_plain(RESULT)
LATER = {"memory", "modules", "stages", "timed_step_seconds", "recorded_step_seconds", "samples_per_second"}
LATER |= {"tokens_per_second", "neighbours", "out_of_memory", "notes"}
"""Fields added after the first version."""


def play(
    script: str, *, allocator: str = "", time_limit: float | None = 20, reports: list[Progress] | None = None
) -> Measurement:
    """Run one job with ``script`` as the worker."""
    command = [sys.executable, "-c", SAYS + script]
    limit = None if time_limit is None else TimeLimit(time_limit)
    with WorkerProcess(command, allocator) as worker:
        return worker.run(Job({"name": "tiny"}), limit, (reports if reports is not None else []).append)


def fake_worker(monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """Make ``measure`` start ``script`` as its worker on a machine that appears to have a GPU."""
    monkeypatch.setattr(pool, "WORKER", (sys.executable, "-c", SAYS + script))
    monkeypatch.setattr(measuring, "require_gpu", lambda: "NVIDIA H200")


TINY = Workload.from_mapping({"model": {"class": "BertModel"}})


def test_a_result_is_written_whole_and_read_again(tmp_path: Path) -> None:
    write_result(tmp_path / "result.json", RESULT)
    assert read_result(tmp_path / "result.json") == RESULT
    assert [path.name for path in tmp_path.iterdir()] == ["result.json"]


def test_the_workers_own_error_is_raised_here(tmp_path: Path) -> None:
    write_result(tmp_path / "result.json", WorkloadError("train.optim: unknown"))
    with pytest.raises(WorkloadError, match=r"train\.optim: unknown"):
        read_result(tmp_path / "result.json")


def test_a_worker_receives_its_job_and_its_progress_is_passed_on() -> None:
    reports: list[Progress] = []
    script = f"""
at("training", step=2, steps=9, device_bytes=5)
say(result={DONE!r} if job()["workload"] == {{"name": "tiny"}} else None)
say(ended=0)
"""
    assert play(script, reports=reports) == RESULT
    assert reports == [Progress("control", "training", 2, 9, 5)]
    assert str(reports[0]) == "control run: training, step 2 of 9"


def test_a_worker_uses_only_the_workloads_allocator_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "from the shell")
    script = (
        "found = [os.environ.get(n, '') for n in ('PYTORCH_ALLOC_CONF', 'PYTORCH_CUDA_ALLOC_CONF')]\n"
        "say(result={'error': 'WorkloadError', 'message': '/'.join(found)})"
    )
    with pytest.raises(WorkloadError, match=r"^expandable_segments:True/expandable_segments:True$"):
        play(script, allocator="expandable_segments:True")
    with pytest.raises(WorkloadError, match=r"^/$"):
        play(script)


def test_a_worker_that_dies_is_a_device_error_with_its_last_lines() -> None:
    with pytest.raises(DeviceError, match=r"(?s)exit code 3.*CUDA error: misaligned"):
        play("print('CUDA error: misaligned', file=sys.stderr); sys.exit(3)")


def test_a_killed_worker_hints_at_host_memory_and_reports_its_stage() -> None:
    with pytest.raises(DeviceError, match=r"signal 9 \(control run: model loaded\).*host memory"):
        play("at('model loaded'); os.kill(os.getpid(), 9)")


def test_a_killed_child_of_the_worker_is_reported_too() -> None:
    with pytest.raises(DeviceError, match="signal 11"):
        play("job(); say(ended=-11); sys.stdin.read()")


def test_a_worker_that_hangs_is_stopped_with_its_children(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    script = f"""
child = os.fork()
if child:
    open({str(pids)!r}, "w").write(f"{{os.getpid()}} {{child}}")
    at("training", step=1, steps=4)
time.sleep(60)
"""
    began = time.monotonic()
    with pytest.raises(DeviceError, match=r"did not end within 1 s.*training, step 1 of 4"):
        play(script, time_limit=1)
    assert time.monotonic() - began < 15
    while any(alive(pid) for pid in map(int, pids.read_text().split())):
        assert time.monotonic() - began < 15
        time.sleep(0.01)


def alive(pid: int) -> bool:
    """Return whether a process runs (a zombie does not)."""
    try:
        return "State:\tZ" not in Path("/proc", str(pid), "status").read_text()
    except FileNotFoundError:
        return False


def test_a_line_that_is_not_an_answer_goes_to_the_log() -> None:
    with pytest.raises(DeviceError, match=r"(?s)exit code 3.*who printed this"):
        play("print('who printed this', flush=True); sys.exit(3)")


def test_ctrl_c_stops_the_worker() -> None:
    def interrupt(_: Progress) -> None:
        raise KeyboardInterrupt

    command = [sys.executable, "-c", SAYS + "at(str(os.getpid())); time.sleep(60)"]
    worker = WorkerProcess(command, "")
    with pytest.raises(KeyboardInterrupt), worker:
        worker.run(Job({}), None, interrupt)
    assert worker._process.returncode == -9


ANSWERS = f"""
for line in sys.stdin:
    recorded = json.loads(line)["record"]
    say(result={DONE!r})
    say(ended=0)
    if "--fork" not in sys.argv: break
"""


def test_both_runs_share_a_worker_that_forks(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_worker(monkeypatch, "if '--fork' in sys.argv: say(ready=True)\nelse: sys.exit(5)\n" + ANSWERS)
    found = measuring.measure(TINY, progress=lambda _: None)
    assert found.recorded_step_seconds == RESULT.step_seconds


def test_many_measurements_share_a_worker_and_a_lost_one_is_replaced(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    started = tmp_path / "started"
    script = f"open({str(started)!r}, 'a').write('x')\nsay(ready=True)\n"
    dies = "    if json.loads(line)['workload'].get('name') == 'dies': sys.exit(4)\n    say(result"
    fake_worker(monkeypatch, script + ANSWERS.replace("    say(result", dies))
    with pool.WorkerPool(lasting=True) as shared:
        for _ in range(2):
            measuring.measure(TINY, components=False, pool=shared, progress=lambda _: None)
        assert started.read_text() == "x"
        with pytest.raises(DeviceError, match="exit code 4"):
            measuring.measure(
                TINY.model_copy(update={"name": "dies"}), components=False, pool=shared, progress=lambda _: None
            )
        assert measuring.measure(TINY, components=False, pool=shared, progress=lambda _: None) == RESULT
        assert started.read_text() == "xx"
        worker = shared._forking
    assert worker is not None and worker._process.returncode is not None


def test_without_gpu_forks_every_run_has_its_own_process(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_worker(monkeypatch, "if '--fork' in sys.argv: say(ready=False); sys.exit()\n" + ANSWERS)
    assert measuring.measure(TINY, progress=lambda _: None).recorded_step_seconds == RESULT.step_seconds


def test_without_components_there_is_one_run(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_worker(monkeypatch, "if '--fork' in sys.argv: sys.exit(5)\n" + ANSWERS)
    assert measuring.measure(TINY, components=False, progress=lambda _: None) == RESULT


def test_the_measurement_is_kept_if_the_recorded_run_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    script = ANSWERS.replace("recorded =", "sys.exit(4) if json.loads(line)['record'] else None; recorded =")
    fake_worker(monkeypatch, "say(ready=True)\n" + script)
    found = measuring.measure(TINY, progress=lambda _: None)
    assert replace(found, notes=()) == RESULT
    assert "the recorded run failed" in found.notes[0] and "exit code 4" in found.notes[0]


def test_the_measurement_is_kept_if_the_recorded_run_cannot_be_analyzed(monkeypatch: pytest.MonkeyPatch) -> None:
    refused = to_plain(WorkloadError("allocator: not known"))
    fake_worker(
        monkeypatch, "say(ready=True)\n" + ANSWERS.replace(f"{DONE!r}", f"{refused!r} if recorded else {DONE!r}")
    )
    found = measuring.measure(TINY, progress=lambda _: None)
    assert replace(found, notes=()) == RESULT
    assert found.notes[0].endswith("there is no memory breakdown: allocator: not known")


def test_an_elapsed_time_limit_is_reported() -> None:
    with pytest.raises(DeviceError, match="did not end within 0 s"):
        play("time.sleep(60)", time_limit=0)


def test_stages_are_printed_once_each(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    fake_worker(monkeypatch, "at('training', step=1); at('training', step=2)\n" + ANSWERS)
    measuring.measure(TINY, components=False)
    assert capfd.readouterr().err.count("training") == 1


def test_steps_that_a_workload_names_are_run_and_no_more() -> None:
    named = TINY.model_copy(update={"steps": 3})
    assert [(job.steps, job.most_steps) for job in measuring.jobs_for(named, None, components=True)] == [(3, 0)] * 2
    control, recorded = measuring.jobs_for(TINY, None, components=True)
    assert (control.steps, control.most_steps, control.recorded) == (10, measuring.MOST_STEPS, False)
    assert (recorded.steps, recorded.most_steps, recorded.record) == (10, 0, True)
    scaled = Workload.from_mapping({"model": {"class": "BertModel"}, "train": {"fp16": True}})
    assert measuring.jobs_for(scaled, None, components=False)[0].steps == 15


def test_a_job_survives_serialization(tmp_path: Path) -> None:
    job = Job({"name": "x"}, 3, tmp_path / "trace", "python", record=True, most_steps=9, seconds=1.5)
    assert Job.from_json(job.to_json()) == job


def test_an_allocator_option_that_pytorch_refuses_is_reported_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake_worker(monkeypatch, "sys.exit(9)")
    wrong = TINY.model_copy(update={"allocator": "expandable_segmets:True"})
    with pytest.raises(WorkloadError, match="expandable_segments"):
        measuring.measure(wrong)


@pytest.mark.parametrize("name", ["missing/trace", "."])
def test_a_trace_file_that_cannot_be_written_is_reported_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    fake_worker(monkeypatch, "sys.exit(9)")
    with pytest.raises(WorkloadError, match=r"--trace: .* cannot be written"):
        measuring.measure(TINY, trace=tmp_path / name)
    assert list(tmp_path.iterdir()) == []


def test_a_measurement_of_an_earlier_version_is_read() -> None:
    old = {name: value for name, value in DONE["measurement"].items() if name not in LATER}
    assert from_plain({"measurement": old}) == RESULT


def test_everything_in_a_measurement_survives_the_round_trip(tmp_path: Path) -> None:
    full = replace(FULL, out_of_memory=OutOfMemoryPoint(Instant(1, "backward", "layer", ""), 1, 2, 3))
    assert all(value != getattr(RESULT, name) for name, value in asdict(full).items() if name in LATER)
    write_result(tmp_path / "result.json", full)
    assert read_result(tmp_path / "result.json") == full


def test_without_a_gpu_nothing_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvml, "_library", lambda: FakeNvml(driver_answers=False))
    monkeypatch.setattr(pool, "WorkerProcess", lambda *_, **__: pytest.fail("started a process"))
    with pytest.raises(DeviceError, match=r"(?s)No NVIDIA driver.*trainatomy predict"):
        measuring.measure(TINY)


@pytest.mark.parametrize("value", ["", "-1", "2", "GPU-nobody", "-1,0"])
def test_hidden_gpus_are_named(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setattr(nvml, "_library", lambda: FakeNvml(count=2))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    with pytest.raises(DeviceError, match=f"CUDA_VISIBLE_DEVICES='{value}' hides every GPU"):
        measuring.require_gpu()


@pytest.mark.parametrize("value", ["1", "0,7", "GPU-0f2a3c1e"])
def test_a_gpu_that_is_shown_is_found(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setattr(nvml, "_library", lambda: FakeNvml(count=2))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    assert measuring.require_gpu() == "NVIDIA H200 (driver 580.159.04)"


def test_without_the_binding_the_driver_library_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise MissingLibrary("pip install nvidia-ml-py")

    monkeypatch.setattr(nvml, "_library", missing)
    monkeypatch.setattr(visible, "_has_driver", lambda: True)
    assert measuring.require_gpu() == "this machine's GPU"
    monkeypatch.setattr(visible, "_has_driver", lambda: False)
    with pytest.raises(DeviceError, match="No NVIDIA driver is installed"):
        measuring.require_gpu()


def test_the_environment_of_the_shell_is_replaced() -> None:
    environment = {"PYTORCH_ALLOC_CONF": "a", "PYTORCH_CUDA_ALLOC_CONF": "b", "OTHER": "c"}
    set_environment(environment, "")
    assert environment == {"OTHER": "c"}


def test_an_exception_with_a_long_list_behind_it_is_named() -> None:
    script = """
print("NotImplementedError: Could not run 'aten::f'", file=sys.stderr)
for number in range(40):
    print("Kernel: registered at", number, file=sys.stderr)
sys.exit(1)
"""
    with pytest.raises(
        DeviceError, match=r"Its last lines:\n    NotImplementedError: Could not run 'aten::f'\n    …\n"
    ):
        play(script)
