"""A machine and what is wrong with it, on one screen."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from trainatomy.reporters import doctor_sentences as sentences
from trainatomy.reporters.labels import CLOCK_REASONS, SECTIONS, SEVERITY_STYLES
from trainatomy.reporters.text.rendering import AdaptiveTable, Column, figures, grid, section
from trainatomy.results.machine import Diagnosis, Finding, GPUState, Host, MachineState, PCIe, Software, Watched
from trainatomy.units import human_bytes, percent

_UNKNOWN = "-"


def doctor_page(diagnosis: Diagnosis) -> Group:
    """Return the findings, worst first, and below them the state of GPUs, links, software and host."""
    machine = diagnosis.machine
    parts: list[RenderableType] = [
        Text(sentences.verdict(diagnosis), style="bold"),
        Text(summary(machine), style="dim"),
    ]
    if diagnosis.findings:
        parts += [Text(), _findings(diagnosis.findings)]
    if machine.gpus:
        parts.append(section(SECTIONS["doctor_gpus"], _gpus(machine.gpus), *_unmeasured(machine)))
    if machine.pairs:
        parts.append(section(SECTIONS["doctor_topology"], _topology(machine), *_legend(machine)))
    if machine.watched:
        parts.append(section(SECTIONS["doctor_watched"], _watched(machine.watched)))
    parts.append(section(SECTIONS["doctor_machine"], _machine(machine)))
    return Group(*parts)


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
    table = grid("left", "left")
    for finding in findings:
        table.add_row(Text(finding.severity, style=SEVERITY_STYLES[finding.severity]), _finding(finding))
    return table


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


def _gpus(gpus: tuple[GPUState, ...]) -> AdaptiveTable:
    """Return one row for each GPU: heat, power, clocks, link and copies."""
    columns = [
        Column("\n°C"),
        Column("\nW of"),
        Column("clock\nMHz of", 1),
        Column("PCIe\n", 0, "left"),
        Column("NV-\nLinks", 2),
        Column("to GPU\nGB/s"),
        Column("from\nGPU", 1),
        Column("on GPU\nGB/s", 2),
        Column("memory\nused", 1),
    ]
    table = AdaptiveTable("\nGPU", columns, name_width=16)
    for gpu in gpus:
        rates = gpu.copies.rates if gpu.copies else {}
        power = gpu.copies.power if gpu.copies and gpu.copies.power.watts else gpu.power
        clocks = gpu.copies.clocks if gpu.copies and gpu.copies.clocks.sm else gpu.clocks
        pcie = gpu.copies.pcie if gpu.copies and gpu.copies.pcie.width else gpu.pcie
        table.add_row(
            f"{gpu.index} {gpu.name.removeprefix('NVIDIA ')}",
            _of(gpu.temperature.now),
            f"{_of(power.watts)} {_of(gpu.power.limit_watts)}",
            f"{_of(clocks.sm)} {_of(clocks.sm_max)}",
            _pcie(pcie),
            str(len(gpu.nvlinks.active) or _UNKNOWN),
            _gigabytes(rates.get("pinned_to_device")),
            _gigabytes(rates.get("device_to_pinned")),
            _gigabytes(rates.get("device_to_device")),
            _UNKNOWN if gpu.used_bytes is None else human_bytes(gpu.used_bytes),
        )
    return table


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
    table = figures("", *(f"GPU{index}" for index in indices), numbers=())
    for row in indices:
        cells = ["X" if row == column else connections.get((row, column), _UNKNOWN) for column in indices]
        table.add_row(f"GPU{row}", *cells)
    return table


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
    table = figures("GPU", numbers=("kernels ran", "W", "SM MHz", "°C at most", "memory", "held down by"))
    for gpu in watched.gpus:
        held = [
            f"{CLOCK_REASONS[name]} {percent(share, 1, 0)}" for name, share in gpu.reasons.items() if name != "idle"
        ]
        table.add_row(
            str(gpu.index),
            _UNKNOWN if gpu.utilisation is None else percent(gpu.utilisation, 1, 0),
            _of(gpu.watts),
            _of(gpu.sm_clock),
            _of(gpu.hottest),
            _UNKNOWN if gpu.pid_bytes is None else human_bytes(gpu.pid_bytes),
            ", ".join(held) or _UNKNOWN,
        )
    return table


def _machine(machine: MachineState) -> Table:
    table = grid("left", "left")
    rows = {"torch": _torch(machine.software), "libraries": _libraries(machine.software)}
    rows |= {"processors": _processors(machine.host), "memory": _memory(machine.host)}
    for title, text in rows.items():
        if text:
            table.add_row(Text(title, style="dim"), text)
    return table


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
