"""Titles and sentences on the host's bill: what a training takes of memory, /dev/shm and disk of its machine."""

from __future__ import annotations

from collections.abc import Iterator

from trainatomy.results.host import HostBill, HostKind, HostPhaseName, HostShortage
from trainatomy.units import human_bytes, many

TITLE = "Memory of the host"

PHASES: dict[HostPhaseName, str] = {
    "libraries": "libraries imported",
    "loading": "weights loaded",
    "training": "training steps",
    "evaluation": "evaluation",
    "saving": "saving a checkpoint",
    "restoring": "loading a checkpoint",
}

COMPONENTS = {
    "libraries": "Python and libraries",
    "cuda": "CUDA's part on the host",
    "nccl": "NCCL's buffers on the host",
    "weights": "weights",
    "activations": "activations kept on the host",
    "offloaded": "weights, gradients and states kept on the host",
    "paged": "paged optimizer states that the GPU has no room for",
    "tensors": "tensors of a training on the CPU",
    "batches": "batches",
    "dataset": "data set",
    "worker": "a worker's own objects",
    "launcher": "the launcher (torchrun)",
    "outputs": "outputs gathered by evaluation",
    "checkpoint": "copies to save or load a checkpoint",
    "checkpoints": "checkpoints",
}
"""Titles of a predicted bill's components."""

KINDS: dict[HostKind, str] = {
    "anonymous": "",
    "mapped": "mapped files, which the kernel can take back",
    "shared": "in /dev/shm",
    "pinned": "pinned",
}

LIMITS = {"memory": "host memory", "shm": "/dev/shm", "disk": "disk space"}

_REMEDIES = {
    "workers": "dataloader_num_workers: {value}",
    "prefetch": "dataloader_prefetch_factor: {value}",
    "pin_memory": "dataloader_pin_memory: false",
    "activations": "keep activations on the GPU",
    "rank0": "load the weights on rank 0 only (FSDP's cpu_ram_efficient_loading)",
    "sharded": "save sharded state dicts (fsdp_config.state_dict_type: SHARDED_STATE_DICT)",
    "save_only_model": "save_only_model: true",
    "keep": "save_total_limit: {value}",
    "accumulate_eval": "gather no logits (compute metrics batch by batch: batch_eval_metrics: true)",
}


def component_title(name: str) -> str:
    """Return the title of a component."""
    return COMPONENTS.get(name, name.replace("_", " "))


def verdict(bill: HostBill) -> str:
    """Return ``needs 12.3 GiB of host memory (training steps), 51.7 GiB to spare of 64.0 GiB (--host-memory)``."""
    phase, limit = bill.fullest, bill.limits.memory_bytes
    found = f"needs {human_bytes(phase.needed_bytes)} of host memory ({PHASES[phase.name]})"
    if limit is None:
        return found
    room = limit - phase.needed_bytes
    left = f"{human_bytes(room)} to spare" if room >= 0 else f"{human_bytes(-room)} short"
    return f"{found}, {left} of {human_bytes(limit)} ({bill.limits.memory_source})"


def shortage(found: HostShortage, limit_source: str) -> str:
    """Return which limit is passed, where, by what, and how a training dies of it."""
    needs = f"{LIMITS[found.limit]}: {human_bytes(found.needed_bytes)} are needed ({PHASES[found.phase]})"
    most = f", most of it for {component_title(found.component)}" if found.component else ""
    ends = {
        "memory": "the kernel kills the process (exit code -9, or 137)",
        "shm": "workers die with a bus error",
        "disk": "saving fails with `No space left on device`",
    }[found.limit]
    return f"{needs}{most}, and there are {human_bytes(found.limit_bytes)} ({limit_source}): {ends}"


def shortages(bill: HostBill) -> Iterator[str]:
    """Yield each limit that is passed."""
    sources = {
        "memory": bill.limits.memory_source,
        "shm": bill.limits.shm_source,
        "disk": bill.limits.disk_source,
    }
    for found in bill.shortages:
        yield shortage(found, sources[found.limit])


def remedy(name: str, value: int | None) -> str:
    """Return a change that lowers the bill, as it is written in a workload where it is a setting."""
    return _REMEDIES[name].format(value=value)


def processes(count: int, role: str) -> str:
    """Return ``8 processes`` or ``16 workers``, of several."""
    return many(count, "worker") if role == "worker" else f"{count:,} processes"
