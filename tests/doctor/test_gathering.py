"""Facts of a host, of software and of the probe, from files and answers that are written here."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from machines import HEALTHY
from typer.testing import CliRunner

from trainatomy.cli.app import app
from trainatomy.doctor import gathering, probe
from trainatomy.doctor.gathering import copy_rates, merged
from trainatomy.doctor.gpus import DriverState, read_driver, watch
from trainatomy.doctor.host import bitsandbytes_libraries, environment, read_host, read_software
from trainatomy.errors import DeviceError, TrainatomyError
from trainatomy.results.machine import GPUPair, GPUState, MachineState, Process

MEMINFO = "MemTotal: 1000 kB\nMemAvailable: 400 kB\nSwapTotal: 200 kB\nSwapFree: 50 kB\nHugePages_Total: 0\n"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    files = {
        "proc/meminfo": MEMINFO,
        "proc/vmstat": "nr_free_pages 1\npswpin 77\n",
        "proc/loadavg": "1.50 1.0 0.9 1/100 1\n",
        "sys/fs/cgroup/cpu.max": "250000 100000\n",
        "sys/fs/cgroup/cpu.stat": "usage_usec 1\nnr_periods 40\nnr_throttled 10\n",
        "sys/fs/cgroup/memory.max": "800000\n",
        "sys/fs/cgroup/memory.current": "600000\n",
        "sys/fs/cgroup/memory.stat": "anon 1\ninactive_file 100000\n",
        "sys/kernel/mm/transparent_hugepage/enabled": "always madvise [never]\n",
        "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor": "powersave\n",
        "sys/devices/system/cpu/cpu0/cpufreq/scaling_driver": "acpi-cpufreq\n",
        "sys/bus/pci/devices/a/vendor": "0x10de\n",
        "sys/bus/pci/devices/a/class": "0x030200\n",
        "sys/bus/pci/devices/b/vendor": "0x10de\n",
        "sys/bus/pci/devices/b/class": "0x068000\n",
        "sys/bus/pci/devices/c/vendor": "0x1002\n",
        "sys/bus/pci/devices/c/class": "0x120000\n",
        "sys/class/infiniband/mlx5_0/node_guid": "1",
        ".dockerenv": "",
        "dev/shm/keep": "",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_a_host_in_a_container(root: Path) -> None:
    host = read_host(0.01, root)
    assert (host.memory_bytes, host.available_bytes) == (1_024_000, 409_600)
    assert (host.swap_bytes, host.swap_used_bytes, host.swapped_pages) == (204_800, 153_600, 0)
    assert (host.cpu_quota, host.throttled_share, host.load) == (2.5, 0.25, 1.5)
    assert (host.memory_limit_bytes, host.memory_used_bytes) == (800_000, 500_000)
    assert (host.huge_pages, host.governor) == ("never", ("powersave", "acpi-cpufreq"))
    assert (host.container, host.infiniband, host.nvidia_devices) == ("Docker", ("mlx5_0",), 1)
    assert host.amd_devices == 1
    assert host.shm_bytes and host.cpus


def test_control_groups_of_version_1(root: Path) -> None:
    group = root / "sys/fs/cgroup"
    for name in ("cpu.max", "memory.max"):
        (group / name).unlink()
    for name, text in {
        "cpu/cpu.cfs_quota_us": "-1",
        "cpu/cpu.cfs_period_us": "100000",
        "memory/memory.limit_in_bytes": "9223372036854771712",
    }.items():
        (group / name).parent.mkdir(exist_ok=True)
        (group / name).write_text(text)
    host = read_host(0.01, root)
    assert (host.cpu_quota, host.memory_limit_bytes) == (None, None)


def test_what_cannot_be_read_is_unknown(tmp_path: Path) -> None:
    host = read_host(0.01, tmp_path)
    unknown = (host.memory_bytes, host.shm_bytes, host.governor, host.nvidia_devices, host.swapped_pages, host.load)
    assert unknown == (None,) * 6 and host.container == ""


def test_only_variables_that_matter_are_kept() -> None:
    variables = {"CUDA_LAUNCH_BLOCKING": "1", "NCCL_P2P_DISABLE": "0", "HOME": "/root", "CUDA_VISIBLE_DEVICES": "0,1"}
    assert set(environment(variables)) == {"CUDA_LAUNCH_BLOCKING", "CUDA_VISIBLE_DEVICES"}


def test_libraries_of_bitsandbytes(tmp_path: Path) -> None:
    for name in ("libbitsandbytes_cuda118.so", "libbitsandbytes_cuda130.so", "libbitsandbytes_cpu.so"):
        (tmp_path / name).touch()
    assert bitsandbytes_libraries(tmp_path) == ("11.8", "13.0")


def test_software_takes_over_what_the_probe_said() -> None:
    said = {
        "torch": {"torch": "9.9", "torch_cuda": "13.0", "architectures": ["sm_90"], "loaded": {"nccl": "2.28.9"}},
        "extensions": {"torchvision": "ImportError: no", "torchaudio": ""},
        "importing": "bitsandbytes",
    }
    software = read_software(DriverState("580.1", (13, 0)), said)
    assert (software.torch, software.architectures, software.loaded) == ("9.9", ("sm_90",), {"nccl": "2.28.9"})
    assert (software.driver, software.driver_cuda) == ("580.1", (13, 0))
    errors = {each.name: each.error for each in software.extensions}
    if "bitsandbytes" in software.versions:
        assert errors["bitsandbytes"] == "importing it ends the process"


def test_lines_of_the_probe_are_merged_and_others_ignored() -> None:
    lines = ['{"torch": {"a": 1}}', "a library says hello", '{"extensions": {"x": ""}, "importing": ""}']
    lines += ['{"importing": "y"}', '{"extensions": {"y": "E"}, "importing": ""}', "3"]
    assert merged("\n".join(lines)) == {"torch": {"a": 1}, "extensions": {"x": "", "y": "E"}, "importing": ""}


def test_the_probe_says_what_torch_says(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr("sys.argv", ["probe"])
    monkeypatch.setattr(probe, "extensions", lambda: ())
    probe.main()
    said = merged(capsys.readouterr().out)["torch"]
    assert (said["torch"], said["torch_cuda"]) == (torch.__version__, torch.version.cuda)


def test_copies_of_the_probe_become_values() -> None:
    said = {
        "rates": {"pinned_to_device": 5e10},
        "pcie": {"generation": 5, "width": 16},
        "replays": 0,
        "power": {"watts": 500.0, "reasons": ["power cap"]},
        "clocks": {"sm": 1500},
    }
    rates = copy_rates(json.loads(json.dumps(said)))
    assert rates is not None
    assert (rates.pcie.generation, rates.power.reasons, rates.clocks.sm) == (5, ("power cap",), 1500)
    assert copy_rates({"error": "OutOfMemoryError"}) is None


@pytest.mark.parametrize(
    ("gpu", "options", "reason"),
    [
        (GPUState(0, "H200"), {}, ""),
        (GPUState(0, "H200"), {"bandwidth": False}, "unwanted"),
        (GPUState(0, "H200", processes=(Process(3),)), {}, "busy"),
        (GPUState(0, "H200", utilisation=0.5), {}, "busy"),
    ],
)
def test_a_gpu_in_use_is_not_measured(
    gpu: GPUState, options: dict[str, Any], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[str]] = []
    said = {"copies": {gpu.uuid: {"rates": {}}}}
    monkeypatch.setattr(gathering, "read_driver", lambda wanted: DriverState("580", gpus=(gpu,)))
    monkeypatch.setattr(gathering, "probe", lambda uuids: asked.append(list(uuids)) or (said if uuids else {}))
    monkeypatch.setattr(gathering, "read_host", lambda: HEALTHY.host)
    machine = gathering.gather(**options)
    assert machine.unmeasured == reason
    assert asked == [[] if reason else [gpu.uuid]]


def test_rates_between_gpus_are_found_by_their_uuids(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = DriverState(
        "580", gpus=(GPUState(0, "H200", "a"), GPUState(1, "H200", "b")), pairs=(GPUPair(0, 1, "NV18"),)
    )
    monkeypatch.setattr(gathering, "read_driver", lambda wanted: driver)
    monkeypatch.setattr(gathering, "probe", lambda uuids: {"copies": {"a": {}}, "between": {"a b": 3e11}})
    monkeypatch.setattr(gathering, "read_host", lambda: HEALTHY.host)
    assert gathering.gather().pairs == (GPUPair(0, 1, "NV18", None, 3e11),)


def test_no_driver_is_a_fact() -> None:
    state = read_driver()
    assert state.gpus == () or state.version


@pytest.mark.parametrize("options", [{"pid": 1}, {"seconds": 1.0}, {"gpus": (0,)}])
def test_what_needs_a_gpu_is_refused_without_one(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(DeviceError, match="pip install nvidia-ml-py"):
        gathering.gather(**options)


def test_a_process_that_is_not_there() -> None:
    with pytest.raises(TrainatomyError, match="--watch-pid 999999999: there is no such process"):
        watch(0.1, pid=999_999_999)


@pytest.mark.parametrize(("machine", "code"), [(HEALTHY, 0), (MachineState(), 0), ("slow", 9)])
def test_exit_codes(machine: MachineState | str, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from machines import with_gpu

    state = with_gpu(power={"limit_watts": 300.0}) if isinstance(machine, str) else machine
    monkeypatch.setattr("trainatomy.api.diagnosing.gather", lambda *args, **options: state)
    result = CliRunner().invoke(app(), ["doctor", "--json"])
    assert getattr(result.exception, "exit_code", result.exit_code) == code
    assert json.loads(result.stdout)["healthy"] is (code == 0)
