"""The data that ships, and a calibration: GPUs, architectures and measured costs, with their sources."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from trainatomy.catalog.architectures import ArchitectureEntry
from trainatomy.catalog.gpus import GPU
from trainatomy.reporters import run_sentences
from trainatomy.reporters.labels import CALIBRATION, SECTIONS
from trainatomy.reporters.text.rendering import bullets, figures, section
from trainatomy.units import count_of, exact_bytes, human_bytes, seconds

if TYPE_CHECKING:
    from trainatomy.catalog.calibrations import Calibration, CollectivePoint
    from trainatomy.timing.findings import Finding

_HUB = "https://huggingface.co/"
_IDENTITY = frozenset({"id", "name", "device_name", "aliases", "sources", "assumed"})


def gpus_table(gpus: Sequence[GPU]) -> Group:
    """Return a table with one row for each GPU; ``*`` marks assumed figures."""
    numbers = ("\nmemory", "\ncc", "\nSMs", "\nGB/s", "16-bit\nTFLOP/s", "\ncontext")
    table = figures("\nGPU", "\nname", numbers=numbers, folded=1)
    for gpu in gpus:
        table.add_row(gpu.id, gpu.name, *_row(gpu))
    closing = (
        "* assumed; all other figures are measured or published. Sources: trainatomy gpus GPU. cc: compute capability. "
        "context: memory that the first tensor adds outside PyTorch's allocator, with current software."
    )
    return Group(table, Text(), Text(closing, style="dim"))


def _row(gpu: GPU) -> tuple[str, ...]:
    rate = gpu.rates.get("bf16", gpu.rates.get("fp16"))
    context = gpu.contexts.get("lazy")
    held = human_bytes(context.first_tensor_bytes) if context else "-"
    return (
        _marked(gpu, "memory_bytes", human_bytes(gpu.memory_bytes)),
        ".".join(map(str, gpu.capability)),
        str(gpu.multiprocessors),
        _marked(gpu, "bandwidth_bytes_per_second", f"{gpu.bandwidth_bytes_per_second / 1e9:.0f}"),
        "-" if rate is None else _marked(gpu, "rates", f"{rate / 1e12:.0f}"),
        _marked(gpu, "contexts.lazy.first_tensor_bytes", held),
    )


def _marked(gpu: GPU, field: str, value: str) -> str:
    return f"{value}*" if gpu.source(field).startswith("assumed") else value


def gpu_page(gpu: GPU) -> Group:
    """Return everything that is known of one GPU, grouped by source."""
    names = f"{gpu.id}; also: {', '.join(gpu.aliases)}" if gpu.aliases else gpu.id
    groups: dict[str, Table] = {}
    for name, value in _figures(gpu).items():
        table = groups.setdefault(gpu.source(name), Table.grid(padding=(0, 2, 0, 0)))
        table.add_row(name, value)
    title = [Text(gpu.name, style="bold"), Text(names, style="dim")]
    return Group(*title, *(section(source, table) for source, table in groups.items()))


def _figures(gpu: GPU) -> dict[str, str]:
    """Return every field as text by its dotted name."""
    values: dict[str, str] = {}
    for field in fields(gpu):
        value = getattr(gpu, field.name)
        if field.name == "contexts":
            for era, context in value.items():
                values[f"contexts.{era}.first_tensor_bytes"] = exact_bytes(context.first_tensor_bytes)
                for library, count in context.loads_bytes.items():
                    values[f"contexts.{era}.loads_bytes.{library}"] = exact_bytes(count)
        elif isinstance(value, Mapping) and field.name not in _IDENTITY:
            values |= {f"{field.name}.{key}": f"{number:.4g}" for key, number in value.items()}
        elif field.name not in _IDENTITY and value is not None:
            values[field.name] = _text(value)
    return values


def _text(value: object) -> str:
    if isinstance(value, tuple):
        return ".".join(map(str, value))
    return exact_bytes(value) if isinstance(value, int) else f"{value:.4g}" if isinstance(value, float) else str(value)


def architectures_table(architectures: Sequence[ArchitectureEntry]) -> Group:
    """Return a table with one row for each architecture, and the source if it is not the model's page on the Hub."""
    table = figures("model", "class", numbers=("parameters",), folded=0)
    for entry in architectures:
        source = Text(f"\n  {entry.source}" if entry.source != f"{_HUB}{entry.hub_id}" else "", style="dim")
        table.add_row(Text(entry.hub_id).append(source), entry.class_name, count_of(entry.parameters))
    closing = f"Source of a configuration: {_HUB}MODEL, unless another is given. All fields: trainatomy models --json."
    return Group(table, Text(), Text(closing, style="dim"))


def calibration_page(calibration: Calibration, left_out: Sequence[str]) -> Group:
    """Return the findings of a calibration compared with the GPU's data sheet, and the cases not measured."""
    from trainatomy.timing.findings import findings

    where = calibration.environment
    versions = ", ".join(f"{name} {version}" for name, version in where["versions"].items())
    setup = f"{where['gpu']}, driver {where['driver']}, {versions}, {where['processor']}, {where['date']}"
    headline = Text(f"{len(calibration.points):,} operations measured", style="bold")
    parts: list[RenderableType] = [headline, Text(setup, style="dim")]
    found = findings(calibration)
    for unit, title in CALIBRATION.items():
        rows = [one for one in found if one.unit == unit]
        if rows:
            parts.append(section(title, _findings(rows, unit)))
    if host := calibration.sections.get("host"):
        parts.append(section(SECTIONS["calibrated_host"], bullets(run_sentences.calibrated_host(host))))
    if calibration.collectives:
        parts.append(section(SECTIONS["collectives"], _collectives(calibration.collectives)))
    if left_out:
        parts.append(section(SECTIONS["not_measured"], bullets(tuple(left_out))))
    return Group(*parts)


def _collectives(points: Sequence[CollectivePoint]) -> Table:
    """Return the time of the smallest message, and the bytes per second of the largest, of each kind."""
    table = figures("", "", numbers=("smallest", "largest", "GB/s"))
    for kind, ranks in dict.fromkeys((one.kind, one.ranks) for one in points):
        rows = sorted((one for one in points if (one.kind, one.ranks) == (kind, ranks)), key=lambda one: one.bytes)
        first, last = rows[0], rows[-1]
        times = [f"{human_bytes(one.bytes)} in {seconds(one.seconds)}" for one in (first, last)]
        table.add_row(kind, f"{ranks} GPUs", *times, f"{last.bytes / last.seconds / 1e9:,.1f}")
    return table


def _findings(rows: Sequence[Finding], unit: str) -> Table:
    compared = any(row.data_sheet for row in rows)
    table = figures("", "", numbers=(unit, *(("data sheet", "share") if compared else ())))
    for row in rows:
        sheet = (f"{row.data_sheet:,.1f}", f"{row.measured / row.data_sheet:.0%}") if row.data_sheet else ("-", "-")
        table.add_row(row.name, row.at, f"{row.measured:,.1f}", *(sheet if compared else ()))
    return table
