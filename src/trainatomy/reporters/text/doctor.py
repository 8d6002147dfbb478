"""A machine and what is wrong with it, on one screen."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from rich.text import Text

from trainatomy.reporters import doctor_sentences as sentences
from trainatomy.reporters.document import Column, Document, Part, Table, figures, grid, section, table, words
from trainatomy.reporters.labels import CLOCK_REASONS, SECTIONS, SEVERITY_STYLES
from trainatomy.results.machine import (
    Diagnosis,
    Finding,
    GPUState,
    Host,
    MachineState,
    PCIe,
    Software,
    Watched,
    WatchedGPU,
)
from trainatomy.units import human_bytes, percent

_UNKNOWN = "-"


def doctor_page(diagnosis: Diagnosis) -> Document:
    """Return the findings, worst first, and below them the state of GPUs, links, software and host."""
    return Document(tuple(_parts(diagnosis)), sentences.verdict(diagnosis))


def _parts(diagnosis: Diagnosis) -> Iterator[Part]:
    machine = diagnosis.machine
    yield Text(summary(machine), style="dim")
    if diagnosis.findings:
        yield Text()
        yield _findings(diagnosis.findings)
    if machine.gpus:
        yield section(SECTIONS["doctor_gpus"], _gpus(machine.gpus), *_unmeasured(machine))
    if machine.pairs:
        yield section(SECTIONS["doctor_topology"], _topology(machine), *_legend(machine))
    if machine.watched:
        yield section(SECTIONS["doctor_watched"], _watched(machine.watched))
    yield section(SECTIONS["doctor_machine"], _machine(machine))


def summary(machine: MachineState) -> str:
    """Return the machine in one line: GPUs, driver, torch."""
    names = Counter(gpu.name for gpu in machine.gpus)
    software = machine.software
    parts = [f"{count} × {name}" for name, count in names.items()] or ["no GPU"]
    if software.driver:
        cuda = " (CUDA {}.{})".format(*software.driver_cuda) if software.driver_cuda else ""
        parts.append(f"driver {software.driver}{cuda}")
    parts.append(f"torch {software.torch}" if software.torch else "no torch")
    return ", ".join(parts)


def _findings(findings: tuple[Finding, ...]) -> Table:
    """Return the findings; of notes only what was found and what to do."""
    rows = ((Text(each.severity, style=SEVERITY_STYLES[each.severity]), _finding(each)) for each in findings)
    return grid(rows, "left", "left")


def _finding(finding: Finding) -> Text:
    where = sentences.place(finding)
    text = Text(f"{where}: " if where else "").append(sentences.found_sentence(finding), style="bold")
    if finding.severity != "note" or finding.name in ("environment", "slow_fallback"):
        text.append(f"\n{sentences.meaning_sentence(finding)}")
    for cost in finding.costs:
        text.append(f"\nmeasured elsewhere: {sentences.cost_sentence(cost)}")
    if fix := sentences.fix_sentence(finding):
        text.append("\nfix: ", style="dim").append(fix, style="green")
    return text


def _gpus(gpus: tuple[GPUState, ...]) -> Table:
    """Return one row for each GPU: heat, power, clocks, link and copies."""

    def under_load(gpu: GPUState, name: str, figure: str) -> Any:
        """Return a state during copies, where that was read, or at rest."""
        state = getattr(gpu.copies, name, None)
        return state if state is not None and getattr(state, figure) else getattr(gpu, name)

    def copied(gpu: GPUState, name: str) -> str:
        return _gigabytes(gpu.copies.rates.get(name) if gpu.copies else None)

    def clock(gpu: GPUState) -> str:
        clocks = under_load(gpu, "clocks", "sm")
        return f"{_of(clocks.sm)} {_of(clocks.sm_max)}"

    return table(
        gpus,
        words("\nGPU", lambda gpu: f"{gpu.index} {gpu.name.removeprefix('NVIDIA ')}"),
        Column("\n°C", lambda gpu: _of(gpu.temperature.now)),
        Column("\nW of", lambda gpu: f"{_of(under_load(gpu, 'power', 'watts').watts)} {_of(gpu.power.limit_watts)}"),
        Column("clock\nMHz of", clock, rank=1),
        words("PCIe\n", lambda gpu: _pcie(under_load(gpu, "pcie", "width")), wraps=False),
        Column("NV-\nLinks", lambda gpu: str(len(gpu.nvlinks.active) or _UNKNOWN), rank=2),
        Column("to GPU\nGB/s", lambda gpu: copied(gpu, "pinned_to_device")),
        Column("from\nGPU", lambda gpu: copied(gpu, "device_to_pinned"), rank=1),
        Column("on GPU\nGB/s", lambda gpu: copied(gpu, "device_to_device"), rank=2),
        Column("memory\nused", lambda gpu: _UNKNOWN if gpu.used_bytes is None else human_bytes(gpu.used_bytes), rank=1),
        name_width=16,
    )


def _unmeasured(machine: MachineState) -> Iterator[Text]:
    if machine.unmeasured in sentences.UNMEASURED:
        yield Text(sentences.UNMEASURED[machine.unmeasured], style="dim")
    elif any(gpu.copies for gpu in machine.gpus):
        yield Text(
            "Clocks and PCIe under load, power as a mean of the last second; copies from pinned memory.", style="dim"
        )


def _pcie(pcie: PCIe) -> str:
    if pcie.generation is None or pcie.width is None:
        return _UNKNOWN
    return f"{pcie.generation} x{pcie.width}"


def _of(value: float | None) -> str:
    return _UNKNOWN if value is None else f"{value:.0f}"


def _gigabytes(value: float | None) -> str:
    return _UNKNOWN if value is None else f"{value / 1e9:.0f}" if value >= 1e10 else f"{value / 1e9:.1f}"


def _topology(machine: MachineState) -> Table:
    """Return the matrix of ``nvidia-smi topo -m``."""
    connections = {(pair.first, pair.second): pair.connection or _UNKNOWN for pair in machine.pairs}
    connections |= {(second, first): connection for (first, second), connection in connections.items()}
    indices = [gpu.index for gpu in machine.gpus]
    rows = [
        (f"GPU{row}", *("X" if row == each else connections.get((row, each), _UNKNOWN) for each in indices))
        for row in indices
    ]
    return figures(rows, "", *(f"GPU{index}" for index in indices), numbers=())


def _legend(machine: MachineState) -> Iterator[Text]:
    """Yield what the connections that occur here mean."""
    found = {"NV" if (pair.connection or "").startswith("NV") else pair.connection for pair in machine.pairs}
    if rates := [pair.copy_rate for pair in machine.pairs if pair.copy_rate is not None]:
        least, most = _gigabytes(min(rates)), _gigabytes(max(rates))
        yield Text(f"Copies between GPUs: {least if least == most else f'{least} to {most}'} GB/s.")
    for name, meaning in sentences.CONNECTIONS.items():
        if name in found:
            yield Text(f"{name}{'#' * (name == 'NV')}: {meaning}", style="dim")


def _watched(watched: Watched) -> Table:
    return table(
        watched.gpus,
        words("GPU", lambda gpu: str(gpu.index)),
        Column("kernels ran", lambda gpu: _UNKNOWN if gpu.utilisation is None else percent(gpu.utilisation, 1, 0)),
        Column("W", lambda gpu: _of(gpu.watts)),
        Column("SM MHz", lambda gpu: _of(gpu.sm_clock)),
        Column("°C at most", lambda gpu: _of(gpu.hottest)),
        Column("memory", lambda gpu: _UNKNOWN if gpu.pid_bytes is None else human_bytes(gpu.pid_bytes)),
        Column("held down by", _held_down),
    )


def _held_down(gpu: WatchedGPU) -> str:
    held = [f"{CLOCK_REASONS[name]} {percent(share, 1, 0)}" for name, share in gpu.reasons.items() if name != "idle"]
    return ", ".join(held) or _UNKNOWN


def _machine(machine: MachineState) -> Table:
    rows = {"torch": _torch(machine.software), "libraries": _libraries(machine.software)}
    rows |= {"processors": _processors(machine.host), "memory": _memory(machine.host)}
    return grid([(Text(title, style="dim"), text) for title, text in rows.items() if text], "left", "left")


def _torch(software: Software) -> str:
    if software.torch is None:
        return ""
    parts = [f"{software.torch}, CUDA {software.torch_cuda}" if software.torch_cuda else f"{software.torch}, no CUDA"]
    parts += [f"{name} {number}" for name, number in software.loaded.items()]
    parts += ["flash attention"] if software.flash_attention else []
    if software.matmul_tf32 is not None and software.torch_cuda:
        parts.append(f"TF32 {'on' if software.matmul_tf32 else 'off'}")
    parts += [f"kernels for {' '.join(software.architectures)}"] if software.architectures else []
    return ", ".join(parts)


def _libraries(software: Software) -> str:
    shown = ("transformers", "accelerate", "peft", "bitsandbytes", "deepspeed", "triton", "flash-attn", "liger-kernel")
    return ", ".join(f"{name} {software.versions[name]}" for name in shown if name in software.versions)


def _processors(host: Host) -> str:
    if host.cpus is None:
        return ""
    parts = [f"{host.cpus}"]
    if host.usable_cpus is not None and len(host.usable_cpus) != host.cpus:
        parts.append(f"{len(host.usable_cpus)} usable")
    parts += [f"quota {host.cpu_quota:.3g}"] if host.cpu_quota else []
    parts += [f"{host.busy_cpus:.1f} in use"] if host.busy_cpus is not None else []
    parts += [f"governor {host.governor[0]}"] if host.governor else []
    parts += [f"in {host.container}"] if host.container else []
    return ", ".join(parts)


def _memory(host: Host) -> str:
    sizes = {
        "": host.memory_bytes,
        "available": host.available_bytes,
        "limit": host.memory_limit_bytes,
        "swap": host.swap_bytes,
        "/dev/shm": host.shm_bytes,
    }
    parts = [f"{human_bytes(size)} {name}".strip() for name, size in sizes.items() if size is not None]
    if host.memlock_bytes is not None:
        locked = "unlimited" if host.memlock_bytes < 0 else human_bytes(host.memlock_bytes)
        parts.append(f"{locked} lockable")
    parts += [f"huge pages {host.huge_pages}"] if host.huge_pages else []
    return ", ".join(parts)
