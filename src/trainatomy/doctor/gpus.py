"""The GPUs of this machine and their connections, as the driver describes them."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainatomy.errors import DeviceError, MissingLibrary
from trainatomy.measurement.device import links, nvml, state
from trainatomy.measurement.device.meter import process_name
from trainatomy.measurement.device.nvml import NoAnswer
from trainatomy.results.machine import GPUPair, GPUState, Process

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trainatomy.measurement.device.nvml import NvmlDevice


@dataclass(frozen=True, slots=True)
class DriverState:
    """The driver with its GPUs and their connections; ``error``: why it does not answer, empty if it does."""

    version: str | None = None
    cuda: tuple[int, int] | None = None
    error: str = ""
    gpus: tuple[GPUState, ...] = ()
    pairs: tuple[GPUPair, ...] = ()


def read_driver(wanted: Sequence[int] = ()) -> DriverState:
    """Return what the driver says.

    Args:
        wanted: Numbers of the GPUs as in nvidia-smi; all if empty.

    Raises:
        DeviceError: There is no GPU of a wanted number.
    """
    try:
        with nvml.session() as driver:
            gpus = tuple(gpu for gpu in driver.gpus if not gpu.is_instance)
            _check(wanted, len(gpus))
            chosen = tuple(index for index in range(len(gpus)) if not wanted or index in wanted)
            states = tuple(read_gpu(index, gpus[index]) for index in chosen)
            pairs = tuple(pair for pair in links.pairs(gpus) if pair.first in chosen and pair.second in chosen)
            return DriverState(driver.version, driver.cuda, "", states, pairs)
    except NoSuchGPU:
        raise
    except (DeviceError, MissingLibrary) as error:
        reason = str(error.__cause__ or error) if isinstance(error, NoAnswer) else str(error)
        if wanted:
            raise NoSuchGPU(f"--gpu {wanted[0]}: no GPU can be looked at: {reason}.") from error
        return DriverState(error=reason)


class NoSuchGPU(DeviceError):
    """There is no GPU of the number that was asked for."""


def _check(wanted: Sequence[int], count: int) -> None:
    if unknown := [index for index in wanted if index >= count]:
        raise NoSuchGPU(f"--gpu {unknown[0]}: this machine has {count} GPUs, numbered from 0 as in nvidia-smi.")


def read_gpu(index: int, gpu: NvmlDevice) -> GPUState:
    """Return the state of one GPU now."""
    total = gpu.ask("GetMemoryInfo")
    capability = gpu.ask("GetCudaComputeCapability")
    used, processes = _use(gpu)
    return GPUState(
        index=index,
        name=gpu.name,
        uuid=gpu.uuid,
        capability=(int(capability[0]), int(capability[1])) if capability else None,
        memory_bytes=None if total is None else int(total.total),
        used_bytes=used,
        persistence=state.is_on(gpu, "PersistenceMode"),
        compute_mode=state.compute_mode(gpu),
        mig=state.is_on(gpu, "MigMode"),
        near_cpus=links.near_cpus(gpu, os.cpu_count() or 1),
        utilisation=state.utilisation(gpu),
        power=state.power(gpu),
        clocks=state.clocks(gpu),
        temperature=state.temperature(gpu),
        pcie=links.pcie(gpu),
        nvlinks=links.nvlinks(gpu),
        memory=state.memory_health(gpu),
        processes=processes,
    )


def _use(gpu: NvmlDevice) -> tuple[int | None, tuple[Process, ...]]:
    """Return used memory as nvidia-smi shows it, and the compute processes, largest first."""
    try:
        reading = gpu.read()
    except NoAnswer:
        return None, ()
    used = reading.used_apart_bytes if reading.used_apart_bytes is not None else reading.used_bytes
    processes = (Process(pid, process_name(pid), size) for pid, size in reading.processes if pid != os.getpid())
    return used, tuple(sorted(processes, key=lambda each: -(each.bytes or 0)))
