"""The host's pace: the probe, where it runs, and what the prediction is at the pace that was measured."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from fake_clock import Machine
from measured import RESULT

import trainatomy
from trainatomy.catalog.calibrations import Calibration
from trainatomy.catalog.machines import reference_host
from trainatomy.measurement.device import host as host_probe
from trainatomy.measurement.device import host as thread_waits
from trainatomy.measurement.device.host import PROBE, HostProbe
from trainatomy.measurement.step.instruments import Monitors, Stopwatch
from trainatomy.reporters import run_sentences
from trainatomy.results.comparison import ComparisonRow
from trainatomy.results.measurement import HostPace, PowerLimits, PowerUse, Slowdown
from trainatomy.results.time import PacedStep, Time
from trainatomy.timing.step import probe_seconds
from trainatomy.workload.schema import Workload

TINY = {
    "gpu": "h200",
    "model": {
        "class": "BertForSequenceClassification",
        "config": {
            "num_hidden_layers": 2,
            "hidden_size": 64,
            "num_attention_heads": 2,
            "intermediate_size": 128,
            "vocab_size": 100,
        },
    },
    "data": {"sequence_length": 16},
    "train": {"per_device_train_batch_size": 2},
}


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_the_probe_leaves_the_process_as_it_was(mode: type) -> None:
    torch.manual_seed(0)
    random = torch.get_rng_state()
    with mode():
        before = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        assert host_probe.probe_seconds() > 0
        assert (torch.is_grad_enabled(), torch.is_inference_mode_enabled()) == before
    assert torch.equal(torch.get_rng_state(), random)
    assert all(tensor.grad is None and tensor.device.type == "cpu" for tensor in host_probe._tensors())


def test_the_probe_runs_when_a_share_of_the_time_pays_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine()
    machine.install(monkeypatch)
    monkeypatch.setattr(host_probe, "SHARE", 0.01)
    monkeypatch.setattr(host_probe, "probe_seconds", lambda: _spend(machine, 0.001))
    probe = HostProbe()
    probe.before()
    found = []
    for step in range(50):
        machine.now += 0.03
        if probe.is_due():
            probe.between()
            found.append(step)
    assert found == [3, 7, 11, 15, 19, 23, 27, 31, 35, 39, 43, 47]
    pace = probe.result()
    assert pace is not None and len(pace.before_seconds) == host_probe.REPEATS and len(pace.during_seconds) == 12


def test_a_stalled_probe_does_not_delay_the_next_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(now=1.0)
    machine.install(monkeypatch)
    costs = iter([0.001, 0.001, 0.001, 0.1, 0.001])
    monkeypatch.setattr(host_probe, "probe_seconds", lambda: _spend(machine, next(costs)))
    probe = HostProbe()
    probe.before()
    probe.between()
    machine.now += 0.001 / host_probe.SHARE + 1e-6
    assert probe.is_due()


def test_the_pace_is_the_mean_beside_the_steps_without_stalls() -> None:
    around = HostPace(PROBE, (9e-4, 9e-4, 2e-4), (3e-4, 4e-4, 60e-4, 2.5e-4), (3.5e-4, 9e-4, 9e-4))
    assert around.seconds == pytest.approx((2.5e-4 + 3e-4 + 3.5e-4 + 4e-4) / 4)
    many = replace(around, during_seconds=(3e-4,) * 8 + (60e-4,))  # of eleven, the two least and most are left out
    assert many.seconds == pytest.approx(3e-4)


def test_each_thread_counts_at_its_own_pace() -> None:
    times = HostPace(PROBE, (4e-4,) * 3, (4e-4,) * 4, (4e-4,) * 3, exponent=0.9)
    halves = replace(times, backward_seconds=(1e-4,) * 10, backward_reference_share=0.5)
    main, backward = 3.0**0.9, 1.0
    assert halves.beside(2e-4, 0.0) == pytest.approx(main)
    assert halves.beside(2e-4, 1.0) == pytest.approx(backward)
    assert halves.beside(2e-4, 0.25) == pytest.approx(0.75 * main + 0.25 * backward)
    assert halves.beside(2e-4) == times.beside(2e-4, 0.25) == pytest.approx(2.0**0.9), "the sum, where no part is known"
    stalled = replace(halves, during_seconds=(4e-4, 4e-4, 4e-4, 40e-4))
    assert stalled.beside(2e-4, 0.0) == pytest.approx(main)
    assert replace(halves, backward_seconds=(1e-4,)).beside(2e-4, 0.0) == times.beside(2e-4)


def test_the_probe_notes_the_part_of_autograds_thread() -> None:
    probe = HostProbe()
    probe.before()
    probe.between()
    probe.after()
    found = probe.result()
    assert found is not None and found.backward_reference_share == reference_host().backward_probe_shares[PROBE]
    whole = (*found.before_seconds, *found.during_seconds, *found.after_seconds)
    assert len(found.backward_seconds) == len(whole) == 2 * host_probe.REPEATS + 1
    assert all(0 < part < time for part, time in zip(found.backward_seconds, whole, strict=True))


def test_without_readings_between_steps_those_around_them_count() -> None:
    ranks = HostPace(PROBE, (2e-4, 3e-4, 4e-4), (), (3e-4, 5e-4, 60e-4))
    assert ranks.seconds == pytest.approx((3e-4 + 3e-4 + 4e-4 + 5e-4) / 4)
    assert HostPace(PROBE, (), (2e-4,), ()).seconds == 2e-4


def test_steps_do_not_contain_the_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine()
    machine.install(monkeypatch)
    monkeypatch.setattr(host_probe, "probe_seconds", lambda: _spend(machine, 0.2))
    monkeypatch.setattr(host_probe, "SHARE", 1.0)
    stopwatch, monitors = Stopwatch(), Monitors(HostProbe())
    monitors.begin(stopwatch, 2)
    stopwatch.tick()
    for _ in range(4):
        machine.now += 1.0
        stopwatch.tick()
        monitors.step_ended()
    stopwatch.finish()
    monitors.end()
    assert stopwatch.seconds == pytest.approx([1.0] * 4)
    assert stopwatch.ends == pytest.approx([1.0, 2.2, 3.4, 4.6])
    assert monitors.host_probe is not None and (pace := monitors.host_probe.result()) is not None
    assert pace.during_seconds == pytest.approx((0.2,) * 4) and len(pace.after_seconds) == host_probe.REPEATS


def test_ranks_are_not_delayed_by_the_probe_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    Machine().install(monkeypatch)
    stopwatch, monitors = Stopwatch(), Monitors(HostProbe(), between=False)
    monitors.begin(stopwatch, 2)
    for _ in range(3):
        stopwatch.tick()
        monitors.step_ended()
    monitors.end()
    assert monitors.host_probe is not None and (pace := monitors.host_probe.result()) is not None
    assert pace.during_seconds == () and pace.before_seconds and pace.after_seconds


def _spend(machine: Machine, seconds: float) -> float:
    machine.now += seconds
    return seconds


def test_a_step_that_the_host_bounds_takes_its_pace() -> None:
    exact = trainatomy.predict(Workload.from_mapping(TINY), host_paces=(0.5, 1.3, 1.5, 2.0)).time
    assert exact is not None and exact.bound_by == "host"
    plain = trainatomy.predict(Workload.from_mapping(TINY)).time
    assert plain is not None and plain.at_paces == () and plain.step_seconds == exact.step_seconds
    steps = {one.pace: one.step_seconds for one in exact.at_paces}
    assert steps[2.0] == pytest.approx(2 * exact.step_seconds, rel=0.02)
    assert steps[0.5] == pytest.approx(0.5 * exact.step_seconds, rel=0.02)
    between = replace(exact, at_paces=tuple(one for one in exact.at_paces if one.pace != 1.3))
    assert between.step_seconds_at(1.3) == pytest.approx(steps[1.3], rel=0.01)
    assert exact.step_seconds_at(1.0) == exact.step_seconds
    assert exact.step_seconds_at(2.5) is None and plain.step_seconds_at(1.2) is None


def test_the_pace_is_relative_to_the_host_that_the_prediction_assumes() -> None:
    environment = {"gpu": "NVIDIA H200", "capability": [9, 0], "date": ""}
    section = {"reference": reference_host().id, "factors": {}, "probe_us": {PROBE: 400.0}}
    of_this_host = Calibration(environment, (), {"host": section}, "by hand")
    assert probe_seconds(of_this_host) == {PROBE: pytest.approx(400e-6)}
    other = Calibration(environment, (), {"host": {**section, "reference": "another"}}, "by hand")
    assert probe_seconds(other) == probe_seconds(None) == reference_host().probe_seconds
    time = _time(probe_seconds(of_this_host))
    assert time.pace_of(HostPace(PROBE, during_seconds=(600e-6, 500e-6, 520e-6))) == pytest.approx(1.3)
    assert time.pace_of(HostPace("another/1", during_seconds=(600e-6,))) is None


def test_waits_for_a_processor_stretch_the_pace_and_the_probe_counts_by_its_power() -> None:
    time = _time({PROBE: 200e-6})
    slow = HostPace(PROBE, during_seconds=(400e-6,), reference_seconds=200e-6, waited_share=0.5, exponent=0.5)
    assert time.pace_of(slow) == slow.relative == pytest.approx(2 * 2**0.5)
    assert time.pace_of(replace(slow, waited_share=None)) == pytest.approx(2**0.5)


def test_the_reference_host_has_a_pace(monkeypatch: pytest.MonkeyPatch) -> None:
    host = reference_host()
    monkeypatch.setattr(host_probe, "probe_seconds", lambda: host.probe_seconds[PROBE])
    probe = HostProbe()
    probe.before()
    pace = probe.result()
    assert pace is not None and pace.relative == pytest.approx(1.0) and 0 < pace.exponent < 1


def test_waits_are_those_of_the_named_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(**times: str) -> None:
        for thread, content in times.items():
            (tmp_path / thread[1:]).mkdir(exist_ok=True)
            (tmp_path / thread[1:] / "schedstat").write_text(content, encoding="ascii")

    monkeypatch.setattr(thread_waits, "_TASKS", tmp_path)
    write(t1="100 50 1", t2="10 0 1", t3="0 0 0")
    meter = thread_waits.ThreadMeter((1, 2, 9))
    assert meter.read() is None
    write(t1="400 250 9", t2="310 100 9", t3="9000 9000 9")
    assert meter.read() == pytest.approx(300 / 900)
    assert thread_waits.ThreadMeter((9,)).read() is None


def test_the_probe_works_on_the_thread_of_autograd() -> None:
    host_probe._Visit.seconds = host_probe._Visit.thread = 0
    assert host_probe.probe_seconds() > host_probe._Visit.seconds > 0
    assert host_probe._Visit.thread in host_probe.launching_threads()


def test_a_page_says_what_is_predicted_at_the_pace_and_at_a_quiet_host() -> None:
    pace = HostPace(PROBE, (490e-6,), (600e-6,) * 10, (510e-6,))
    found = run_sentences.host_pace(pace, _time({PROBE: 400e-6}), 0.0155)
    assert found == [
        "probe of the CPU: 600 µs between steps, 490 µs before, 510 µs after them",
        "the CPU took 1.50 times as long as the one that the prediction assumes",
        "predicted at this pace: 15 ms per step (-3.2 %); at that of a quiet host: 10 ms",
    ]
    stalled = replace(pace, others_share=0.9, stolen_share=0.02, throttled_share=0.3, waited_share=0.4)
    assert run_sentences.host_pace(stalled, None, 0.0155)[1:5] == [
        "its threads waited for a processor for 40.0 % of their time",
        "other processes used 90.0 % of the processors",
        "the hypervisor gave 2.0 % of their time to other machines",
        "the container's limit of processors stopped it for 30.0 % of the time",
    ]
    unknown = run_sentences.host_pace(pace, None, 0.0155)
    assert len(unknown) == 2 and "was not measured" in unknown[1]
    assert "host_pace" in run_sentences.of_run(replace(RESULT, host_pace=pace), None)


def test_a_measured_comparison_says_the_pace_of_each_row_and_what_slowed_it() -> None:
    pace = HostPace(PROBE, during_seconds=(600e-6,))
    capped = Slowdown("power cap", 1, 3, 0.5, 0.07)
    power = PowerUse(1.0, None, True, None, None, PowerLimits(clock_mhz=2000), (capped,), (), 0.0, 0.05)
    measured = replace(RESULT, host_pace=pace, power=power)
    prediction = replace(trainatomy.predict(Workload.from_mapping(TINY), timed=False), time=_time({PROBE: 400e-6}))
    row = ComparisonRow("mine", {}, prediction, measurements=(measured,))
    assert run_sentences.compared_pace(row) == (
        "the CPU took 1.50 times as long as assumed: 15 ms per step predicted at this pace, 10 ms on a quiet host"
    )
    assert run_sentences.compared_slowdowns(row).startswith("power cap in steps 2 to 4, 50.0 % of the time")
    without = replace(row, measurements=(RESULT,))
    assert (run_sentences.compared_pace(without), run_sentences.compared_slowdowns(without)) == ("", "")


def _time(probe: dict[str, float]) -> Time:
    steps = (PacedStep(2.0, 0.020),)
    return Time(
        0.01, (0.009, 0.011), 1.0, None, "host", 0.005, 0.01, {}, 0, 0.0, None, None, 1, "", "", (),
        at_paces=steps, probe_seconds=probe,
    )  # fmt: skip
