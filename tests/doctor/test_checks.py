"""Every finding fires on a machine that has its cause, alone; a healthy machine has none."""

from __future__ import annotations

from dataclasses import replace

import pytest
from machines import GIB, HEALTHY, HOST, SOFTWARE, with_gpu, with_host, with_software, without_gpus

from trainatomy.catalog.machines import findings, variables
from trainatomy.doctor.gathering import diagnose
from trainatomy.doctor.gpu_checks import ranges
from trainatomy.doctor.host_checks import has_binary, has_ptx, same_version
from trainatomy.results.machine import Extension, Finding, GPUPair, MachineState, Process, Watched, WatchedGPU

OLD_DRIVER = {"driver_error": "", "driver": "535.1", "driver_cuda": (12, 2)}


def paired(connection: str, *, peer_access: bool = True) -> MachineState:
    return replace(HEALTHY, pairs=(GPUPair(0, 1, connection, peer_access),))


def watched(*, pid: int | None = 7, pid_bytes: int | None = GIB, **figures: object) -> MachineState:
    gpu = WatchedGPU(0, 50, **{"utilisation": 0.97, "pid_bytes": pid_bytes, **figures})  # type: ignore[arg-type]
    return replace(HEALTHY, watched=Watched(5.0, (gpu,), pid, 1.1))


def no_driver(error: str) -> MachineState:
    return without_gpus(software=replace(SOFTWARE, driver=None, driver_error=error))


def died(text: str, **host: object) -> MachineState:
    return replace(with_host(**host) if host else HEALTHY, died=text)


