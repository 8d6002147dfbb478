"""How long a step takes, what it is spent on and what bounds it."""

from __future__ import annotations

from rich.table import Table
from rich.text import Text

from trainatomy.results.time import Time
from trainatomy.units import flop_of, many, percent, rate, seconds

BOUNDS = {
    "arithmetic": "arithmetic",
    "memory bandwidth": "memory bandwidth",
    "host": "the CPU that issues the work",
}


def time_line(time: Time, *, fits: bool = True) -> Text:
    """The answer in one line; of a training that does not fit, what a card with more memory would take."""
    takes = "takes" if fits else "would take, with enough memory,"
    low, high = time.interval_seconds
    tokens = "" if time.tokens_per_second is None else f", {rate(time.tokens_per_second)} tokens/s"
    return Text(
        f"a step {takes} {seconds(time.step_seconds)} ({seconds(low)} to {seconds(high)} in 9 of 10 cases): "
        f"{rate(time.samples_per_second)} samples/s{tokens}; bound by {BOUNDS[time.bound_by]}"
    )


def time_table(time: Time) -> Table:
    """Both clocks, the GPU's phases, FLOP and utilisation, and what the figures rest on."""
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(min_width=28)
    table.add_column(justify="right", no_wrap=True)
    table.add_column()
    table.add_row("the GPU at work", seconds(time.gpu_seconds), many(time.launches, "kernel"))
    for phase, spent in time.phases.items():
        if spent:
            table.add_row(*(Text(cell, style="dim") for cell in (f"  {phase}", seconds(spent))))
    table.add_row("the CPU issuing it", seconds(time.host_seconds), time.host)
    table.add_row("FLOP per second", flop_of(time.flop_per_second), f"{flop_of(time.flop)}FLOP a step")
    if time.model_flop_utilisation is not None:
        table.add_row("MFU", percent(time.model_flop_utilisation, 1), "of the data sheet's peak, without recomputation")
    if time.attainable_utilisation is not None:
        table.add_row("", percent(time.attainable_utilisation, 1), "of what large matrix products attain")
    table.add_row("priced by", "", time.priced_by)
    if time.general_rule_only:
        table.add_row("by traffic alone", "", ", ".join(time.general_rule_only))
    return table
