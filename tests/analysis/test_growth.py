"""Memory that grows with each step, in traces written by hand."""

from __future__ import annotations

import pytest
from traces_by_hand import MIB, TraceBuilder

from trainatomy.analysis.growth import growth_of
from trainatomy.results.script import Growth
from trainatomy.results.trace import AllocationTrace


def loop(steps: int, kept: int = 0, label: str | None = None, late: int = 0) -> AllocationTrace:
    """Return a loop that keeps ``kept`` bytes of each step, and its loss until the next one has been computed."""
    builder, loss = TraceBuilder(), None
    for step in range(steps):
        builder.mark("step", step)
        if kept:
            builder.allocate(kept, label=label, module="body", step=step)
        if step == 1 and late:
            builder.allocate(late, step=step)
        new = builder.allocate(5 * MIB, step=step)
        if loss is not None:
            builder.free(loss)
        loss = new
        builder.mark("step end", step)
    return builder.trace


def test_what_each_step_leaves_is_told_with_the_step_that_fills_the_gpu() -> None:
    assert growth_of(loop(3, kept=2 * MIB), spare_bytes=21 * MIB) == Growth(2 * MIB, "aten::empty", "body", 3 + 10)


@pytest.mark.parametrize(
    "trace",
    [
        loop(3),  # a loss is kept for one more step
        loop(2, kept=2 * MIB),  # too few steps to tell
        loop(3, kept=2 * MIB, label="optimizer_state"),
        loop(3, late=2 * MIB),  # once, such as an average of the weights that begins in the second step
        loop(3, kept=512),  # a number
    ],
)
def test_what_is_no_growth(trace: AllocationTrace) -> None:
    assert growth_of(trace, spare_bytes=0) is None