CGROUP_LINE = (
    "[5.1] memory: usage 67108864kB, limit 67108864kB, failcnt 88\n"
    "[5.1] Memory cgroup out of memory: Killed process 4242 (python) total-vm:99kB, anon-rss:33554432kB, file-rss:4kB"
)
WORKER = "RuntimeError: DataLoader worker (pid 77) is killed by signal: "
NO_BINDING = "Reading a GPU's memory needs NVML's Python binding: pip install nvidia-ml-py"
CASES: dict[str, list[MachineState]] = {
    "died_of_group": [
        died(CGROUP_LINE),
        died("oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=job"),
        died(
            "slurmstepd: error: Detected 1 oom_kill event in StepId=1.0. Some of the step tasks have been OOM Killed."
        ),
        died("    Reason:       OOMKilled\n    Exit Code:    137"),
        died("low 0\nhigh 0\nmax 812\noom 3\noom_kill 1\n"),
    ],
    "died_of_machine": [
        died("Out of memory: Killed process 4242 (python) total-vm:99kB, anon-rss:33554432kB, file-rss:4kB"),
        died("python invoked oom-killer: gfp_mask=0x140dca\nexit code -9"),
    ],
    "died_by_kill": [
        died(text)
        for text in (
            "-9",
            "137",
            "Killed",
            WORKER + "Killed. ",
            "exitcode  : -9 (pid: 5)",
            "torch.multiprocessing.spawn.ProcessExitedException: process 3 terminated with signal SIGKILL",
            "subprocess.CalledProcessError: Command '...' died with <Signals.SIGKILL: 9>.",
            "returned non-zero exit status 137.",
        )
    ],
    "died_of_shm": [
        died(WORKER + "Bus error. It is possible that dataloader's workers are out of shared memory."),
        died("RuntimeError: unable to write to file </torch_88_1_0>: No space left on device (28)"),
        died("-7"),
        died("exited with code 135"),
    ],
    "died_of_allocation": [
        died("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4294967296 bytes. Error code 12"),
        died("OSError: [Errno 12] Cannot allocate memory"),
    ],
    "died_of_disk": [died("OSError: [Errno 28] No space left on device: 'out/checkpoint-500/optimizer.pt'")],
    "died_of_gpu": [died("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.")],
    "died_unknown": [died("KeyError: 'labels'"), died("low 0\noom_kill 0\n")],
    "group_killed": [with_host(oom_kills=2)],
    "nvlink_down": [with_gpu(nvlinks={"active": tuple(range(16)), "inactive": (16, 17)})],
    "nvlink_errors": [with_gpu(nvlinks={"errors": {kind: 3}}) for kind in ("replay", "recovery")],
    "fabric_not_ready": [with_gpu(nvlinks={"fabric": "in progress"})],
    "no_peer_access": [paired("NV18", peer_access=False)],
    "slow_pair": [
        replace(HEALTHY, pairs=(GPUPair(0, 1, "NV18", True, 48e9),)),
        replace(with_gpu(capability=(8, 6)), pairs=(GPUPair(0, 1, "NV4", True, 20e9),), software=SOFTWARE),
    ],
    "far_gpus": [paired("SYS"), paired("NODE")],
    "pcie_only": [paired("PHB"), paired("PIX")],
    "pcie_narrow": [with_gpu(copies={"pcie": {"width": 8}}), with_gpu(copies=None, pcie={"width": 8})],
    "pcie_slow": [with_gpu(copies={"pcie": {"generation": 4}})],
    "pcie_slot": [with_gpu(pcie={"max_generation": 4}, copies={"pcie": {"generation": 4}})],
    "pcie_replays": [with_gpu(copies={"replays": 12})],
    "slow_copies": [with_gpu(copies={"rates": {"pinned_to_device": 55e9, "device_to_pinned": 20e9}})],
    "far_processors": [with_host(usable_cpus=tuple(range(16, 32)))],
    "power_limit": [with_gpu(power={"limit_watts": 500.0})],
    "power_brake": [with_gpu(power={"reasons": ("hardware slowdown", "power brake")})],
    "hardware_slowdown": [with_gpu(power={"reasons": ("hardware slowdown",)})],
    "thermal_slowdown": [
        with_gpu(power={"reasons": ("thermal",)}),
        with_gpu(copies={"power": {"reasons": ("hardware slowdown", "hardware thermal")}}),
        watched(reasons={"thermal": 0.2}),
    ],
    "hot": [
        with_gpu(temperature={"now": 85}),
        with_gpu(temperature={"now": 84, "highest": None}),
        watched(hottest=90),
    ],
    "clocks_limited": [with_gpu(power={"reasons": ("clock setting",)})],
    "memory_errors": [with_gpu(memory={"uncorrected": 2})],
    "repair_pending": [with_gpu(memory={"repair_pending": True})],
    "repair_failed": [with_gpu(memory={"repair_failed": True, "repair_pending": True})],
    "repaired": [with_gpu(memory={"remapped_rows": 1}), with_gpu(memory={"retired_pages": 4, "remapped_rows": None})],
    "ecc_pending": [with_gpu(memory={"ecc_pending": False})],
    "persistence_off": [with_gpu(persistence=False)],
    "compute_prohibited": [with_gpu(compute_mode="prohibited")],
    "compute_exclusive": [with_gpu(compute_mode="exclusive process")],
    "mig": [with_gpu(mig=True)],
    "gpu_in_use": [with_gpu(processes=(Process(99, "python", 3 * GIB),))],
    "no_gpu": [without_gpus(), no_driver(NO_BINDING)],
    "amd_gpu": [without_gpus(host=replace(HOST, nvidia_devices=0, amd_devices=8))],
    "driver_missing": [without_gpus(host=HOST)],
    "driver_mismatch": [no_driver("RM has detected an NVML/RM version mismatch.")],
    "binding_missing": [replace(no_driver(NO_BINDING), host=HOST)],
    "torch_without_cuda": [with_software(torch="2.11.0+cpu", torch_cuda=None)],
    "cuda_fails": [
        with_software(cuda_error="CUDA driver initialization failed"),
        with_software(torch_cuda=None, cuda_error="torch cannot be imported"),
    ],
    "driver_too_old": [with_software(**OLD_DRIVER, cuda_error="The NVIDIA driver on your system is too old")],
    "driver_older": [with_software(driver="580.1", driver_cuda=(13, 0), torch_cuda="13.2")],
    "no_kernels": [with_gpu(capability=(7, 5))],
    "ptx_only": [with_software(architectures=("sm_80", "compute_80"))],
    "other_versions": [with_software(versions={**SOFTWARE.versions, "triton": "3.1.0"})],
    "other_library": [with_software(loaded={"cudnn": "8902"})],
    "bitsandbytes_cuda": [with_software(bitsandbytes=("11.8", "12.8")), with_software(bitsandbytes=())],
    "extension_broken": [
        with_software(extensions=(Extension("flash-attn", "2.8.3", "ImportError: undefined symbol"),))
    ],
    "slow_fallback": [with_software(missing=("mamba-ssm",))],
    "no_triton": [with_software(versions={}, required={})],
    "no_flash_attention": [with_software(flash_attention=False)],
    "tf32_off": [with_software(matmul_tf32=False)],
    "environment": [with_software(environment={"CUDA_LAUNCH_BLOCKING": "1"})],
    "host_busy": [with_host(busy_cpus=20.0, busiest=(Process(5, "stress", cpus=19.0),))],
    "cpu_throttled": [with_host(throttled_share=0.2, cpu_quota=4.0)],
    "cpu_quota": [with_host(cpu_quota=4.0)],
    "memory_short": [
        with_host(available_bytes=10 * GIB),
        with_host(memory_limit_bytes=32 * GIB, memory_used_bytes=31 * GIB),
    ],
    "swapping": [with_host(swapped_pages=400, swap_used_bytes=2 * GIB)],
    "shm_small": [with_host(shm_bytes=64 * 1024**2, shm_free_bytes=64 * 1024**2)],
    "shm_full": [with_host(shm_free_bytes=GIB)],
    "memlock_small": [with_host(memlock_bytes=8 << 20, infiniband=("mlx5_0",))],
    "powersave": [
        with_host(governor=("powersave", driver)) for driver in ("acpi-cpufreq", "intel_cpufreq", "amd-pstate")
    ],
    "pid_not_found": [watched(pid_bytes=None)],
    "gpu_waits": [watched(utilisation=0.4), watched(pid=None, pid_bytes=None, utilisation=0.4)],
    "power_capped": [watched(reasons={"power cap": 0.6}, watts=698.0, sm_clock=1500.0)],
}


