"""Facts that only a process that loads torch and starts CUDA can tell: ``python -m trainatomy.doctor.probe``.

It runs in a process of its own, because CUDA may hang or an extension crash.  It writes one JSON object on each line;
each adds keys to those before, so that nothing is lost when the process dies.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any

from trainatomy.catalog.machines import extensions
from trainatomy.libraries import version_of
from trainatomy.measurement.device import nvml, state
from trainatomy.measurement.device import state as links
from trainatomy.records.create import to_plain

if TYPE_CHECKING:
    from trainatomy.measurement.device.nvml import NvmlDevice

COPIED_BYTES = 256 << 20
_REPEATS = 3
_MATRIX = 8192
_LOAD_SECONDS = 0.5


def main() -> None:
    """Say what torch, its GPUs and the extensions say, part by part."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--copies", nargs="*", default=[], metavar="UUID")
    uuids = parser.parse_args().copies
    import torch

    say(torch={"torch": torch.__version__, "torch_cuda": torch.version.cuda}, starting=True)
    say(torch=_facts(torch), starting=False)
    if torch.cuda.is_available() and uuids:
        say(copies=_all_copies(torch, uuids))
        say(between=_between(torch, uuids))
    for extension in extensions():
        if version_of(extension.package) is not None:
            say(importing=extension.package)
            say(extensions={extension.package: _error(extension.module)}, importing="")


def say(**facts: Any) -> None:
    """Write facts as one line."""
    print(json.dumps(facts), flush=True)


def _facts(torch: Any) -> dict[str, Any]:
    cuda_error = ""
    if torch.version.cuda is not None:
        try:
            torch.cuda.init()
        except Exception as error:  # whatever prevents CUDA from starting is the answer
            cuda_error = " ".join(str(error).split())
    loaded = {"cudnn": torch.backends.cudnn.version(), "nccl": _nccl(torch)}
    return {
        "cuda_error": cuda_error,
        "architectures": torch.cuda.get_arch_list() if not cuda_error else [],
        "loaded": {name: str(version) for name, version in loaded.items() if version is not None},
        "flash_attention": _answer(torch.backends.cuda.is_flash_attention_available),
        "matmul_tf32": torch.get_float32_matmul_precision() != "highest",
    }


def _nccl(torch: Any) -> str | None:
    version = _answer(torch.cuda.nccl.version)
    return None if version is None else ".".join(map(str, version))


def _answer(function: Callable[[], Any]) -> Any:
    """Return what a function of torch answers; ``None`` where this build lacks what it asks."""
    try:
        return function()
    except (AttributeError, RuntimeError):
        return None


def _error(module: str) -> str:
    """Return what importing a module raises, on one line."""
    try:
        with contextlib.redirect_stdout(sys.stderr):
            import_module(module)
    except Exception as error:  # an extension that was built for another torch raises anything
        return f"{type(error).__name__}: {error}".strip().splitlines()[0]
    return ""


def _all_copies(torch: Any, uuids: list[str]) -> dict[str, Any]:
    """Return measured copies by the driver's UUID, for the wanted GPUs that CUDA sees."""
    found = {}
    for index in range(torch.cuda.device_count()):
        uuid = f"GPU-{torch.cuda.get_device_properties(index).uuid}"
        if uuid in uuids:
            try:
                with nvml.session() as driver, torch.cuda.device(index):
                    found[uuid] = _copies(torch, driver.device(uuid))
            except Exception as error:  # out of memory, or the GPU is broken
                found[uuid] = {"error": f"{type(error).__name__}: {error}".splitlines()[0]}
    return found


def _between(torch: Any, uuids: list[str]) -> dict[str, float]:
    """Return rates of copies from each GPU to those after it, by both UUIDs in one string."""
    names = {f"GPU-{torch.cuda.get_device_properties(index).uuid}": index for index in range(torch.cuda.device_count())}
    known = [uuid for uuid in uuids if uuid in names]
    found = {}
    for number, first in enumerate(known):
        for second in known[number + 1 :]:
            try:
                found[f"{first} {second}"] = _pair_rate(torch, names[first], names[second])
            except RuntimeError:  # out of memory, or the link is broken: unknown
                continue
    return found


def _pair_rate(torch: Any, first: int, second: int) -> float:
    source = torch.empty(COPIED_BYTES, dtype=torch.uint8, device=f"cuda:{first}")
    return _rate(torch, torch.empty_like(source, device=f"cuda:{second}"), source)


def _copies(torch: Any, gpu: NvmlDevice | None) -> dict[str, Any]:
    """Return rates of copies, the PCIe link while they run, and power and clocks while matrices are multiplied."""
    here = torch.empty(COPIED_BYTES, dtype=torch.uint8, device="cuda")
    pinned = torch.ones(COPIED_BYTES, dtype=torch.uint8).pin_memory()
    ways = {
        "pinned_to_device": (here, pinned),
        "device_to_pinned": (pinned, here),
        "pageable_to_device": (here, torch.ones(COPIED_BYTES, dtype=torch.uint8)),
        "device_to_device": (torch.empty_like(here), here),
    }
    before = gpu.ask("GetPcieReplayCounter") if gpu else None
    found: dict[str, Any] = {"rates": {name: _rate(torch, *pair) for name, pair in ways.items()}}
    if gpu is None:
        return found
    for _ in range(2 * _REPEATS):  # several milliseconds each: the link is read while they run
        here.copy_(pinned, non_blocking=True)
    found["pcie"] = to_plain(links.pcie(gpu))
    torch.cuda.synchronize()
    after = gpu.ask("GetPcieReplayCounter")
    found["replays"] = None if before is None or after is None else after - before
    _multiply(torch)
    found |= {"power": to_plain(state.power(gpu)), "clocks": to_plain(state.clocks(gpu))}
    torch.cuda.synchronize()
    return found


def _rate(torch: Any, target: Any, source: Any) -> float:
    """Return the best of some copies in bytes per second; the first one maps pages and wakes the link."""
    best = float("inf")
    devices = [each.device for each in (source, target) if each.is_cuda]
    for _ in range(_REPEATS + 1):
        _wait(torch, devices)
        started = time.perf_counter()
        target.copy_(source, non_blocking=True)
        _wait(torch, devices)
        best = min(best, time.perf_counter() - started)
    return COPIED_BYTES / best


def _wait(torch: Any, devices: list[Any]) -> None:
    for device in devices:
        torch.cuda.synchronize(device)


def _multiply(torch: Any) -> None:
    """Multiply matrices for half a second, and return while the last products still run."""
    left = torch.randn(_MATRIX, _MATRIX, device="cuda", dtype=torch.float16)
    until = time.perf_counter() + _LOAD_SECONDS
    while time.perf_counter() < until:
        torch.cuda.synchronize()
        for _ in range(10):
            left @ left


if __name__ == "__main__":
    main()
