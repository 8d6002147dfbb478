"""What ships as data: cards and architectures, with their sources."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields

from rich.console import Group
from rich.table import Table
from rich.text import Text

from trainatomy.catalog.architectures import ArchitectureEntry
from trainatomy.catalog.gpus import GPU
from trainatomy.reporters.text.rendering import figures, section
from trainatomy.units import count_of, exact_bytes, human_bytes

_HUB = "https://huggingface.co/"
_ABOUT_ITSELF = frozenset({"id", "name", "device_name", "aliases", "sources", "assumed"})


def cards_table(cards: Sequence[GPU]) -> Group:
    """One row a card.  The context is that of today's software; ``*``: assumed; without it, measured or published."""
    numbers = ("\nmemory", "\ncc", "\nSMs", "\nGB/s", "16-bit\nTFLOP/s", "\ncontext")
    table = figures("\ncard", "\nname", numbers=numbers, folded=1)
    for gpu in cards:
        table.add_row(gpu.id, gpu.name, *_row(gpu))
    closing = (
        "* assumed; without it, measured or published. Where each figure comes from: trainatomy gpus CARD. "
        "cc: compute capability. Context: what the first tensor costs outside of PyTorch's allocator, with today's "
        "software."
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


def card_page(gpu: GPU) -> Group:
    """Everything that is known of one card, grouped by where it comes from."""
    names = f"{gpu.id}; also: {', '.join(gpu.aliases)}" if gpu.aliases else gpu.id
    groups: dict[str, Table] = {}
    for name, value in _figures(gpu).items():
        table = groups.setdefault(gpu.source(name), Table.grid(padding=(0, 2, 0, 0)))
        table.add_row(name, value)
    title = [Text(gpu.name, style="bold"), Text(names, style="dim")]
    return Group(*title, *(section(source, table) for source, table in groups.items()))


def _figures(gpu: GPU) -> dict[str, str]:
    """Every field by its dotted name, as text."""
    values: dict[str, str] = {}
    for field in fields(gpu):
        value = getattr(gpu, field.name)
        if field.name == "contexts":
            for era, context in value.items():
                values[f"contexts.{era}.first_tensor_bytes"] = exact_bytes(context.first_tensor_bytes)
                for library, count in context.loads_bytes.items():
                    values[f"contexts.{era}.loads_bytes.{library}"] = exact_bytes(count)
        elif isinstance(value, Mapping) and field.name not in _ABOUT_ITSELF:
            values |= {f"{field.name}.{key}": f"{number:.4g}" for key, number in value.items()}
        elif field.name not in _ABOUT_ITSELF and value is not None:
            values[field.name] = _text(value)
    return values


def _text(value: object) -> str:
    if isinstance(value, tuple):
        return ".".join(map(str, value))
    return exact_bytes(value) if isinstance(value, int) else f"{value:.4g}" if isinstance(value, float) else str(value)


def architectures_table(architectures: Sequence[ArchitectureEntry]) -> Group:
    """One row an architecture; the source of its configuration where that is not the page of its name on the hub."""
    table = figures("model", "class", numbers=("parameters",), folded=0)
    for entry in architectures:
        source = Text(f"\n  {entry.source}" if entry.source != f"{_HUB}{entry.hub_id}" else "", style="dim")
        table.add_row(Text(entry.hub_id).append(source), entry.class_name, count_of(entry.parameters))
    closing = f"Source of a configuration: {_HUB}MODEL, unless another is named. All fields: trainatomy models --json."
    return Group(table, Text(), Text(closing, style="dim"))
