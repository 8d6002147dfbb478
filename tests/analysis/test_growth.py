"""Memory that grows with each step, in traces written by hand."""

from __future__ import annotations

import pytest
from traces_by_hand import MIB, TraceBuilder

from trainatomy.analysis.epochs import growth_of
from trainatomy.results.script import Growth
from trainatomy.results.trace import AllocationTrace


def loop(
    steps: int, kept: int = 0, label: str | None = None, late: int = 0, ahead: int = 0, per_step: int = 1
) -> AllocationTrace:
    """Return a loop that keeps ``kept`` bytes of each step, and its loss until the next one has been computed.

    ``ahead``: batches that its loader holds, ``per_step`` of which it fetches in each step until it has all.
    """
    builder, loss = TraceBuilder(), None
    queue: list[int] = []
    for step in range(steps):
        for _ in range(per_step if ahead else 0):
            if len(queue) < ahead:
                queue.append(builder.allocate(3 * MIB, step=step - 1))
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
        if len(queue) == ahead and queue:
            builder.free(queue.pop(0))
    return builder.trace


@pytest.mark.parametrize("steps", [3, 5, 9])
@pytest.mark.parametrize(("kept", "block"), [(2 * MIB, 2 * MIB), (4, 512), (1000, 1024)])
def test_what_each_step_leaves_is_told_with_the_step_that_fills_the_gpu(steps: int, kept: int, block: int) -> None:
    found = growth_of(loop(steps, kept=kept), spare_bytes=10 * block + 100)
    assert found == Growth(block, "aten::empty", "body", steps + 10)


@pytest.mark.parametrize(
    "trace",
    [
        loop(3),  # a loss is kept for one more step
        loop(2, kept=2 * MIB),  # too few steps to tell
        loop(3, kept=2 * MIB, label="optimizer_state"),
        loop(3, late=2 * MIB),  # once, such as an average of the weights that begins in the second step
        loop(5, late=2 * MIB),
        *(loop(3, ahead=ahead, per_step=ahead) for ahead in (1, 2, 3)),  # a loader that fills its queue at once
        *(loop(5, ahead=ahead) for ahead in (1, 2, 3)),  # or step by step
    ],
)
def test_what_is_no_growth(trace: AllocationTrace) -> None:
    assert growth_of(trace, spare_bytes=0) is None


@pytest.mark.parametrize(("total", "fills"), [(None, True), (100, False), (111, False), (112, True)])
def test_growth_fills_the_gpu_within_a_training_that_is_long_enough(total: int | None, fills: bool) -> None:
    assert Growth(MIB, "aten::mul", "", 111).fills_within(total) is fills
    assert not Growth(512, "aten::mul", "", 40_000_000).fills_within(None)
