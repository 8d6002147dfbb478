"""The readers meet the answers of a real H200, idle and while it multiplied matrices."""

from __future__ import annotations

from dataclasses import replace

import pytest
from machines import HOST
from recorded_nvml import RECORDED, TWO, RecordedNvml

from trainatomy.doctor.gathering import copy_rates, diagnose
from trainatomy.doctor.gpus import DriverState, NoSuchGPU, read_driver, watch
from trainatomy.measurement.device import nvml
from trainatomy.results.machine import Clocks, GPUPair, GPUState, MachineState, Software, Temperature


def replay(monkeypatch: pytest.MonkeyPatch, moment: str) -> None:
    monkeypatch.setattr(nvml, "_library", lambda: RecordedNvml(moment))
    monkeypatch.setattr("os.cpu_count", lambda: 16)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> DriverState:
    replay(monkeypatch, "idle")
    return read_driver()


def test_an_idle_gpu(driver: DriverState) -> None:
    (gpu,) = driver.gpus
    assert (driver.version, driver.cuda, driver.error, driver.pairs) == ("580.159.04", (13, 0), "", ())
    assert (gpu.name, gpu.capability, gpu.memory_bytes) == ("NVIDIA H200", (9, 0), 150_754_820_096)
    assert (gpu.power.watts, gpu.power.limit_watts, gpu.power.default_watts) == (78.17, 700.0, 700.0)
    assert gpu.power.reasons == ("idle",)
    assert gpu.clocks == Clocks(345, 1980, 3201, 3201)
    assert gpu.temperature == Temperature(38, 87, 89, 95)
    assert (gpu.pcie.generation, gpu.pcie.max_generation, gpu.pcie.width, gpu.pcie.replays) == (5, 5, 16, 1)
    assert (gpu.persistence, gpu.mig, gpu.compute_mode, gpu.utilisation) == (True, False, "default", 0.0)
    assert gpu.near_cpus == tuple(range(16))


def test_what_the_virtual_machine_does_not_report_is_unknown(driver: DriverState) -> None:
    (gpu,) = driver.gpus
    assert (gpu.nvlinks.active, gpu.nvlinks.inactive, gpu.nvlinks.errors) == ((), (), {})
    assert (gpu.memory.ecc, gpu.memory.uncorrected, gpu.memory.retired_pages) == (True, 0, None)
    assert (gpu.memory.remapped_rows, gpu.memory.repair_pending, gpu.memory.repair_failed) == (0, False, False)


def test_a_gpu_under_load(monkeypatch: pytest.MonkeyPatch) -> None:
    replay(monkeypatch, "load")
    (gpu,) = read_driver().gpus
    assert (gpu.power.reasons, gpu.clocks.sm, gpu.utilisation) == (("power cap",), 1470, 0.99)
    assert gpu.power.watts == 690.365


def test_nothing_but_settings_is_found_on_the_recorded_machine(driver: DriverState) -> None:
    torch = RECORDED["torch"]
    copies = {name: RECORDED["copies"]["bytes"] / min(taken) for name, taken in RECORDED["copies"]["seconds"].items()}
    gpu: GPUState = driver.gpus[0]
    rates = copy_rates({"rates": copies, "pcie": {"generation": 5, "width": 16}, "replays": 0})
    software = Software(
        driver=driver.version,
        driver_cuda=driver.cuda,
        torch=torch["torch"],
        torch_cuda=torch["torch_cuda"],
        architectures=tuple(torch["architectures"]),
        versions=RECORDED["versions"],
        loaded=torch["loaded"],
        flash_attention=torch["flash_attention"],
        matmul_tf32=torch["matmul_tf32"],
        missing=("causal-conv1d", "mamba-ssm"),
    )
    machine = MachineState((replace(gpu, copies=rates),), (), software, HOST)
    assert [finding.name for finding in diagnose(machine).findings] == ["tf32_off", "slow_fallback"]


def test_a_number_beyond_the_gpus_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    replay(monkeypatch, "idle")
    with pytest.raises(NoSuchGPU, match="--gpu 3: this machine has 1 GPU"):
        read_driver((3,))


def test_a_watched_training(monkeypatch: pytest.MonkeyPatch) -> None:
    replay(monkeypatch, "load")
    watched = watch(0.5, sleep=lambda seconds: None)
    (gpu,) = watched.gpus
    assert (gpu.samples, gpu.utilisation, gpu.sm_clock, gpu.hottest) == (5, 0.99, 1470.0, 59)
    assert gpu.reasons == {"power cap": 1.0}


def test_the_driver_is_only_asked_never_told(monkeypatch: pytest.MonkeyPatch) -> None:
    binding = RecordedNvml("load")
    monkeypatch.setattr(nvml, "_library", lambda: binding)
    read_driver()
    watch(0.1, sleep=lambda seconds: None)
    calls = binding.asked - {"nvmlInit", "nvmlShutdown"}
    assert len(calls) > 20
    assert {name for name in calls if not name.startswith(("nvmlDeviceGet", "nvmlSystemGet"))} == set()


def test_two_gpus_with_nvlink(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvml, "_library", lambda: RecordedNvml("idle", TWO))
    monkeypatch.setattr("os.cpu_count", lambda: 32)
    driver = read_driver()
    assert driver.pairs == (GPUPair(0, 1, "NV18", True),)
    assert "GPU0\t X \tNV18" in TWO["topology"]
    for gpu in driver.gpus:
        assert (len(gpu.nvlinks.active), gpu.nvlinks.inactive, gpu.nvlinks.generation) == (18, (), 4)
        assert (gpu.nvlinks.errors["replay"], gpu.nvlinks.errors["recovery"]) == (0, 0)
        assert gpu.nvlinks.errors["crc"] > 90
        assert gpu.near_cpus == tuple(range(32))
    copied = tuple(replace(pair, copy_rate=380.6e9) for pair in driver.pairs)
    assert diagnose(MachineState(driver.gpus, copied)).findings == ()
