"""The parent process of a measurement, with small scripts in place of workers."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
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
from trainatomy.measurement.measure import Runs
from trainatomy.measurement.process import pool
from trainatomy.measurement.process.job import Job, Progress, from_plain, set_environment, to_plain
from trainatomy.measurement.process.pool import Processes, TimeLimit
from trainatomy.results.measurement import Measurement
from trainatomy.results.memory import Instant, OutOfMemoryPoint
from trainatomy.workload.schema import Workload

SAYS = """
import json, os, signal, sys, time
task = 0
def say(**content): print(json.dumps({"task": task, "rank": 0, **content}), flush=True)
def end(code=0): say(ended=code, stopped=code == -9, log="")
def tasks():
    global task
    for line in sys.stdin:
        message = json.loads(line)
        if "function" in message:
            task = message["task"]
            yield json.loads(message["arguments"]["job"])
def job(): return next(tasks())
def at(stage, **more): say(progress={"run": "control", "stage": stage, **more})
"""
"""Beginning of every script that acts as a server."""
DONE = to_plain(RESULT)
LATER = {"memory", "modules", "stages", "timed_step_seconds", "recorded_step_seconds", "samples_per_second"}
LATER |= {"tokens_per_second", "neighbours", "out_of_memory", "notes"}
"""Fields added after the first version."""


@pytest.fixture
def play(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Measurement]:
    """Return a function that runs one job with a script as the server."""

    def run(
        script: str,
        *,
        allocator: str = "",
        time_limit: float | None = 20,
        on_progress: Callable[[Progress], None] = lambda _: None,
    ) -> Measurement:
        monkeypatch.setattr(pool, "SERVER", (sys.executable, "-c", SAYS + script))
        limit = None if time_limit is None else TimeLimit(time_limit)
        job = Job(TINY.to_mapping() | ({"allocator": allocator} if allocator else {}))
        with Processes() as processes:
            return measuring.measure_jobs(processes, [job], limit, on_progress)

    return run


def fake_server(monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """Make ``measure`` start ``script`` as its server on a machine that appears to have a GPU."""
    monkeypatch.setattr(pool, "SERVER", (sys.executable, "-c", SAYS + script))
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


Play = Callable[..., Measurement]


def test_a_server_receives_a_job_and_its_progress_is_passed_on(play: Play) -> None:
    reports: list[Progress] = []
    script = f"""
workload = job()["workload"]
at("training", step=2, steps=9, device_bytes=5)
say(result={DONE!r} if workload == {TINY.to_mapping()!r} else None)
end()
time.sleep(60)
"""
    assert play(script, on_progress=reports.append) == RESULT
    assert reports == [Progress("control", "training", 2, 9, 5)]
    assert str(reports[0]) == "control run: training, step 2 of 9"


def test_a_server_has_only_the_workloads_allocator_settings(monkeypatch: pytest.MonkeyPatch, play: Play) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "from the shell")
    script = (
        "job()\n"
        "found = [os.environ.get(n, '') for n in ('PYTORCH_ALLOC_CONF', 'PYTORCH_CUDA_ALLOC_CONF')]\n"
        "say(result={'error': 'WorkloadError', 'message': '/'.join(found)})\n"
        "end(75)"
    )
    with pytest.raises(WorkloadError, match=r"^expandable_segments:True/expandable_segments:True$"):
        play(script, allocator="expandable_segments:True")
    with pytest.raises(WorkloadError, match=r"^/$"):
        play(script)


def test_a_server_that_dies_is_a_device_error_with_its_last_lines(play: Play) -> None:
    with pytest.raises(DeviceError, match=r"(?s)exit code 3.*CUDA error: misaligned"):
        play("job(); print('CUDA error: misaligned', file=sys.stderr); sys.exit(3)")


def test_a_killed_server_hints_at_host_memory_and_reports_its_stage(play: Play) -> None:
    with pytest.raises(DeviceError, match=r"signal 9 \(control run: model loaded\).*host memory"):
        play("job(); at('model loaded'); os.kill(os.getpid(), 9)")


def test_a_killed_process_is_reported(play: Play) -> None:
    with pytest.raises(DeviceError, match="signal 11"):
        play("job(); end(-11); time.sleep(60)")


def test_a_server_that_hangs_ends_with_its_children(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, play: Play
) -> None:
    monkeypatch.setattr(pool, "_EXIT_SECONDS", 0.2)
    pids = tmp_path / "pids"
    script = f"""
