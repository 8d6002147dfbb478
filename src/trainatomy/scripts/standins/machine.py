"""Answers to questions about the machine: NVML and profilers, which have nothing to watch without a GPU.

Frameworks whose one process asks for several GPUs: Lightning (``devices=4``), Ultralytics (``device="0,1"``).

They start a process for each GPU, as torchrun does.  The machine of a dry run has the GPUs that its command names, one
if it names none, so that a script asks for more than there are before it starts any process.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from trainatomy.scripts.standins.notes import StandIns


def _follow_requested_gpus(stand_ins: StandIns) -> None:
    """Follow how many GPUs a framework asks for, each when it is imported."""
    for package in ("lightning.fabric", "lightning_fabric"):
        stand_ins.when(f"{package}.utilities.device_parser", partial(_put_lightning, stand_ins))
    stand_ins.when("ultralytics.utils.torch_utils", partial(_put_ultralytics, stand_ins))


def _put_lightning(stand_ins: StandIns, parser: Any) -> None:
    original = parser._sanitize_gpu_ids

    def check(gpus: list[int], *rest: Any, **options: Any) -> list[int]:
        _ask(stand_ins, gpus)
        found: list[int] = original(gpus, *rest, **options)
        return found

    stand_ins.put(parser, "_sanitize_gpu_ids", check)


def _put_ultralytics(stand_ins: StandIns, utilities: Any) -> None:
    original = utilities.select_device

    def select(device: Any = "", *rest: Any, **options: Any) -> Any:
        words = [*map(str, device)] if isinstance(device, list | tuple) else str(device).split(",")
        numbers = [word.strip(" []()'\"").removeprefix("cuda:") for word in words]
        if all(number.isdigit() for number in numbers):
            _ask(stand_ins, [*map(int, numbers)])
        return original(device, *rest, **options)

    stand_ins.put(utilities, "select_device", select)


def _ask(stand_ins: StandIns, gpus: list[int]) -> None:
    """Run the script as one of several ranks where it asks for GPUs that are not there."""
    if len(gpus) > 1 and len(gpus) > stand_ins.process.current.count:
        stand_ins.repeat(len(gpus), 1)


_IDLE = {"nvmlDeviceGetTemperature": 40, "nvmlDeviceGetPowerUsage": 100_000, "nvmlDeviceGetEnforcedPowerLimit": 500_000}
"""Answers of a GPU that does nothing: degrees Celsius, milliwatts."""


def install(stand_ins: StandIns) -> None:
    """Put them in place."""
    stand_ins.when("pynvml", partial(_put_nvml, stand_ins))
    for module in (torch.profiler, torch.autograd.profiler):
        stand_ins.put(module, "profile", _profile(stand_ins))
    cudart = type("Cudart", (), {"__getattr__": lambda self, name: lambda *_, **__: 0})()
    stand_ins.put(torch.cuda, "cudart", lambda: cudart)
    _follow_requested_gpus(stand_ins)


def _put_nvml(stand_ins: StandIns, nvml: Any) -> None:
    """Let NVML find the simulated GPU, with the memory that its process holds by now."""
    counters = stand_ins.process.counters.functions()

    def memory(*_: Any, **__: Any) -> Any:
        stand_ins.note("monitor", "NVML")
        free, total = counters["mem_get_info"]()
        return type("Memory", (), {"total": total, "free": free, "used": total - free})()

    answers: dict[str, Any] = {
        "nvmlInit": None,
        "nvmlInitWithFlags": None,
        "nvmlShutdown": None,
        "nvmlDeviceGetCount": stand_ins.process.current.count,
        "nvmlDeviceGetHandleByIndex": "GPU",
        "nvmlDeviceGetHandleByUUID": "GPU",
        "nvmlDeviceGetHandleByPciBusId": "GPU",
        "nvmlDeviceGetName": stand_ins.process.name,
        "nvmlSystemGetDriverVersion": "simulated",
        "nvmlDeviceGetUtilizationRates": type("Rates", (), {"gpu": 0, "memory": 0})(),
        "nvmlDeviceGetComputeRunningProcesses": [],
        "nvmlDeviceGetClockInfo": 0,
        **_IDLE,
    }
    for name, answer in answers.items():
        if hasattr(nvml, name):
            stand_ins.put(nvml, name, lambda *_, answer=answer, **__: answer)
    stand_ins.put(nvml, "nvmlDeviceGetMemoryInfo", memory)


def _profile(stand_ins: StandIns) -> type:
    """Return a profiler that records nothing: what it would, is how long Python takes to simulate."""

    class Profile:
        """``torch.profiler.profile``: every question about what was recorded is answered by nothing."""

        def __init__(self, *_: Any, **__: Any) -> None:
            stand_ins.note("tracker", "torch.profiler")

        def __enter__(self) -> Profile:
            return self

        def __exit__(self, *_: object) -> None: ...

        def __getattr__(self, name: str) -> Any:
            return lambda *_, **__: _Nothing()

    return Profile


class _Nothing(str):
    """An empty answer, which may be printed, asked for parts of, and gone through."""

    def __new__(cls) -> _Nothing:
        return super().__new__(cls, "")

    def table(self, *_: Any, **__: Any) -> str:
        """Return no rows."""
        return ""

    total_average = export_chrome_trace = table
