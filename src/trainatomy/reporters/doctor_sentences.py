"""Sentences of the doctor's findings, from their wording (``doctor_wordings``) and what was found.

Bytes, rates and shares are formatted by the ending of the value's name (``_bytes``, ``rate``, ``share``).

Wording of each finding of the doctor: what was found, what it means for a training, and what fixes it.

``{name}`` stands for a value of the finding; ``doctor_sentences`` formats it by the ending of its name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from trainatomy.results.machine import Cost, Diagnosis, Finding
from trainatomy.units import human_bytes, many, percent


class Wording(NamedTuple):
    """A finding in words."""

    found: str
    means: str
    fix: str


WORDINGS: Mapping[str, Wording] = {
    "nvlink_down": Wording(
        "{down} of {all} NVLink links down (numbers)",
        "data between GPUs takes fewer links, or PCIe",
        "nvidia-smi nvlink -s; reseat the bridge or board, or reset: nvidia-smi -r",
    ),
    "nvlink_errors": Wording(
        "NVLink errors: replay {replay}, recovery {recovery}, CRC {crc}",
        "data is sent again, which delays collectives; a link may fail soon",
        "nvidia-smi nvlink -e; if the counts grow, report the board to its vendor",
    ),
    "fabric_not_ready": Wording(
        "NVSwitch's fabric is {state}",
        "CUDA does not start on this GPU (error 802)",
        "sudo systemctl restart nvidia-fabricmanager (same version as the driver)",
    ),
    "no_peer_access": Wording(
        "no peer-to-peer access: GPUs {pairs}",
        "NCCL copies through host memory",
        "enable it: nvidia-smi topo -p2p r; in a VM pass the GPUs through together; turn off ACS and the IOMMU",
    ),
    "slow_pair": Wording(
        "copies between GPUs {pairs} reach {rate} of {expected_rate} ({connection})",
        "collectives take that much longer; data may go another way than the link",
        "nvidia-smi nvlink -s; nvidia-smi topo -p2p r; stop other work on the GPUs",
    ),
    "far_gpus": Wording(
        "GPUs {pairs} are connected by {connection}",
        "data crosses the host's bridges or the link between its processors, the slowest way",
        "nvidia-smi topo -m; choose GPUs on one node with CUDA_VISIBLE_DEVICES, or move the cards",
    ),
    "pcie_only": Wording(
        "GPUs {pairs} are connected by {connection}, without NVLink",
        "gradients and shards go over PCIe; DDP suffers little, FSDP and tensor parallelism much",
        "trainatomy predict --gpus N shows what it costs your training",
    ),
    "pcie_narrow": Wording(
        "PCIe with {width} of {most} lanes",
        "copies from and to the host are that much slower",
        "reseat the card, or use a slot with more lanes: nvidia-smi -q -d PCIE",
    ),
    "pcie_slow": Wording(
        "PCIe generation {generation} of {most} while data was copied",
        "copies from and to the host are that much slower",
        "set the slot to its full generation in the BIOS; check risers and cables",
    ),
    "pcie_slot": Wording(
        "the slot has PCIe generation {slot}, the GPU {gpu}",
        "each generation halves or doubles copies from and to the host",
        "use a slot of the GPU's generation, if data or offloading bounds your training",
    ),
    "pcie_replays": Wording(
        "{replays} PCIe packets were sent again while data was copied",
        "the link loses data: a bad riser, cable or slot",
        "reseat the card, replace the riser",
    ),
    "slow_copies": Wording(
        "copies reach {rate} of {expected_rate} that the PCIe link has",
        "batches and offloaded tensors arrive late",
        "bind to the GPU's NUMA node: numactl --cpunodebind=N --membind=N; stop other copies",
    ),
    "far_processors": Wording(
        "usable processors {usable}, all on another node than the GPU's ({near})",
        "launches and copies cross the link between the host's processors",
        "taskset -c {near} python train.py",
    ),
    "power_limit": Wording(
        "power limit {limit_watts} W, by default {default_watts} W ({share})",
        "the GPU lowers its clocks under load",
        "sudo nvidia-smi -i {gpu} -pl {default_watts}",
    ),
    "power_brake": Wording(
        "clocks at {clock} of {most} MHz: power brake",
        "the power supply makes the GPU slow down",
        "check the supply and its cables: one cable from the supply for each socket of the card, no splits",
    ),
    "hardware_slowdown": Wording(
        "clocks at {clock} of {most} MHz: hardware slowdown",
        "the GPU protects itself from heat or missing power; clocks are halved or less",
        "nvidia-smi -q -d PERFORMANCE,TEMPERATURE,POWER; check fans and power cables",
    ),
    "thermal_slowdown": Wording(
        "{reasons} slowdown at {celsius} °C",
        "the GPU lowers its clocks because it is hot",
        "clean fans and filters, free the airflow, or lower the limit: sudo nvidia-smi -i {gpu} -pl WATTS",
    ),
    "hot": Wording(
        "{celsius} °C, limit {limit} °C",
        "the GPU lowers its clocks when it gets hotter, and ages faster; 70 to 75 °C is good",
        "clean fans and filters, free the airflow",
    ),
    "clocks_limited": Wording(
        "clocks are fixed at {clock} of {most} MHz",
        "somebody set the clocks below the maximum",
        "sudo nvidia-smi -i {gpu} -rac && sudo nvidia-smi -i {gpu} -rgc",
    ),
    "memory_errors": Wording(
        "{errors} memory errors that could not be corrected",
        "results may be wrong; processes that read the memory are ended",
        "stop all training runs, then reset: sudo nvidia-smi -i {gpu} -r; if they return, replace the GPU",
    ),
    "repair_pending": Wording(
        "bad memory waits to be replaced by spare memory",
        "it happens at the next reset; until then errors may come back",
        "stop all training runs, then: sudo nvidia-smi -i {gpu} -r",
    ),
    "repair_failed": Wording(
        "bad memory could not be replaced: no spare memory is left",
        "errors will come back",
        "replace the GPU",
    ),
    "repaired": Wording(
        "{repaired} rows or pages of bad memory were replaced",
        "nothing now; watch whether the number grows",
        "nvidia-smi -q -d ROW_REMAPPER,PAGE_RETIREMENT",
    ),
    "ecc_pending": Wording(
        "error correction is {now}, and changes at the next reset",
        "on GPUs with GDDR memory it takes memory and bandwidth",
        "sudo nvidia-smi -i {gpu} -r, or undo it: sudo nvidia-smi -i {gpu} -e 0|1",
    ),
    "persistence_off": Wording(
        "persistence mode is off",
        "without a process the driver shuts the GPU down; starting it takes 1 to 3 s",
        "sudo systemctl enable --now nvidia-persistenced",
    ),
    "compute_prohibited": Wording(
        "compute mode is prohibited", "no CUDA process can start", "sudo nvidia-smi -i {gpu} -c DEFAULT"
    ),
    "compute_exclusive": Wording(
        "compute mode is exclusive", "a second process cannot start", "sudo nvidia-smi -i {gpu} -c DEFAULT"
    ),
    "mig": Wording(
        "split into MIG instances",
        "a training sees one instance, with a part of memory and multiprocessors",
        "nvidia-smi -L lists them; whole again: sudo nvidia-smi -i {gpu} -mig 0",
    ),
    "gpu_in_use": Wording(
        "other processes: {count}, {names}",
        "they take {held_bytes} of memory and a share of the time",
        "wait, choose another GPU with CUDA_VISIBLE_DEVICES, or end them: kill PID",
    ),
    "no_gpu": Wording(
        "no NVIDIA GPU ({error})",
        "only software and host were looked at; predictions need no GPU",
        "",
    ),
    "amd_gpu": Wording(
        "{devices} AMD GPUs and no NVIDIA GPU",
        "only software and host were looked at: AMD GPUs are predicted, not measured",
        "",
    ),
    "driver_missing": Wording(
        "{devices} NVIDIA devices on the PCI bus, but no driver ({error})",
        "CUDA does not start",
        "install the driver; in a container: docker run --gpus all",
    ),
    "driver_mismatch": Wording(
        "the loaded driver and its library have different versions",
        "CUDA does not start until the new driver is loaded",
        "sudo reboot, or reload the nvidia modules",
    ),
    "binding_missing": Wording(
        "NVML's Python binding is not installed",
        "GPUs, links, power and heat cannot be looked at",
        "pip install nvidia-ml-py",
    ),
    "torch_without_cuda": Wording(
        "torch {torch} was built without CUDA",
        "training runs on the CPU",
        "pip install torch --index-url https://download.pytorch.org/whl/{build}",
    ),
    "cuda_fails": Wording("CUDA does not start: {error}", "training fails", "nvidia-smi; dmesg | grep -i nvrm"),
    "driver_too_old": Wording(
        "driver {driver} is too old for CUDA {cuda}",
        "torch cannot use the GPU; CUDA {cuda} needs driver {needed} or newer",
        "update the driver, or install torch for an older CUDA (pytorch.org/get-started/previous-versions)",
    ),
    "driver_older": Wording(
        "driver {driver} knows CUDA {knows}, torch uses {cuda}",
        "works, but the driver cannot compile PTX of the newer CUDA",
        "update the driver if an extension fails with an unsupported PTX version",
    ),
    "no_kernels": Wording(
        "torch has no kernels for compute capability {capability}",
        "training fails: no kernel image is available (torch has: {listed})",
        "install a build that has them (pytorch.org/get-started), or an NGC container",
    ),
    "ptx_only": Wording(
        "torch has only PTX for compute capability {capability}",
        "the driver compiles each kernel at its first use: minutes in the first run, cached in ~/.nv (has: {listed})",
        "install a build with binary code for it (pytorch.org/get-started), or an NGC container",
    ),
    "other_versions": Wording(
        "{package} {installed}, while torch {torch} asks for {wanted}",
        "untested together: wrong symbols, other kernels, other memory",
        "pip install {package}=={wanted}",
    ),
    "other_library": Wording(
        "torch loaded {library} {loaded}, while the package has {installed}",
        "a system library comes first, probably by LD_LIBRARY_PATH",
        "unset LD_LIBRARY_PATH",
    ),
    "bitsandbytes_cuda": Wording(
        "bitsandbytes has no library for CUDA {cuda} (has {available})",
        "8-bit optimizers and quantised weights fail",
        "pip install -U bitsandbytes",
    ),
    "extension_broken": Wording(
        "{package} {version} cannot be imported: {error}",
        "code that uses it fails or takes a slow path; often it was built for another torch",
        "pip install --force-reinstall --no-cache-dir --no-deps --no-build-isolation {package}",
    ),
    "slow_fallback": Wording(
        "not installed: {packages}",
        "slow fallback in {models}",
        "pip install kernels (or the libraries themselves), if you train one of them",
    ),
    "no_triton": Wording(
        "Triton is not installed", "torch.compile and Liger's kernels do not work on the GPU", "pip install triton"
    ),
    "no_flash_attention": Wording(
        "torch was built without flash attention",
        "attention takes the memory-efficient or the plain kernel",
        "install a build from pytorch.org",
    ),
    "tf32_off": Wording(
        "TF32 is off by default for products of float32 matrices",
        "training in float32 does not use tensor cores; training in bf16 or fp16 is not affected",
        "tf32=True in TrainingArguments, or torch.set_float32_matmul_precision('high')",
    ),
    "environment": Wording("{variable}={value}", "{effect}", "{undo}"),
    "two_allocator_settings": Wording(
        "PYTORCH_ALLOC_CONF={current} and PYTORCH_CUDA_ALLOC_CONF={older}",
        "two names of one setting, with different values",
        "unset PYTORCH_CUDA_ALLOC_CONF",
    ),
    "host_busy": Wording(
        "{busy} of {cpus} processors are in use: {names}",
        "launches take longer; CPU-bound steps are slower, and calibrations are wrong",
        "stop other work, or wait",
    ),
    "cpu_throttled": Wording(
        "the control group was stopped in {share} of its periods (quota: {quota} processors)",
        "all threads stand still for up to 0.1 s each time",
        "raise the quota (docker run --cpus N), or use fewer DataLoader workers and threads",
    ),
    "cpu_quota": Wording(
        "{cpus} processors are visible, and {quota} granted",
        "libraries start a thread for each visible one, and DataLoader workers compete",
        "OMP_NUM_THREADS and num_workers by what is granted",
    ),
    "died_of_group": Wording(
        "{victim} was killed because its control group reached its limit {limit}",
        "the container's or the job's own limit, not the machine's memory",
        "raise it (docker run --memory, resources.limits.memory, sbatch --mem), or need less: trainatomy predict "
        "TRAIN.yaml --host-memory SIZE names the phase",
    ),
    "died_of_machine": Wording(
        "{victim} was killed because the machine's memory {limit} was used up",
        "the kernel ends the process that holds most, whoever asked for more",
        "trainatomy predict TRAIN.yaml --host-memory here names the phase and what lowers it",
    ),
    "died_by_kill": Wording(
        "{victim} was killed by signal 9 (exit code -9 or 137)",
        "nearly always the kernel for lack of host memory {limit}; a scheduler or a person sends it, too",
        "dmesg | grep -i oom says who; trainatomy predict TRAIN.yaml --host-memory here names the phase",
    ),
    "died_of_shm": Wording(
        "{victim} ended with a bus error: /dev/shm {limit} was full",
        "workers hand their batches over in /dev/shm; memory was not the limit",
        "docker run --ipc=host or --shm-size=8g; fewer workers, dataloader_prefetch_factor: 1",
    ),
    "died_of_allocation": Wording(
        "an allocation{wanted} on the host was refused",
        "a limit of the address space or of overcommitting, not the kernel's killer",
        "ulimit -v; sysctl vm.overcommit_memory; trainatomy predict TRAIN.yaml --host-memory here",
    ),
    "died_of_disk": Wording(
        "a file could not be written: no space is left",
        "checkpoints fill the disk, or the folder of temporary files",
        "save_total_limit, save_only_model, another output_dir; trainatomy predict says what a checkpoint takes",
    ),
    "died_of_gpu": Wording(
        "the GPU's memory ran out, not the host's",
        "PyTorch says so itself, and nothing was killed",
        "trainatomy predict TRAIN.yaml --why-oom",
    ),
    "died_unknown": Wording(
        "this says nothing of a limit: {text}",
        "exit code -9 or 137, a bus error, a line of the kernel's log or memory.events would",
        "dmesg | grep -i -e oom -e killed; cat /sys/fs/cgroup/memory.events",
    ),
    "group_killed": Wording(
        "the kernel has killed {count} processes of this control group for lack of memory",
        "a training that disappeared here with exit code -9 or 137 died of it",
        "raise the limit (docker run --memory), or need less: trainatomy predict TRAIN.yaml --host-memory here",
    ),
    "memory_short": Wording(
        "{free_bytes} of {total_bytes} host memory left ({where})",
        "the kernel ends processes, or swaps",
        "fewer DataLoader workers, less offloading, or a higher limit (docker run --memory)",
    ),
    "swapping": Wording(
        "{pages} pages were brought in from swap in half a second ({used_bytes} in swap)",
        "data loading and launches wait for the disk",
        "free host memory; sudo swapoff -a where it must not happen",
    ),
    "shm_small": Wording(
        "/dev/shm has {size_bytes}",
        "DataLoader workers end with a bus error as soon as batches do not fit, and NCCL may fail",
        "docker run --ipc=host, or --shm-size=8g",
    ),
    "shm_full": Wording(
        "/dev/shm has {free_bytes} of {size_bytes} left",
        "DataLoader workers end with a bus error as soon as batches do not fit",
        "ls -lS /dev/shm; remove files of ended processes",
    ),
    "memlock_small": Wording(
        "at most {limit_bytes} can be locked, with InfiniBand ({devices})",
        "NCCL fails to register its buffers, or uses sockets",
        "ulimit -l unlimited; docker run --ulimit memlock=-1",
    ),
    "powersave": Wording(
        "processors run with the governor powersave ({driver})",
        "they keep their lowest clock; launches take longer",
        "sudo cpupower frequency-set -g performance",
    ),
    "pid_not_found": Wording(
        "process {pid} is on no GPU",
        "it trains on the CPU, has not started CUDA yet, or the container hides it",
        "nvidia-smi",
    ),
    "gpu_waits": Wording(
        "a kernel ran in {utilisation} of the time ({seconds} s)",
        "the GPU waits for data, launches or other ranks; the training's processes used {cpus} processors",
        "trainatomy data TRAIN.yaml says how many workers the step needs; trainatomy ops shows what launches bound",
    ),
    "power_capped": Wording(
        "at its power limit in {share} of the time: {watts} W, {clock} of {most} MHz",
        "normal for large matrix products; the clocks are what the limit allows",
        "raise the limit where the card allows it: nvidia-smi -q -d POWER",
    ),
}


CONNECTIONS = {
    "NV": "bonded NVLinks, the fastest way: fit for FSDP and tensor parallelism",
    "PIX": "one PCIe bridge: as fast as PCIe, peer to peer",
    "PXB": "several PCIe bridges, without the host: nearly as fast as PCIe",
    "PHB": "PCIe through the host's processor: fit for DDP",
    "NODE": "between PCIe bridges of one processor: slower, fit for DDP",
    "SYS": "across the link between processors: the slowest; keep such GPUs in separate training runs",
}
"""Meaning of the connections of ``nvidia-smi topo -m`` for a training."""

UNMEASURED = {
    "unwanted": "Copies were not measured (--no-bandwidth): PCIe and clocks are those of the moment.",
    "busy": "Copies were not measured, because a GPU is in use: PCIe and clocks are those of the moment.",
    "watching": "Copies were not measured, because a training was watched.",
    "failed": "Copies could not be measured: CUDA did not start, or the measurement failed.",
}
"""Reasons for which copies were not measured."""

COSTS = {
    "training": "a training takes {longer}",
    "all_reduce": "an all-reduce takes {longer}",
    "slower": "{percent} % less throughput",
    "launches": "launches take up to {longer}",
}
"""Subject of each measured cost."""

_SEVERAL = 200
"""Per cent from which on a cost is told as a multiple."""

_UNKNOWN = "?"


def found_sentence(finding: Finding) -> str:
    """Return what was found."""
    return _filled(WORDINGS[finding.name].found, finding)


def meaning_sentence(finding: Finding) -> str:
    """Return what a finding means for a training."""
    return _filled(WORDINGS[finding.name].means, finding)


def fix_sentence(finding: Finding) -> str:
    """Return the command that fixes it, or what to do; empty where nothing is to be done."""
    return _filled(WORDINGS[finding.name].fix, finding)


def cost_sentence(cost: Cost) -> str:
    """Return a measured cost with its case: ``a training takes 29 % longer (GPT-2 with DDP on ...)``."""
    longer = (
        f"{1 + cost.percent / 100:.0f} times as long" if cost.percent >= _SEVERAL else f"{cost.percent:.0f} % longer"
    )
    return f"{COSTS[cost.what].format(longer=longer, percent=f'{cost.percent:.0f}')} ({cost.where})"


def place(finding: Finding) -> str:
    """Return where a finding is: ``GPU 0``, ``GPUs 0, 1``, or empty for the whole machine."""
    if not finding.gpus:
        return ""
    return ("GPU " if len(finding.gpus) == 1 else "GPUs ") + ", ".join(map(str, finding.gpus))


def verdict(diagnosis: Diagnosis) -> str:
    """Return how many findings there are."""
    counts = {name: diagnosis.count(name) for name in ("error", "warning", "note")}
    known = [many(count, name) for name, count in counts.items() if count]
    return ", ".join(known) if known else "nothing wrong was found"


class _Values(dict[str, str]):
    def __missing__(self, key: str) -> str:
        return _UNKNOWN


def _filled(template: str, finding: Finding) -> str:
    values = _Values({name: _formatted(name, value) for name, value in finding.values.items()})
    values.setdefault("gpu", ",".join(map(str, finding.gpus)))
    return template.format_map(values)


def _formatted(name: str, value: str | int | float) -> str:
    """Return a value of a finding; its unit follows from the end of its name."""
    if isinstance(value, str):
        return value
    if name.endswith("_bytes"):
        return human_bytes(int(value))
    if name.endswith("rate"):
        return f"{value / 1e9:.1f} GB/s"
    if name.endswith(("share", "utilisation")):
        return percent(value, 1, 0)
    return f"{value:.0f}" if isinstance(value, int) or abs(value) >= 100 else f"{value:.3g}"
