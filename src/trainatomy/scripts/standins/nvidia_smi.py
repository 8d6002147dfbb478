"""Output of the command ``nvidia-smi`` about the simulated GPUs, when a script runs it."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from trainatomy.scripts.programs import FILTERS

PROGRAM = "nvidia-smi"
_UNSAFE = re.compile(r"[;&<>`\n]|\$\(|\bsystem\b|-i\b")
"""Parts of a command that may write a file or start something else."""


@dataclass(frozen=True, slots=True)
class GpuState:
    """A simulated GPU and its memory in use, in bytes; ``capability`` is that of its kernels, such as ``9.0``."""

    name: str
    capability: str
    total_bytes: int
    used_bytes: int


def split(command: str | Sequence[str]) -> tuple[list[str], str] | None:
    """Return the words of ``nvidia-smi``, and the shell command behind its pipe.

    Returns:
        ``None`` if the command is another one, or does more than filter what ``nvidia-smi`` prints.
    """
    if not isinstance(command, str):
        words, filters = [*command], ""
    else:
        if _UNSAFE.search(command.replace("2>/dev/null", "").replace("2>&1", "")):
            return None
        first, *others = command.split("|")
        if any(shlex.split(each)[:1] == [] or shlex.split(each)[0] not in FILTERS for each in others):
            return None
        words, filters = (
            shlex.split(first.replace("2>/dev/null", "").replace("2>&1", "")),
            " | ".join(map(str.strip, others)),
        )
    return (words, filters) if words and Path(words[0]).name == PROGRAM else None


def answer(words: Sequence[str], gpus: Sequence[GpuState], process: int) -> str | None:
    """Return what ``nvidia-smi`` prints; ``None`` for options that are not known here.

    Args:
        words: The command.
        gpus: All GPUs of the machine.
        process: Id of the process that trains.
    """
    options = _options(words[1:])
    chosen = _chosen(options.pop("id", None), len(gpus))
    if chosen is None:
        return "No devices were found\n"
    shown = options.pop("format", "csv").split(",")
    for key, table in (("query-gpu", _GPU_FIELDS), ("query-compute-apps", _PROCESS_FIELDS)):
        if key in options:
            names = [name.strip() for name in options[key].split(",")]
            return _csv(names, table, [(index, gpus[index], process) for index in chosen], shown)
    if "list-gpus" in options:
        return "".join(f"GPU {index}: {gpus[index].name} (UUID: {_uuid(index)})\n" for index in chosen)
    return _overview([(index, gpus[index]) for index in chosen]) if not options else None


def _options(words: Sequence[str]) -> dict[str, str]:
    """Return the options by their long names."""
    long = {"-i": "id", "-L": "list-gpus"}
    found: dict[str, str] = {}
    rest = [*words]
    while rest:
        word = rest.pop(0)
        name, _, value = word.partition("=")
        name = long.get(name, name.lstrip("-"))
        if not value and name in {"id", "format", "query-gpu", "query-compute-apps"} and rest:
            value = rest.pop(0)
        found[name] = value
    return found


def _chosen(given: str | None, count: int) -> list[int] | None:
    """Return the indices of the GPUs that ``--id`` names; ``None`` if there is no such GPU."""
    if given is None:
        return [*range(count)]
    numbers = [int(each) for each in given.split(",") if each.strip().isdigit()]
    return numbers if numbers and all(number < count for number in numbers) else None


_Row = tuple[int, GpuState, int]


_Field = tuple[str, Callable[[_Row], object]]
"""A unit, "" for none, and the value of a GPU."""


def _memory(read: Callable[[GpuState], int]) -> _Field:
    return "MiB", lambda row: read(row[1]) // 2**20


_USED = _memory(lambda gpu: gpu.used_bytes)
_NAME: _Field = "", lambda row: row[1].name
_UUID: _Field = "", lambda row: _uuid(row[0])
_BUS: _Field = "", lambda row: f"00000000:{row[0] + 1:02X}:00.0"
_IDLE: _Field = "%", lambda _: 0
_GPU_FIELDS: dict[str, _Field] = {
    "index": ("", lambda row: row[0]),
    "name": _NAME,
    "gpu_name": _NAME,
    "uuid": _UUID,
    "gpu_uuid": _UUID,
    "gpu_bus_id": _BUS,
    "pci.bus_id": _BUS,
    "timestamp": ("", lambda _: datetime.now().astimezone().strftime("%Y/%m/%d %H:%M:%S.000")),
    "compute_cap": ("", lambda row: row[1].capability),
    "driver_version": ("", lambda _: "simulated"),
    "pstate": ("", lambda _: "P0"),
    "memory.total": _memory(lambda gpu: gpu.total_bytes),
    "memory.used": _USED,
    "memory.free": _memory(lambda gpu: gpu.total_bytes - gpu.used_bytes),
    "utilization.gpu": _IDLE,
    "utilization.memory": _IDLE,
    "temperature.gpu": ("", lambda _: 40),
    "power.draw": ("W", lambda _: "100.00"),
    "power.limit": ("W", lambda _: "500.00"),
}

_PROCESS_FIELDS: dict[str, _Field] = {
    "pid": ("", lambda row: row[2]),
    "process_name": ("", lambda _: "python"),
    "name": ("", lambda _: "python"),
    "gpu_name": _NAME,
    "gpu_uuid": _UUID,
    "gpu_bus_id": _BUS,
    "used_memory": _USED,
    "used_gpu_memory": _USED,
}


def _csv(names: Sequence[str], table: dict[str, _Field], rows: Sequence[_Row], shown: Sequence[str]) -> str:
    """Return the lines of a query; a field that is not known here is ``[N/A]``."""
    has_units = "nounits" not in shown
    fields = [table.get(name, ("", lambda _: "[N/A]")) for name in names]
    titles = [f"{name} [{unit}]" if unit else name for name, (unit, _) in zip(names, fields, strict=True)]
    lines = [] if "noheader" in shown else [", ".join(titles)]
    lines += [
        ", ".join(f"{read(row)} {unit}" if unit and has_units else str(read(row)) for unit, read in fields)
        for row in rows
    ]
    return "".join(f"{line}\n" for line in lines)


def _overview(gpus: Sequence[tuple[int, GpuState]]) -> str:
    """Return the page that ``nvidia-smi`` prints without options, as far as it is known."""
    rule = f"+{'-' * 77}+\n"
    text = f"{rule}| {'NVIDIA-SMI simulated':<76}|\n{rule}"
    for index, gpu in gpus:
        memory = f"{gpu.used_bytes // 2**20}MiB / {gpu.total_bytes // 2**20}MiB"
        text += f"| {index:>3}  {gpu.name[:32]:<32} {memory:>24} {'0%':>5} {'Default':>8} |\n{rule}"
    return text


def _uuid(index: int) -> str:
    return f"GPU-00000000-0000-0000-0000-{index:012d}"
