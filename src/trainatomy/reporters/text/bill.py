"""The bill: what device memory holds at the peak, component by component, adding up to the byte."""

from __future__ import annotations

from rich.console import Console, ConsoleOptions, RenderResult
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from trainatomy.reporters.text.rendering import bar
from trainatomy.results.memory import Line, Memory
from trainatomy.units import exact_bytes, human_bytes, percent

TITLES = {
    "weights": "weights",
    "optimizer_states": "optimizer states",
    "gradients": "gradients",
    "activations": "activations",
    "temporary": "temporary buffers",
    "functionality": "functionality",
    "cache": "cache, fragmentation",
    "context": "context and kernels",
}
STYLES = {
    "weights": "blue",
    "optimizer_states": "magenta",
    "gradients": "cyan",
    "activations": "green",
    "temporary": "yellow",
    "functionality": "bright_blue",
    "cache": "bright_black",
    "context": "white",
}
_COLUMNS_BESIDE_THE_BAR = 68


class Bill:
    """The components with their parts, as wide as the page; the bars take what the numbers leave."""

    def __init__(self, memory: Memory) -> None:
        self.memory = memory

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        bars = max(0, min(options.max_width - _COLUMNS_BESIDE_THE_BAR, 40))
        table = Table.grid(padding=(0, 2, 0, 0))
        table.add_column(min_width=28)
        for justify in ("right", "right", "right"):
            table.add_column(justify=justify, no_wrap=True)
        table.add_column(no_wrap=True)
        self._fill(table, bars)
        yield table

    def _fill(self, table: Table, bars: int) -> None:
        memory = self.memory
        components = memory.components.as_dict()
        total = memory.components.total_bytes
        largest = max(components.values()) or 1
        for name, count in components.items():
            drawn = Text(bar(count / largest, bars), style=STYLES[name])
            table.add_row(TITLES[name], human_bytes(count), exact_bytes(count), percent(count, total), drawn)
            for line in _parts(memory, name):
                cells = (f"  {line.name}", human_bytes(line.bytes), exact_bytes(line.bytes))
                table.add_row(*(Text(cell, style="dim") for cell in cells))
        table.add_row(*([Rule(style="dim", characters="─")] * 4))
        table.add_row(
            Text("as nvidia-smi shows it", style="bold"),
            Text(human_bytes(total), style="bold"),
            exact_bytes(total),
            "100.0 %",
        )


def _parts(memory: Memory, component: str) -> list[Line]:
    """The lines of a component, unless the only one says no more than the component itself."""
    lines = [line for line in memory.lines if line.component == component]
    return [] if [line.name for line in lines] == [TITLES[component]] else lines


def counters(memory: Memory) -> Table:
    """The figures that PyTorch itself would report: each with the name of the call that gives it on a GPU."""
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(min_width=28)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    for name, count in (
        ("max_memory_allocated", memory.peak_allocated_bytes),
        ("max_memory_reserved", memory.peak_reserved_bytes),
        ("requested, before rounding", memory.peak_requested_bytes),
        ("the model, once loaded", memory.model_bytes),
    ):
        table.add_row(name, human_bytes(count), exact_bytes(count))
    return table
