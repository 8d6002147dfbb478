"""Epochs of several ranks whose batches differ in length: the ones that are replayed, and waits for the slowest."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from statistics import fmean

from trainatomy.training.lengths import BatchShape, Order

MOST_ORDERS = 16
"""Orders, each of a rank, that are replayed; with more ranks, every n-th stands for the others."""


def replayed_orders(orders: Sequence[Order], wanted: Collection[int] = ()) -> list[Order]:
    """Return the orders whose memory is replayed: those of all ranks, or of every n-th rank and those ``wanted``."""
    ranks, seeds = max(order.rank for order in orders) + 1, len({order.seed for order in orders})
    apart = -(-ranks * seeds // max(MOST_ORDERS, seeds))
    return [order for order in orders if order.rank % apart == 0 or order.rank in wanted]


def slowest_batches(
    orders: Sequence[Order], cost: Callable[[BatchShape], float], *, waits_in_step: bool
) -> tuple[Order, ...]:
    """Return an order for each seed with the batches that decide how long its steps take.

    Ranks wait for the slowest one: with DDP at the end of a step, with FSDP in each micro-batch.

    Args:
        orders: The orders of all ranks.
        cost: How long a step takes whose batches have a shape.
        waits_in_step: Whether they wait in each micro-batch.
    """
    found = []
    for seed in dict.fromkeys(order.seed for order in orders):
        ranks = [order.steps for order in orders if order.seed == seed]
        steps = []
        for of_ranks in zip(*ranks, strict=True):
            if waits_in_step:
                micro = zip(*of_ranks, strict=True)
                steps.append(tuple(max(batches, key=lambda batch: cost(batch.shape)) for batches in micro))
            else:
                steps.append(max(of_ranks, key=lambda step: sum(cost(batch.shape) for batch in step)))
        found.append(Order(seed, tuple(steps)))
    return tuple(found)


def waiting_share(orders: Sequence[Order], slowest: Sequence[Order], cost: Callable[[BatchShape], float]) -> float:
    """Return the share of a step's time in which a rank waits for another, in the mean."""

    def spent(order: Order) -> float:
        return sum(cost(batch.shape) for step in order.steps for batch in step)

    return max(0.0, 1 - fmean(map(spent, orders)) / fmean(map(spent, slowest)))


def first_occurrences(orders: Sequence[Order]) -> float:
    """Return how often a shape occurs for the first time in an epoch, in the mean of the orders.

    What several ranks meet in the same micro-batch counts once, because they meet it side by side.
    """
    found = []
    for seed in dict.fromkeys(order.seed for order in orders):
        ranks = [order.steps for order in orders if order.seed == seed]
        known: list[set[tuple[int, int, bool]]] = [set() for _ in ranks]
        count = 0
        for of_ranks in zip(*ranks, strict=True):
            for batches in zip(*of_ranks, strict=True):
                shapes = [batch.shape[:3] for batch in batches]
                count += any(shape not in before for shape, before in zip(shapes, known, strict=True))
                for shape, before in zip(shapes, known, strict=True):
                    before.add(shape)
        found.append(count)
    return fmean(found)
