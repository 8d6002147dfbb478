"""Power, clock and temperature during a run, from a fake NVML."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import pytest
from fake_gpu import FakeNvmlError

from trainatomy.measurement.device.nvml import NvmlDevice
from trainatomy.measurement.device.power import PowerReading, PowerSampler, power_use, read_power, sampler_of
from trainatomy.reporters import run_sentences
from trainatomy.results.measurement import ClockReason, PowerLimits


@dataclass
class FakePower:
    """Fake pynvml of a GPU at 500 W, whose clock the power cap lowers."""

    reasons: int = 4
    is_instance: bool = False
    has_new_names: bool = True
    NVMLError: type[Exception] = FakeNvmlError

    def __getattr__(self, name: str) -> Any:
        answers = {
            "nvmlDeviceGetPowerUsage": 500_000,
            "nvmlDeviceGetTotalEnergyConsumption": 7_000_000,
            "nvmlDeviceGetClockInfo": 1782,
            "nvmlDeviceGetMaxClockInfo": 1980,
            "nvmlDeviceGetTemperature": 61,
            "nvmlDeviceGetTemperatureThreshold": 87,
            "nvmlDeviceGetEnforcedPowerLimit": 700_000,
            "nvmlDeviceGetPowerManagementDefaultLimit": 700_000,
        }
        if self.has_new_names:
            answers["nvmlDeviceGetCurrentClocksEventReasons"] = self.reasons
        else:
            answers["nvmlDeviceGetCurrentClocksThrottleReasons"] = self.reasons
        if name not in answers:
            raise AttributeError(name)

        def answer(*_: Any) -> int:
            if self.is_instance:
                raise FakeNvmlError("Not Supported")
            return answers[name]

        return answer


def device(**settings: Any) -> NvmlDevice:
    return NvmlDevice(FakePower(**settings), 0, "GPU-1", "NVIDIA H200")


@pytest.mark.parametrize("new", [True, False])
def test_a_reading_has_what_the_driver_reports(new: bool) -> None:
    found = read_power(device(reasons=4 | 64, has_new_names=new))
    assert (found.watts, found.joules, found.clock_mhz, found.celsius) == (500.0, 7000.0, 1782, 61)
    assert found.reasons == ("power cap", "hardware thermal")


def test_a_mig_instance_reports_no_power() -> None:
    assert sampler_of(device(is_instance=True)) is None
    assert sampler_of(None) is None


@pytest.mark.timed
def test_the_thread_reads_until_it_is_stopped_and_thins_a_long_run() -> None:
    sampler = PowerSampler(device(), period=0.0005, most=10)
    sampler.start()
    time.sleep(0.2)
    sampler.stop()
    count = len(sampler.readings)
    assert 4 <= count <= 12 and sampler.period_seconds > 0.0005
    assert sampler.limits == PowerLimits(700.0, 700.0, 1980, 87)
    time.sleep(0.01)
    assert len(sampler.readings) == count


def sampled(readings: list[PowerReading]) -> PowerSampler:
    sampler = PowerSampler(device())
    sampler.readings, sampler.limits = readings, PowerLimits(700.0, 700.0, 2000, 87)
    return sampler


def reading(at: float, joules: float | None, clock: int = 2000, *reasons: ClockReason) -> PowerReading:
    return PowerReading(at, 100.0, joules, clock, 60, reasons)


def test_energy_is_the_counters_between_the_first_and_the_last_timed_step() -> None:
    sampler = sampled([reading(100 + 0.5 * count, 40.0 * count) for count in range(12)])  # 80 W
    use = power_use(sampler, began=101.25, ends=[1.0, 2.0, 3.0], first_step=2, samples=4, tokens=64)
    assert use is not None and use.counted
    assert use.joules == pytest.approx(240.0)
    assert (use.joules_per_sample, use.joules_per_token) == (pytest.approx(20.0), pytest.approx(1.25))
    assert run_sentences.power(use, 3)[0] == (
        "80.0 J per step, 20.0 J per sample, 1.25 J per token (whole GPU, by the GPU's energy counter)"
    )


def test_energy_is_integrated_where_there_is_no_counter() -> None:
    sampler = sampled([reading(100 + 0.5 * count, None) for count in range(12)])
    use = power_use(sampler, 101.25, [1.0, 2.0, 3.0], 2, 4, None)
    assert use is not None and not use.counted
    assert use.joules == pytest.approx(300.0) and use.joules_per_token is None


@pytest.mark.timed
def test_the_counter_is_read_once_a_second_and_at_both_ends() -> None:
    readings = [reading(100 + 0.1 * count, 8.0 * count if count % 10 == 0 else None) for count in range(61)]
    use = power_use(sampled(readings), began=101.25, ends=[1.0, 2.0, 3.0], first_step=2, samples=4, tokens=None)
    assert use is not None and use.counted and use.joules == pytest.approx(240.0)
    sampler = PowerSampler(device(), period=0.005)
    sampler.start()
    time.sleep(0.1)
    sampler.stop()
    counted = [one.joules is not None for one in sampler.readings]
    assert counted[0] and counted[-1] and sum(counted) == 2 < len(counted)


def test_a_run_that_is_too_short_has_no_energy() -> None:
    use = power_use(sampled([reading(100.0, 1.0), reading(101.0, 2.0)]), 100.0, [1.0], 2, 4, None)
    assert use is not None and use.joules is None
    assert run_sentences.power(use, 1)[0] == "the run was too short to measure its energy"
    assert power_use(sampled([reading(100.0, 1.0)]), 100.0, [], 2, 4, None) is None


def test_a_power_cap_is_found_in_its_steps_with_the_clock_that_it_costs() -> None:
    capped = range(10, 38)
    readings = [
        reading(100 + 0.1 * count, 0.0, *((1860, "power cap") if count in capped else (2000,))) for count in range(50)
    ]
    readings[20] = reading(102.0, 0.0, 1860)  # a gap of one reading ends no stretch
    readings[45] = reading(104.5, 0.0, 300, "idle")
    ends = [0.1 * (step + 1) + 0.001 for step in range(49)]
    use = power_use(sampled(readings), 100.0, ends, 2, 1, None)
    assert use is not None
    (found,) = use.slowdowns
    assert (found.reason, found.first_step, found.last_step) == ("power cap", 11, 38)
    assert found.clock_loss == pytest.approx(0.07)
    assert found.time_share == pytest.approx(28 / 50, abs=0.02)
    assert run_sentences.slowdown(found, 2000) == (
        "power cap in steps 12 to 39, 56.0 % of the time: the clock was 7.0 % below its maximum, 2,000 MHz"
    )