job()
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


def test_a_line_that_is_not_an_answer_goes_to_the_log(play: Play) -> None:
    with pytest.raises(DeviceError, match=r"(?s)exit code 3.*who printed this"):
        play("job(); print('who printed this', flush=True); sys.exit(3)")


def test_ctrl_c_stops_the_server(play: Play) -> None:
    pids: list[int] = []

    def interrupt(progress: Progress) -> None:
        pids.append(int(progress.stage))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        play("job(); at(str(os.getpid())); time.sleep(60)", on_progress=interrupt)
    assert not alive(pids[0])


ANSWERS = f"""
for job in tasks():
    recorded = job["record"]
    say(result={DONE!r})
    end()
"""


def test_both_runs_share_a_server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    started = tmp_path / "started"
    fake_server(monkeypatch, f"open({str(started)!r}, 'a').write('x')\n" + ANSWERS)
    found = measuring.measure(TINY, Runs(), progress=lambda _: None)
    assert found.recorded_step_seconds == RESULT.step_seconds
    assert started.read_text() == "x"


def test_timed_steps_wait_for_what_is_done_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    waits = """
import fcntl
for job in tasks():
    if job["quiet"]:
        at("waiting")
        with open(job["quiet"]) as file: fcntl.flock(file, fcntl.LOCK_SH)
        at("timed")
"""
    fake_server(monkeypatch, waits + ANSWERS.partition("tasks():\n")[2])
    stages: list[str] = []

    def meanwhile() -> None:
        until = time.monotonic() + 20
        while "waiting" not in stages:
            assert time.monotonic() < until
            time.sleep(0.01)
        stages.append("done")

    measuring.measure(TINY, Runs(), meanwhile=meanwhile, progress=lambda progress: stages.append(progress.stage))
    assert stages[1:] == ["waiting", "done", "timed"]


def test_an_error_meanwhile_ends_the_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_server(monkeypatch, "job(); time.sleep(60)")

    def refuse() -> None:
        raise WorkloadError("model: wrong")

    with pytest.raises(WorkloadError, match="model: wrong"):
        measuring.measure(TINY, Runs(), meanwhile=refuse, progress=lambda _: None)


