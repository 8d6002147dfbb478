"""Samples of different lengths on several GPUs: each rank's batches, their memory, and waits for the longest batch."""

from __future__ import annotations

from typing import Any

import pytest
from spread import workload

from trainatomy.api import predict
from trainatomy.errors import WorkloadError
from trainatomy.reporters.subject_sentences import padding_of_lengths, worst_order
from trainatomy.simulator.lengths import EveryStep, simulate_lengths
from trainatomy.simulator.simulate import simulate, topology_of
from trainatomy.training.lengths import MOST_ORDERS, LengthBatch, Order, orders, replayed_orders, slowest_batches
from trainatomy.workload.schema import Workload

LENGTHS = {5: 3, 9: 3, 40: 4, 63: 3, 64: 4, 65: 3}
CASES: dict[str, Any] = {
    "ddp": {},
    "ddp view": {"gradient_as_bucket_view": True, "train": {"bf16": True}},
    "fsdp2": {
        "strategy": "fsdp2",
        "mp_policy": {"param_dtype": "bfloat16"},
        "train": {"gradient_checkpointing": True},
    },
    "trainer ddp": {"loop": "trainer", "train": {"bf16": True, "gradient_accumulation_steps": 2}},
    "trainer fsdp2": {"loop": "trainer", "train": {"fsdp": True, "bf16": True}},
}


def described(case: str = "ddp", **lengths: Any) -> Workload:
    settings = {"loop": "pytorch", "train": {}, **CASES[case]}
    loop, train = settings.pop("loop"), settings.pop("train")
    spec = {"histogram": LENGTHS, "orders": 1, **lengths}
    found = workload(loop, train, gpus=2, **settings)
    return found.replace({"data": {"lengths": spec}, "model.config.num_hidden_layers": 1, "steps": None})


@pytest.mark.parametrize("case", [case for case in CASES if case != "ddp"])
def test_the_stitched_epoch_of_each_rank_is_what_execution_writes(case: str) -> None:
    given = described(case)
    epochs = simulate_lengths(given, given.resolve_gpu(), operations=False)
    assert [order.rank for order in epochs.orders] == [0, 1]
    for order in epochs.orders:
        made = epochs.stitched(epochs.shapes(order), detailed=True).trace
        rank = topology_of(given, order.rank)
        run = simulate(
            given, given.resolve_gpu(), operations=False, steps=len(order.steps), watch=EveryStep, topology=rank
        )
        last = [mark.event for mark in run.trace.marks if mark.name == "step end"][-1]
        assert made.events == run.trace.events[:last]
        count = len(made.origins)
        assert made.origins == run.trace.origins[:count]
        assert made.labels == {number: label for number, label in run.trace.labels.items() if number < count}


def test_ranks_take_batches_or_samples_in_turn() -> None:
    """The Trainer's ranks take whole batches, those of a plain loop samples; together they take each sample once."""
    from accelerate.data_loader import BatchSamplerShard
    from torch.utils.data import BatchSampler, DistributedSampler, SequentialSampler

    lengths = dict.fromkeys(range(10, 26), 1)
    for case in ("trainer ddp", "ddp"):
        given = described(case, histogram=lengths).replace("train.train_sampling_strategy", "sequential")
        for order in orders(given):
            dealt = [batch.lengths for step in order.steps for batch in step]
            every = list(range(10, 26))
            if case == "ddp":
                own = list(DistributedSampler(every, 2, order.rank, shuffle=False))  # type: ignore[arg-type]
                wanted = [tuple(every[index] for index in own[place : place + 2]) for place in range(0, len(own), 2)]
            else:
                batches = BatchSampler(SequentialSampler(every), 2, drop_last=False)
                wanted = [tuple(every[index] for index in batch) for batch in BatchSamplerShard(batches, 2, order.rank)]
            assert dealt == wanted


def test_ranks_wait_for_the_longest_batch() -> None:
    short, long = (LengthBatch((size, size), size) for size in (10, 90))
    middle = LengthBatch((50, 50), 50)
    ranks = [Order(0, ((short, long), (middle, middle)), 0), Order(0, ((middle, middle), (short, long)), 1)]
    cost = {10: 1.0, 50: 5.0, 90: 8.0}

    def total(*, waits_in_step: bool) -> list[float]:
        (found,) = slowest_batches(ranks, lambda shape: cost[shape.length], waits_in_step=waits_in_step)
        return [sum(cost[batch.padded] for batch in step) for step in found.steps]

    assert total(waits_in_step=False) == [10.0, 10.0]
    assert total(waits_in_step=True) == [13.0, 13.0]


def test_the_prediction_is_that_of_the_fullest_rank_and_the_slowest() -> None:
    found = predict(described(orders=2), ranks=[1])
    one = predict(described(orders=2).replace({"parallel": {}}))
    assert found.lengths is not None and found.time is not None and one.time is not None and one.lengths is not None
    assert [(order.seed, order.rank) for order in found.lengths.orders] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert found.lengths.steps == one.lengths.steps // 2
    assert found.memory.peak_reserved_bytes == max(order.peak_reserved_bytes for order in found.lengths.orders)
    assert found.lengths.waiting_share > 0 == one.lengths.waiting_share
    assert found.time.communication is not None
    total = found.time.communication.total_tokens_per_second
    assert total == pytest.approx(2 * found.lengths.tokens_per_step / found.time.step_seconds)
    assert found.memory.components["communication_buffers"] > 0
    assert list(found.ranks) == [0, 1] and found.rank == found.lengths.worst_rank
    for rank, one_of in found.ranks.items():
        peaks = [order.peak_reserved_bytes for order in found.lengths.orders if order.rank == rank]
        assert one_of.memory.peak_reserved_bytes == max(peaks)
    assert any("shards of rank 0" in note for note in found.notes)
    assert worst_order(found.lengths).startswith(
        "2 orders of 2 ranks, random; memory above is that of the worst, seed "
    )
    assert worst_order(one.lengths).startswith("2 orders, random; memory above is that of the worst, seed ")
    assert "ranks wait" in padding_of_lengths(found.lengths) and "ranks" not in padding_of_lengths(one.lengths)


def test_what_lengths_are_not_simulated_with_is_refused() -> None:
    message = r"data\.lengths: are simulated on several GPUs with DDP and FSDP2"
    refused: list[dict[str, Any]] = [{"strategy": "fsdp1"}, {"strategy": "zero1"}, {"tp_size": 2}, {"pp_size": 2}]
    for parallel in refused:
        with pytest.raises(WorkloadError, match=message):
            workload(gpus=2, **parallel).replace({"data": {"lengths": LENGTHS}})
    with pytest.raises(WorkloadError, match=message):
        fsdp1 = {"fsdp": True, "fsdp_config": {"version": 1}}
        workload("trainer", fsdp1, gpus=2).replace({"data": {"lengths": LENGTHS}})


def test_some_of_many_ranks_are_replayed() -> None:
    every = [Order(seed, (), rank) for seed in range(2) for rank in range(64)]
    chosen = replayed_orders(every, wanted=[5])
    assert len(chosen) == MOST_ORDERS + 2
    assert {order.rank for order in chosen} == {5, *range(0, 64, 8)}
    assert len(replayed_orders(every[:4])) == 4
