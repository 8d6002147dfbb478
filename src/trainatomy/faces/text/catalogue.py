"""What ships as data: cards and architectures, with their sources."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields

from rich.console import Group
from rich.table import Table
from rich.text import Text

from trainatomy.faces.text.rendering import figures, section
from trainatomy.facts.architectures import ArchitectureEntry
from trainatomy.facts.cards import Card
from trainatomy.units import count_of, exact_bytes, human_bytes

_HUB = "https://huggingface.co/"
_ABOUT_ITSELF = frozenset({"id", "name", "device_name", "aliases", "sources", "assumed"})


def cards_table(cards: Sequence[Card]) -> Group:
    """One row a card.  The context is that of today's software; ``*``: assumed; without it, measured or published."""
    numbers = ("\nmemory", "\ncc", "\nSMs", "\nGB/s", "16-bit\nTFLOP/s", "\ncontext")
    table = figures("\ncard", "\nname", numbers=numbers, folded=1)
    for card in cards:
        table.add_row(card.id, card.name, *_row(card))
    closing = (
        "* assumed; without it, measured or published. Where each figure comes from: trainatomy gpus CARD. "
        "cc: compute capability. Context: what the first tensor costs outside of PyTorch's allocator, with today's "
        "software."
    )
    return Group(table, Text(), Text(closing, style="dim"))


def _row(card: Card) -> tuple[str, ...]:
    rate = card.rates.get("bf16", card.rates.get("fp16"))
    context = card.contexts.get("lazy")
    held = human_bytes(context.first_tensor_bytes) if context else "-"
    return (
        _marked(card, "memory_bytes", human_bytes(card.memory_bytes)),
        ".".join(map(str, card.capability)),
        str(card.multiprocessors),
        _marked(card, "bandwidth_bytes_per_second", f"{card.bandwidth_bytes_per_second / 1e9:.0f}"),
        "-" if rate is None else _marked(card, "rates", f"{rate / 1e12:.0f}"),
        _marked(card, "contexts.lazy.first_tensor_bytes", held),
    )


def _marked(card: Card, field: str, value: str) -> str:
    return f"{value}*" if card.source(field).startswith("assumed") else value


def card_page(card: Card) -> Group:
    """Everything that is known of one card, grouped by where it comes from."""
    names = f"{card.id}; also: {', '.join(card.aliases)}" if card.aliases else card.id
    groups: dict[str, Table] = {}
    for name, value in _figures(card).items():
        table = groups.setdefault(card.source(name), Table.grid(padding=(0, 2, 0, 0)))
        table.add_row(name, value)
    title = [Text(card.name, style="bold"), Text(names, style="dim")]
    return Group(*title, *(section(source, table) for source, table in groups.items()))


def _figures(card: Card) -> dict[str, str]:
    """Every field by its dotted name, as text."""
    values: dict[str, str] = {}
    for field in fields(card):
        value = getattr(card, field.name)
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