def test_many_measurements_share_a_server_and_a_lost_one_is_replaced(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    started = tmp_path / "started"
    script = f"open({str(started)!r}, 'a').write('x')\n"
    dies = "    if job['workload'].get('name') == 'dies': sys.exit(4)\n    say(result"
    fake_server(monkeypatch, script + ANSWERS.replace("    say(result", dies))

    def measure(workload: Workload) -> Measurement:
        return measuring.measure(workload, Runs(components=False), processes=shared, progress=lambda _: None)

    with pool.Processes() as shared:
        for _ in range(2):
            measure(TINY)
        assert started.read_text() == "x"
        with pytest.raises(DeviceError, match="exit code 4"):
            measure(TINY.model_copy(update={"name": "dies"}))
        assert measure(TINY) == RESULT
        assert started.read_text() == "xx"
        (server,) = shared._servers.values()
    assert not server.is_alive()


def test_without_gpu_forks_the_processes_import_the_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    refuses = "if '--preload' in sys.argv:\n    job(); say(refused=True); time.sleep(60)\n"
    fake_server(monkeypatch, refuses + ANSWERS)
    assert measuring.measure(TINY, Runs(), progress=lambda _: None).recorded_step_seconds == RESULT.step_seconds


def test_optimizers_of_bitsandbytes_import_it_in_each_process(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_server(monkeypatch, "if '--preload' in sys.argv: sys.exit(5)\n" + ANSWERS)
    for optim in ("paged_adamw_32bit", "lion_8bit"):
        workload = TINY.replace({"train": {"optim": optim}})
        assert measuring.measure(workload, Runs(components=False), progress=lambda _: None) == RESULT


def test_the_measurement_is_kept_if_the_recorded_run_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    script = ANSWERS.replace("recorded =", "sys.exit(4) if job['record'] else None; recorded =")
    fake_server(monkeypatch, script)
    found = measuring.measure(TINY, Runs(), progress=lambda _: None)
    assert replace(found, notes=()) == RESULT
    assert "the recorded run failed" in found.notes[0] and "exit code 4" in found.notes[0]


def test_the_measurement_is_kept_if_the_recorded_run_cannot_be_analyzed(monkeypatch: pytest.MonkeyPatch) -> None:
    refused = to_plain(WorkloadError("allocator: not known"))
    fake_server(
        monkeypatch,
        ANSWERS.replace(f"{DONE!r}", f"{refused!r} if recorded else {DONE!r}").replace(
            "end()", "end(75 if recorded else 0)"
        ),
    )
    found = measuring.measure(TINY, Runs(), progress=lambda _: None)
    assert replace(found, notes=()) == RESULT
    assert found.notes[0].endswith("there is no memory breakdown: allocator: not known")


def test_an_elapsed_time_limit_is_reported(monkeypatch: pytest.MonkeyPatch, play: Play) -> None:
    monkeypatch.setattr(pool, "_EXIT_SECONDS", 0.2)
    with pytest.raises(DeviceError, match="did not end within 0 s"):
        play("time.sleep(60)", time_limit=0)


def test_stages_are_printed_once_each(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    fake_server(
        monkeypatch, ANSWERS.replace("    say", "    at('training', step=1); at('training', step=2)\n    say", 1)
    )
    measuring.measure(TINY, Runs(components=False))
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
    fake_server(monkeypatch, "sys.exit(9)")
    wrong = TINY.model_copy(update={"allocator": "expandable_segmets:True"})
    with pytest.raises(WorkloadError, match="expandable_segments"):
        measuring.measure(wrong, Runs())


@pytest.mark.parametrize("name", ["missing/trace", "."])
def test_a_trace_file_that_cannot_be_written_is_reported_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    fake_server(monkeypatch, "sys.exit(9)")
    with pytest.raises(WorkloadError, match=r"--trace: .* cannot be written"):
        measuring.measure(TINY, Runs(trace=tmp_path / name))
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
    monkeypatch.setattr(pool, "Server", lambda *_, **__: pytest.fail("started a process"))
    with pytest.raises(DeviceError, match=r"(?s)No NVIDIA driver.*trainatomy predict"):
        measuring.measure(TINY, Runs())


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
    monkeypatch.setattr(visible, "_AMD_DRIVER", __file__)
    with pytest.raises(DeviceError, match=r"AMD GPUs is predicted and not measured.*docs/amd\.md"):
        measuring.require_gpu()


def test_the_environment_of_the_shell_is_replaced() -> None:
    environment = {"PYTORCH_ALLOC_CONF": "a", "PYTORCH_CUDA_ALLOC_CONF": "b", "OTHER": "c"}
    set_environment(environment, "")
    assert environment == {"OTHER": "c"}


def test_an_exception_with_a_long_list_behind_it_is_named(play: Play) -> None:
    script = """
job()
print("NotImplementedError: Could not run 'aten::f'", file=sys.stderr)
for number in range(40):
    print("Kernel: registered at", number, file=sys.stderr)
sys.exit(1)
"""
    with pytest.raises(
        DeviceError, match=r"Its last lines:\n    NotImplementedError: Could not run 'aten::f'\n    …\n"
    ):
        play(script)
