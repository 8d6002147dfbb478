"""``calibrate`` waits for a quiet moment, keeps the least of what it measures, and refuses to keep a busy one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import trainatomy
from trainatomy.catalog.machines import reference_host
from trainatomy.errors import TrainatomyError
from trainatomy.measurement.calibration import calibrate, expected, host, quiet
from trainatomy.measurement.calibration import host as phases
from trainatomy.measurement.device import host as host_load
from trainatomy.measurement.device.host import PROBE, HostLoad, LoadMeter
from trainatomy.reporters import run_sentences
from trainatomy.results.measurement import HostPace

IDLE = {"others_share": 0.02, "stolen_share": 0.0, "throttled_share": 0.0}
BUSY = {**IDLE, "others_share": 0.9}


def attempt(microseconds: float, load: dict[str, float], probe: float = 200.0) -> dict[str, Any]:
    rows = [{"forward": microseconds, "backward": 100.0}]
    return {"trainings": rows, "probe_us": {PROBE: probe}, "probe_spread": 1.02, "load": load}


@pytest.fixture
def attempts(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """Let ``measure_phases`` find these attempts, without waiting."""

    def answer(*found: dict[str, Any]) -> list[str]:
        waiting = iter(found)

        class Process:
            def __init__(self, module: str) -> None:
                assert module == "phases"

            def __enter__(self) -> Process:
                return self

            def __exit__(self, *_: object) -> None: ...

            def get(self, time_limit: float) -> Any:
                return next(waiting)

        monkeypatch.setattr(host, "JsonProcess", Process)
        monkeypatch.setattr(host, "wait_until_quiet", lambda seconds, report: "")
        return []

    return answer


def test_a_quiet_machine_is_measured_once(attempts: Callable[..., list[str]]) -> None:
    lines = attempts(attempt(300.0, IDLE))
    found = host.measure_phases(lines.append)
    assert (found["attempts"], found["busy"]) == (1, "") and len(lines) == 1


def test_a_busy_machine_is_measured_again_and_the_least_is_kept(attempts: Callable[..., list[str]]) -> None:
    attempts(attempt(300.0, BUSY, 280.0), attempt(200.0, IDLE, 200.0))
    found = host.measure_phases(lambda line: None)
    assert found["trainings"] == [{"forward": 200.0, "backward": 100.0}]
    assert (found["attempts"], found["busy"], found["load"]) == (2, "", IDLE)
    attempts(attempt(150.0, BUSY, 180.0), attempt(200.0, IDLE, 200.0))
    assert host.measure_phases(lambda line: None)["busy"] == ""
    attempts(attempt(250.0, BUSY, 280.0), attempt(300.0, BUSY, 260.0), attempt(270.0, BUSY, 290.0))
    found = host.measure_phases(lambda line: None)
    assert found["trainings"][0]["forward"] == 250.0
    assert (found["attempts"], found["probe_us"]) == (3, {PROBE: 260.0})
    assert found["busy"] == "other processes use 90% of the processors"


@pytest.mark.parametrize(
    ("load", "spread", "found"),
    [
        (IDLE, 1.05, ""),
        ({**IDLE, "others_share": None, "stolen_share": None}, 1.05, ""),
        ({**IDLE, "stolen_share": 0.1}, 1.05, "the hypervisor gives 10% of the processors' time to other machines"),
        ({**IDLE, "throttled_share": 0.3}, 1.05, "the container's limit of processors stops it for 30% of the time"),
        (IDLE, 1.4, ""),
        (IDLE, 2.4, "a fixed piece of work typically takes 2.40 times as long as at best"),
    ],
)
def test_what_makes_a_machine_busy(load: dict[str, Any], spread: float, found: str) -> None:
    assert quiet.reason(HostLoad(**load), spread) == found


def test_a_wait_ends_with_the_first_quiet_look_or_when_its_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter(range(1000))
    looks = iter([HostLoad(0.9, 0.0, 0.0), HostLoad(0.8, 0.0, 0.0), HostLoad(0.1, 0.0, 0.0)])
    monkeypatch.setattr(quiet, "probe_seconds", lambda: 1e-4)
    monkeypatch.setattr(quiet.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(quiet.time, "monotonic", lambda: next(now))
    monkeypatch.setattr(quiet.LoadMeter, "read", lambda meter: next(looks))
    lines: list[str] = []
    assert quiet.wait_until_quiet(100, lines.append) == ""
    assert [line.rpartition(": ")[2] for line in lines] == [
        "other processes use 90% of the processors",
        "other processes use 80% of the processors",
    ]
    monkeypatch.setattr(quiet.LoadMeter, "read", lambda meter: HostLoad(0.7, 0.0, 0.0))
    assert "70%" in quiet.wait_until_quiet(3, lines.append)


def test_a_busy_calibration_is_not_kept_unless_it_is_forced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Measured(Exception):
        pass

    def kernels(*_: object) -> None:
        raise Measured

    busy = {**attempt(300.0, BUSY), "busy": "other processes use 90% of the processors", "attempts": 3}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    monkeypatch.setattr(calibrate, "measure_phases", lambda report: busy)
    monkeypatch.setattr(calibrate, "kernel_points", kernels)
    monkeypatch.setattr(host, "JsonProcess", lambda *_: pytest.MonkeyPatch.context())
    with pytest.raises(TrainatomyError, match=r"busy: other processes use 90% .* 3 attempts.*--force"):
        trainatomy.calibrate(tmp_path / "calibration.json")
    assert not list(tmp_path.iterdir())
    with pytest.raises(Measured):
        trainatomy.calibrate(tmp_path / "calibration.json", force=True)


def test_the_section_says_how_busy_the_host_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "trainings", lambda: expected.trainings()[:1])

    class Expected:
        def get(self, time_limit: float) -> Any:
            return [{"forward": 200.0, "backward": 100.0}]

    measured = {**attempt(300.0, IDLE), "busy": "", "attempts": 1}
    found = host.host_section(measured, Expected())  # type: ignore[arg-type]
    assert found["factors"] == {"graph": 1.5, "backward": 1.0} and found["probe_us"] == {PROBE: 200.0}
    assert run_sentences.calibrated_host(found) == [
        "quiet",
        "other processes used 2.0 % of the processors; the probe typically took 1.02 times its quickest time",
    ]
    forced = run_sentences.calibrated_host({**found, "busy": "it was loud"})
    assert forced[0] == "busy, and kept because of --force: it was loud"
    assert "earlier version" in run_sentences.calibrated_host({"factors": {}})[0]


def test_the_probe_is_timed_between_steps_and_belongs_to_no_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]

    def probe() -> float:
        now[0] += 5.0
        return 5.0

    monkeypatch.setattr(phases, "probe_seconds", probe)
    monkeypatch.setattr(phases.time, "perf_counter", lambda: now[0])
    timer = phases.PhaseTimer()
    for _ in range(2):
        now[0] += 1.0
        timer.step_end(0)
    assert timer.probes == [5.0, 5.0] and [step["other"] for step in timer.steps] == [1e6, 1e6]


def test_rounds_of_a_slow_moment_are_taken_at_the_pace_of_a_quick_one(monkeypatch: pytest.MonkeyPatch) -> None:
    exponent = reference_host().pace_exponents[PROBE]
    paces = iter((2.0, 1.0, 1.5))

    def slow_round(workload: object, device: str, probes: list[float]) -> phases.Round:
        times = (next(paces) * 1e-4,) * 10
        probes += times
        pace = HostPace(PROBE, during_seconds=times, waited_share=0.5, exponent=exponent)
        return phases.Round(dict.fromkeys(phases.PHASES, 2 * 300.0 * (times[0] / 0.0001) ** exponent), pace)

    monkeypatch.setattr(phases, "_round", slow_round)
    found = phases.measured(["any"])  # type: ignore[list-item]
    assert found["trainings"] == [dict.fromkeys(phases.PHASES, 300.0)]
    assert found["probe_us"] == {PROBE: 100.0} and found["probe_spread"] == 1.5


def test_the_load_of_others_is_without_our_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stat = tmp_path / "stat"
    ticks = host_load._TICKS_PER_SECOND

    def write(busy: float, stolen: float) -> None:
        line = f"cpu {round(busy * ticks)} 0 0 999 0 0 0 {round(stolen * ticks)} 0 0"
        stat.write_text("\n".join([line, "cpu0 1", "cpu1 1", "cpu2 1", "cpu3 1", "intr 5"]), encoding="ascii")

    clock, own = [100.0], [2.0]
    monkeypatch.setattr(host_load, "_STAT", stat)
    monkeypatch.setattr(host_load, "_CGROUP_STATS", (tmp_path / "none", tmp_path / "none"))
    monkeypatch.setattr(host_load.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(host_load.os, "times", lambda: _Times(own[0]))
    write(50.0, 1.0)
    meter = LoadMeter()
    clock[0], own[0] = 110.0, 10.0
    write(70.0, 3.0)  # 20 s at work, 8 of them ours, of 4 processors in 10 s
    assert meter.read() == HostLoad(pytest.approx(0.3), pytest.approx(0.05), 0.0)
    monkeypatch.setattr(host_load, "_STAT", tmp_path / "none")
    assert LoadMeter().read().others_share is None


class _Times:
    def __init__(self, user: float) -> None:
        self.user, self.system, self.children_user, self.children_system = user, 0.0, 0.0, 0.0
