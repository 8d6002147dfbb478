"""Answers to questions about the machine: NVML and profilers, which have nothing to watch without a GPU."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from trainatomy.scripts.standins.notes import StandIns

_IDLE = {"nvmlDeviceGetTemperature": 40, "nvmlDeviceGetPowerUsage": 100_000, "nvmlDeviceGetEnforcedPowerLimit": 500_000}
"""Answers of a GPU that does nothing: degrees Celsius, milliwatts."""


def install(stand_ins: StandIns) -> None:
    """Put them in place."""
    stand_ins.when("pynvml", partial(_put_nvml, stand_ins))
    for module in (torch.profiler, torch.autograd.profiler):
        stand_ins.put(module, "profile", _profile(stand_ins))
    cudart = type("Cudart", (), {"__getattr__": lambda self, name: lambda *_, **__: 0})()
    stand_ins.put(torch.cuda, "cudart", lambda: cudart)


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
