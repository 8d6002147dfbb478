"""Everything that can be found on this machine, as one value.

All checks of a machine.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from trainatomy.doctor.deaths import check_death
from trainatomy.doctor.gpu_checks import check_gpus, check_links, check_training
from trainatomy.doctor.gpus import DriverState, read_driver, watch
from trainatomy.doctor.host import read_host, read_software
from trainatomy.doctor.host_checks import check_host, check_software
from trainatomy.errors import DeviceError
from trainatomy.results.machine import (
    SEVERITIES,
    Clocks,
    CopyRates,
    Diagnosis,
    Finding,
    GPUPair,
    GPUState,
    MachineState,
    PCIe,
    Power,
)

PROBE_SECONDS = 90.0
"""A probe that takes longer hangs: importing torch takes seconds, the copies one second for each GPU."""


WATCH_SECONDS = 5.0
"""Seconds for which a training is watched by default."""


def gather(
    gpus: Sequence[int] = (),
    *,
    bandwidth: bool = True,
    seconds: float = 0.0,
    pid: int | None = None,
    died: str = "",
    stage: Callable[[str], None] = lambda stage: None,
) -> MachineState:
    """Look at this machine.

    Args:
        gpus: Numbers of the GPUs as in nvidia-smi; all if empty.
        bandwidth: Measure copies, and power and clocks under load; not done on a GPU that another process uses.
        seconds: Watch a running training for so long.
        pid: The running training.
        died: What is left of a training that died.
        stage: Told what is being done.

    Raises:
        DeviceError: There is no GPU of a wanted number, or none to watch.
        TrainatomyError: There is no process ``pid``.
    """
    stage("driver")
    driver = read_driver(gpus)
    if (seconds or pid) and not driver.gpus:
        raise DeviceError(f"Watching a training needs a GPU and its driver: {driver.error}.")
    stage("host")
    host = read_host()
    watched = None
    if seconds or pid:
        stage("running training")
        watched = watch(seconds or WATCH_SECONDS, pid, gpus)
    unmeasured = _unmeasured(driver, bandwidth=bandwidth, watching=watched is not None)
    stage("torch" if unmeasured else "torch and copies")
    probed = probe([] if unmeasured else [gpu.uuid for gpu in driver.gpus])
    copies: Mapping[str, Any] = probed.get("copies", {})
    return MachineState(
        gpus=tuple(replace(gpu, copies=copy_rates(copies.get(gpu.uuid, {}))) for gpu in driver.gpus),
        pairs=_with_rates(driver, probed.get("between", {})),
        software=read_software(driver, probed),
        host=host,
        watched=watched,
        unmeasured=unmeasured or ("" if copies else "failed"),
        died=died,
    )


def _with_rates(driver: DriverState, rates: Mapping[str, float]) -> tuple[GPUPair, ...]:
    """Return the connections with the rates of copies, which the probe names by UUIDs."""
    uuids = {gpu.index: gpu.uuid for gpu in driver.gpus}
    return tuple(
        replace(pair, copy_rate=rates.get(f"{uuids[pair.first]} {uuids[pair.second]}")) for pair in driver.pairs
    )


def _unmeasured(driver: DriverState, *, bandwidth: bool, watching: bool) -> str:
    """Return why nothing is to be measured; empty if it is."""
    if not driver.gpus:
        return "no gpu"
    if not bandwidth:
        return "unwanted"
    if watching:
        return "watching"
    return "busy" if any(_in_use(gpu) for gpu in driver.gpus) else ""


def _in_use(gpu: GPUState) -> bool:
    return bool(gpu.processes) or bool(gpu.utilisation)


def probe(uuids: Sequence[str]) -> dict[str, Any]:
    """Ask a process with torch; return what it said until it ended, with ``importing`` if it died of an extension.

    Args:
        uuids: GPUs whose copies are measured.
    """
    command = [sys.executable, "-m", "trainatomy.doctor.probe", *(["--copies", *uuids] if uuids else [])]
    environment = {**os.environ, "TORCH_CPP_LOG_LEVEL": "ERROR", "BITSANDBYTES_NOWELCOME": "1"}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=PROBE_SECONDS, check=False, env=environment
        )
        output = done.stdout
    except subprocess.TimeoutExpired as error:
        output = error.stdout.decode(errors="replace") if isinstance(error.stdout, bytes) else error.stdout or ""
    except OSError:
        return {}
    return merged(output)


def merged(output: str) -> dict[str, Any]:
    """Return the lines of the probe as one object; what is no JSON was written by a library."""
    found: dict[str, Any] = {}
    for line in output.splitlines():
        try:
            said = json.loads(line)
        except ValueError:
            continue
        if not isinstance(said, dict):
            continue
        for key, value in said.items():
            found[key] = {**found.get(key, {}), **value} if isinstance(value, dict) else value
    return found


def copy_rates(said: Mapping[str, Any]) -> CopyRates | None:
    """Return what the probe measured on one GPU; ``None`` if that failed."""
    if "rates" not in said:
        return None
    power = {**said.get("power", {})}
    power["reasons"] = tuple(power.get("reasons", ()))
    return CopyRates(
        rates=said["rates"],
        pcie=PCIe(**said.get("pcie", {})),
        replays=said.get("replays"),
        power=Power(**power),
        clocks=Clocks(**said.get("clocks", {})),
    )


CHECKS = (check_death, check_software, check_gpus, check_links, check_host, check_training)


def diagnose(machine: MachineState) -> Diagnosis:
    """Return the findings on a machine, worst first; what several GPUs have in common is one finding."""
    found: list[Finding] = []
    for each in (finding for check in CHECKS for finding in check(machine)):
        same = next((one for one in found if replace(one, gpus=each.gpus) == each and each.gpus), None)
        if same is None:
            found.append(each)
        else:
            found[found.index(same)] = replace(same, gpus=tuple(sorted({*same.gpus, *each.gpus})))
    return Diagnosis(machine, tuple(sorted(found, key=lambda finding: SEVERITIES.index(finding.severity))))