def names(machine: MachineState) -> list[str]:
    return [finding.name for finding in diagnose(machine).findings]


def test_nothing_is_wrong_with_a_healthy_machine() -> None:
    assert diagnose(HEALTHY).findings == ()
    assert diagnose(HEALTHY).healthy


def test_nothing_is_found_where_nothing_is_known() -> None:
    assert diagnose(MachineState()).findings == ()


def test_every_finding_has_a_case() -> None:
    assert {*CASES, "two_allocator_settings"} == set(findings())


@pytest.mark.parametrize(("name", "number"), [(name, number) for name in CASES for number in range(len(CASES[name]))])
def test_a_cause_has_its_finding_and_no_other(name: str, number: int) -> None:
    assert names(CASES[name][number]) == [name]


def test_two_settings_of_the_allocator_that_differ() -> None:
    both = {"PYTORCH_ALLOC_CONF": "expandable_segments:True", "PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}
    assert "two_allocator_settings" in names(with_software(environment=both))
    same = dict.fromkeys(both, "expandable_segments:True")
    assert "two_allocator_settings" not in names(with_software(environment=same))


def found(machine: MachineState, name: str) -> Finding:
    return next(each for each in diagnose(machine).findings if each.name == name)


def test_findings_name_their_gpu_and_what_was_found() -> None:
    narrow = found(with_gpu(copies={"pcie": {"width": 8}}), "pcie_narrow")
    assert (narrow.gpus, narrow.values, narrow.severity) == ((0,), {"width": 8, "most": 16}, "warning")


def test_what_all_gpus_have_in_common_is_one_finding() -> None:
    both = replace(HEALTHY, gpus=tuple(replace(gpu, persistence=False) for gpu in HEALTHY.gpus))
    (finding,) = diagnose(both).findings
    assert finding.gpus == (0, 1)


def test_errors_come_first() -> None:
    machine = with_gpu(persistence=False, power={"limit_watts": 500.0}, memory={"uncorrected": 1})
    assert names(machine) == ["memory_errors", "power_limit", "persistence_off"]
    assert not diagnose(machine).healthy
    assert diagnose(with_gpu(persistence=False)).healthy


def test_an_idle_link_of_a_lower_generation_is_no_finding() -> None:
    assert names(with_gpu(copies=None, pcie={"generation": 1})) == []


def test_a_power_cap_under_load_is_no_finding() -> None:
    assert names(with_gpu(copies={"power": {"reasons": ("power cap",)}})) == []


def test_crc_errors_alone_are_no_finding() -> None:
    assert names(with_gpu(nvlinks={"errors": {"replay": 0, "recovery": 0, "crc": 602}})) == []


def test_bursts_at_the_power_cap_that_cost_no_clock_are_no_finding() -> None:
    assert names(watched(reasons={"power cap": 1.0}, watts=253.0, sm_clock=1924.0)) == []


def test_a_quota_that_was_reached_once_is_no_finding() -> None:
    assert names(with_host(throttled_share=0.001)) == []


@pytest.mark.parametrize("driver", ["intel_pstate", "amd-pstate-epp"])
def test_powersave_is_fine_where_the_driver_scales_the_clocks(driver: str) -> None:
    assert names(with_host(governor=("powersave", driver))) == []


def test_a_variable_has_the_severity_and_cost_of_its_value() -> None:
    disabled = found(with_software(environment={"NCCL_P2P_DISABLE": "1"}), "environment")
    assert disabled.severity == "warning" and [cost.percent for cost in disabled.costs] == [29, 1016]
    assert found(with_software(environment={"NCCL_DEBUG": "info"}), "environment").severity == "note"
    assert names(with_software(environment={"NCCL_P2P_DISABLE": "0"})) == []


def test_every_variable_has_a_source_and_an_effect() -> None:
    assert all(one.source and one.effect and one.severity in ("error", "warning", "note") for one in variables())


@pytest.mark.parametrize(
    ("capability", "architectures", "binary", "ptx"),
    [
        ((8, 9), ("sm_80", "sm_86"), True, False),
        ((8, 0), ("sm_86",), False, False),
        ((9, 0), ("sm_90a",), True, False),
        ((12, 0), ("sm_90", "compute_90"), False, True),
        ((12, 0), ("sm_120",), True, False),
        ((10, 3), ("sm_100a", "compute_100a"), False, False),
        ((7, 0), ("sm_75", "compute_75"), False, False),
    ],
)
def test_kernels_for_a_capability(
    capability: tuple[int, int], architectures: tuple[str, ...], binary: bool, ptx: bool
) -> None:
    assert has_binary(capability, architectures) is binary
    assert has_ptx(capability, architectures) is ptx


@pytest.mark.parametrize(
    ("loaded", "installed", "same"),
    [
        ("91900", "9.19.0.56", True),
        ("8902", "8.9.2.26", True),
        ("91002", "9.19.0.56", False),
        ("2.28.9", "2.28.9", True),
    ],
)
def test_a_library_and_its_package(loaded: str, installed: str, same: bool) -> None:
    assert same_version(loaded, installed) is same


def test_numbers_of_processors_are_written_as_ranges() -> None:
    assert ranges((0, 1, 2, 5, 7, 8)) == "0-2,5,7-8"
