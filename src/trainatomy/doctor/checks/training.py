"""A training that was watched."""

from __future__ import annotations

from collections.abc import Iterator

from trainatomy.doctor.checks.finding import finding
from trainatomy.results.diagnosis import Finding
from trainatomy.results.machine import MachineState, Watched, WatchedGPU

LOW_UTILISATION = 0.8
CAPPED_SHARE = 0.1
SLOWED = 0.95
"""Clocks above this share of the maximum lose nothing that matters: short bursts reach the cap at 250 of 700 W too."""


def check_training(machine: MachineState) -> Iterator[Finding]:
    """Yield what is wrong with the training that was watched."""
    watched = machine.watched
    if watched is None:
        return
    if watched.pid is not None and not any(gpu.pid_bytes for gpu in watched.gpus):
        yield finding("pid_not_found", pid=watched.pid)
    highest = {gpu.index: gpu.clocks.sm_max for gpu in machine.gpus}
    for gpu in _its_gpus(watched):
        if gpu.utilisation is not None and gpu.utilisation < LOW_UTILISATION:
            yield finding(
                "gpu_waits", gpu.index, utilisation=gpu.utilisation, cpus=watched.pid_cpus, seconds=watched.seconds
            )
        share, most = gpu.reasons.get("power cap", 0), highest.get(gpu.index)
        if share >= CAPPED_SHARE and (not most or not gpu.sm_clock or gpu.sm_clock <= SLOWED * most):
            yield finding("power_capped", gpu.index, share=share, watts=gpu.watts, clock=gpu.sm_clock, most=most)


def _its_gpus(watched: Watched) -> list[WatchedGPU]:
    """Return the GPUs that the training uses: all with memory of its process, or those in use where NVML hides it."""
    if own := [gpu for gpu in watched.gpus if gpu.pid_bytes]:
        return own
    return [gpu for gpu in watched.gpus if gpu.utilisation]
