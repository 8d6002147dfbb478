"""What processes take of the host, read from ``/proc``, control groups and folders."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from trainatomy.measurement.host_memory import HostSampler
from trainatomy.measurement.proc import children, folder_bytes, group_memory, resident, share_of
from trainatomy.results.host import HostBill, HostLimits, HostPart, HostPhase, HostProcess

MIB = 1 << 20

linux = pytest.mark.skipif(resident(os.getpid()) is None, reason="needs Linux's /proc")


def _phase(name: str, *parts: HostPart, workers: int = 0, shm: int = 0, disk: int = 0) -> HostPhase:
    worker = HostProcess("worker", (HostPart("libraries", "anonymous", 50, inherited=True), _own(10)), workers)
    others = (worker,) if workers else ()
    return HostPhase(name, (HostProcess("training", parts), *others), shm, disk)  # type: ignore[arg-type]


def _own(size: int, component: str = "libraries", high: int | None = None) -> HostPart:
    return HostPart(component, "anonymous", size, high_bytes=high)


def test_what_a_fork_shares_is_resident_in_each_process_and_held_once() -> None:
    phase = _phase("training", _own(50), HostPart("weights", "mapped", 30), workers=2, shm=5)
    assert phase.fullest.resident_bytes == 80
    assert phase.processes[1].resident_bytes == 60
    assert phase.needed_bytes == 50 + 2 * 10 + 5
    assert phase.held_bytes == phase.needed_bytes + 30


def test_a_shortage_names_the_limit_the_phase_and_the_component() -> None:
    phases = _phase("loading", _own(50)), _phase("saving", _own(50), _own(70, "checkpoint"), disk=9)
    found = HostBill(phases, HostLimits(memory_bytes=100, disk_bytes=8)).shortages
    assert [(each.limit, each.phase, each.component, each.needed_bytes) for each in found] == [
        ("memory", "saving", "checkpoint", 120),
        ("disk", "saving", "checkpoints", 9),
    ]


@pytest.mark.parametrize(
    ("limit", "verdict"), [(None, None), (99, "does not fit"), (104, "tight"), (120, "tight"), (160, "fits")]
)
def test_the_verdict_knows_what_is_assumed(limit: int | None, verdict: str | None) -> None:
    bill = HostBill((_phase("training", _own(100, high=130)),), HostLimits(memory_bytes=limit))
    assert bill.verdict == verdict


@linux
def test_each_phase_has_its_own_peak() -> None:
    sampler = HostSampler()
    sampler.start("loading")
    held = b"x" * (64 * MIB)
    time.sleep(0.2)
    del held
    sampler.phase("training")
    sampler.stop()
    bill = sampler.bill()
    assert bill is not None
    loading, training = bill.phases
    assert loading.needed_bytes - training.needed_bytes == pytest.approx(64 * MIB, rel=0.1)


@linux
def test_a_peak_between_two_readings_is_not_lost() -> None:
    sampler = HostSampler(max_share=1e-9)  # never reads by itself
    sampler.start("training")
    before = resident(os.getpid())
    held = b"x" * (96 * MIB)
    del held
    sampler.stop()
    bill, after = sampler.bill(), resident(os.getpid())
    assert bill is not None and before is not None and after is not None
    if after.most > before.most:  # an earlier test may have held more
        assert bill.fullest.fullest.resident_bytes == after.most


_FORKING = """
import os, time
held = bytearray(b"x" * (64 << 20))
if os.fork() == 0:
    held[:16 << 20] = b"y" * (16 << 20)
    print("ready", flush=True)
time.sleep(60)
"""


@linux
def test_a_child_that_writes_to_what_it_inherited_owns_those_pages() -> None:
    with subprocess.Popen([sys.executable, "-c", _FORKING], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            below = list(children(process.pid))
            found, share = resident(below[0]), share_of(below[0])
        finally:
            subprocess.run(["kill", *map(str, below), str(process.pid)], check=True)
    assert found is not None and share is not None
    own = found.anonymous - share.others
    assert own == pytest.approx(16 * MIB + (64 - 16) / 2 * MIB, rel=0.1)  # of a shared page, each counts a half


@linux
def test_children_are_followed() -> None:
    sampler = HostSampler()
    sampler.start("training")
    with subprocess.Popen([sys.executable, "-c", "import time; held = b'x' * (32 << 20); time.sleep(60)"]) as process:
        time.sleep(0.5)
        process.kill()
    sampler.stop()
    bill = sampler.bill()
    assert bill is not None
    assert [each.role for each in bill.phases[0].processes] == ["training", "worker"]
    assert bill.phases[0].processes[1].resident_bytes > 32 * MIB


@linux
def test_readings_take_a_small_share_of_the_time() -> None:
    sampler = HostSampler()
    sampler.start("training")
    began = time.perf_counter()
    time.sleep(1.0)
    sampler.stop()
    assert sampler.reading_seconds < 0.01 * (time.perf_counter() - began)


def test_a_system_without_proc_is_not_measured(tmp_path: Path) -> None:
    sampler = HostSampler(root=tmp_path)
    sampler.start()
    sampler.phase("training")
    sampler.stop()
    assert sampler.bill() is None


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_the_lowest_limit_of_nested_groups_decides(tmp_path: Path) -> None:
    _write(tmp_path / "proc/self/cgroup", "0::/jobs/mine\n")
    for folder, used, limit in (("jobs/mine", 5, "max"), ("jobs", 9, "100")):
        _write(tmp_path / f"sys/fs/cgroup/{folder}/memory.current", str(used))
        _write(tmp_path / f"sys/fs/cgroup/{folder}/memory.max", limit)
        _write(tmp_path / f"sys/fs/cgroup/{folder}/memory.events", "low 0\nmax 7\noom 1\noom_kill 2\n")
    assert group_memory(tmp_path) == (9, 0, 100, 2)


def test_groups_of_version_1_are_read(tmp_path: Path) -> None:
    _write(tmp_path / "proc/self/cgroup", "4:memory:/job\n0::/\n")
    _write(tmp_path / "sys/fs/cgroup/memory/job/memory.usage_in_bytes", "7")
    _write(tmp_path / "sys/fs/cgroup/memory/job/memory.limit_in_bytes", "9223372036854771712")
    _write(tmp_path / "sys/fs/cgroup/memory/job/memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 1\n")
    assert group_memory(tmp_path) == (7, 0, None, 1)


def test_files_below_a_folder_are_counted(tmp_path: Path) -> None:
    _write(tmp_path / "checkpoint-1/weights", "x" * 100)
    _write(tmp_path / "state", "x" * 11)
    assert folder_bytes(tmp_path) == 111
