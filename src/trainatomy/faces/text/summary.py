"""What a script prints while it trains: the card's memory with what it is made of, and a run's speed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from rich.console import Group
from rich.table import Table
from rich.text import Text

from trainatomy.units import exact_bytes, human_bytes, mebibytes


class Held(Protocol):
    """What ``gpu.attach_reading.Utilization`` says of a card, bytes; ``None``: not known."""

    @property
    def gpu(self) -> str: ...
    @property
    def used_bytes(self) -> int | None: ...
    @property
    def driver_bytes(self) -> int | None: ...
    @property
    def process_bytes(self) -> int | None: ...
    @property
    def other_bytes(self) -> int | None: ...
    @property
    def others(self) -> int | None: ...
    @property
    def context_bytes(self) -> int | None: ...
    @property
    def reserved_bytes(self) -> int: ...
    @property
    def allocated_bytes(self) -> int: ...


def utilization_text(held: Held) -> Group:
    """The line of the guides, and below it who holds how much."""
    if held.used_bytes is None:
        headline = f"GPU memory occupied: the driver does not say ({held.gpu})"
    else:
        headline = f"GPU memory occupied: {mebibytes(held.used_bytes)} MiB ({held.gpu})"
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column()
    table.add_column(justify="right", no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    for indent, title, count in _parts(held):
        if count is not None:
            table.add_row(f"{'  ' * indent}{title}", human_bytes(count), exact_bytes(count))
    return Group(Text(headline, style="bold"), table)


def _parts(held: Held) -> tuple[tuple[int, str, int | None], ...]:
    others = "other processes" if held.others is None else f"other processes ({held.others})"
    return (
        (1, "the driver's own", held.driver_bytes),
        (1, "this process", held.process_bytes),
        (2, "context and kernels", held.context_bytes),
        (2, "reserved by PyTorch", held.reserved_bytes),
        (3, "allocated: tensors", held.allocated_bytes),
        (3, "cache, fragmentation", held.reserved_bytes - held.allocated_bytes),
        (1, others, held.other_bytes),
    )


def speed_text(metrics: Mapping[str, Any]) -> Text:
    """Time and samples per second of a ``TrainOutput``'s metrics, as the guides print them; what is missing is not
    shown."""
    lines = []
    for title, name in (("Time", "train_runtime"), ("Samples/second", "train_samples_per_second")):
        if name in metrics:
            lines.append(f"{title}: {metrics[name]:.2f}")
    return Text("\n".join(lines))
