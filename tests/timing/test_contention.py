"""Kernels beside collectives: timelines worked out by hand, and what NCCL takes on machines that are known."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise

import pytest

from trainatomy.catalog.gpus import find_gpu
from trainatomy.catalog.links import links_of
from trainatomy.catalog.machines import reference_host
from trainatomy.operators.cost.communication import Group, Taken, channels, taken_by
from trainatomy.results.operations import Array, Call, Operation, Operations
from trainatomy.timing.contention import Contention, Windows, contention_in
from trainatomy.timing.cost_model import cost_model_of, kernel_cost
from trainatomy.timing.host_costs import cpu_costs
from trainatomy.timing.one_stream import StepTimeline
from trainatomy.timing.timeline import LaunchCosts, replay_step

GIB = 2**30
COSTS = replace(cpu_costs(reference_host().microseconds), launch_delay=0.0, read=0.0)
VALUE = Array((), (), "float32", 4, 0)
KERNEL = Call("aten::mul", (VALUE,), (VALUE,))
REDUCE = KERNEL._replace(name="nccl::all_reduce")
A_FIFTH = Contention(100, 1e12, {1: Taken(20, 0.25e12)}, [(0.0, 1.0)] * 2)
"""A collective takes a fifth of the multiprocessors and a quarter of the bandwidth; kernels are bound by arithmetic."""


def replay(
    *rows: tuple[str, float],
    contention: Contention | None,
    dependencies: dict[int, tuple[int, ...]] | None = None,
) -> StepTimeline:
    """Replay kernels (``kernel``) and collectives (``reduce``, on a stream of their own) of so many seconds."""
    names = {"kernel": (0, 0), "reduce": (1, -1), "other reduce": (1, -2)}
    described = [
        Operation(0, 2 * place + names[kind][0], "backward", "", 0, 1, stream=names[kind][1])
        for place, (kind, _) in enumerate(rows)
    ]
    calls = [KERNEL, REDUCE] * len(rows)
    if contention is not None:
        taken = dict.fromkeys(range(1, len(calls), 2), contention.taken[1])
        contention = replace(contention, taken=taken, shares=list(contention.shares) * len(rows))
    kernels = [(rows[place // 2][1], 1) for place in range(len(calls))]
    step = Operations(calls, described, dependencies=dependencies or {})
    loop = {"step": 0.0, "micro_step": 0.0}
    return replay_step(step, kernels, LaunchCosts([0.0] * len(rows), COSTS, loop), contention=contention)


def test_a_kernel_beside_a_collective_does_its_work_on_what_is_left() -> None:
    found = replay(("reduce", 100.0), ("kernel", 40.0), contention=A_FIFTH)
    assert found.slowed_seconds == pytest.approx(40 / 0.8 - 40)
    assert found.phase_gpu_seconds["backward"] == pytest.approx(100 + 50)
    assert replay(("reduce", 100.0), ("kernel", 40.0), contention=None).slowed_seconds == 0


def test_a_kernel_that_moves_data_gets_the_bandwidth_that_is_left() -> None:
    moving = replace(A_FIFTH, shares=[(1.0, 0.0)] * 2)
    found = replay(("reduce", 100.0), ("kernel", 30.0), contention=moving)
    assert found.slowed_seconds == pytest.approx(30 / 0.75 - 30)


def test_a_kernel_is_slowed_only_until_the_collective_is_over() -> None:
    """In 10 s beside it 8 s of work are done, and the rest at full speed; it waits for the step before."""
    found = replay(("reduce", 10.0), ("kernel", 40.0), contention=A_FIFTH, dependencies={0: (1,)})
    assert found.slowed_seconds == pytest.approx(2.0)
    assert found.seconds == pytest.approx(42.0)


def test_a_kernel_is_slowed_from_when_the_collective_begins() -> None:
    """The collective waits for the first kernel, and runs beside the second, which was launched before it."""
    found = replay(("kernel", 10.0), ("kernel", 40.0), ("reduce", 20.0), contention=A_FIFTH, dependencies={2: (0,)})
    assert found.slowed_seconds == pytest.approx(20 * 0.2)
    assert found.seconds == pytest.approx(50 + 4)


def test_a_copy_over_pcie_needs_no_multiprocessors() -> None:
    gpu = find_gpu("h200")
    host, here = Array((GIB,), (1,), "uint8", 1, 0, on_host=True), Array((GIB,), (1,), "uint8", 1, 1)
    step = Operations(
        [
            Call("aten::copy_", (here, host), (here,)),
            Call("aten::copy_", (here, here), (here,)),
            nccl("reduce", GIB, 2),
        ],
        [],
    )
    cost_model = cost_model_of(gpu, links=links_of(gpu, 2))
    found = contention_in(step, [kernel_cost(call, cost_model) for call in step.calls], cost_model.chip)
    assert found is not None
    assert found.slowdown(0, found.taken[2]) == 1
    assert found.slowdown(1, found.taken[2]) > 1


def test_kernels_after_one_that_was_slowed_begin_later() -> None:
    rows = (("kernel", 10.0), ("kernel", 20.0), ("kernel", 20.0), ("reduce", 30.0))
    found = replay(*rows, contention=A_FIFTH, dependencies={3: (0,)})
    assert found.seconds == pytest.approx(50 + 30 * 0.2)


def test_nothing_changes_where_nothing_overlaps() -> None:
    rows, waits = (("kernel", 10.0), ("reduce", 20.0), ("kernel", 5.0)), {1: (0,), 2: (1,)}
    found, before = (replay(*rows, contention=each, dependencies=waits) for each in (A_FIFTH, None))
    assert found == before
    assert found.seconds == pytest.approx(35.0) and found.slowed_seconds == 0


def test_two_collectives_at_once_take_what_both_take() -> None:
    rows = (("reduce", 100.0), ("other reduce", 100.0), ("kernel", 30.0))
    found = replay(*rows, contention=A_FIFTH)
    assert found.slowed_seconds == pytest.approx(30 / 0.6 - 30)


def test_the_more_is_taken_the_longer_it_takes() -> None:
    rows, waits = (("reduce", 100.0), ("kernel", 80.0), ("kernel", 70.0)), {0: (2,)}
    times = []
    for count in (0, 8, 16, 32, 50, 99):
        contention = replace(A_FIFTH, taken={1: Taken(count, 0.0)})
        times.append(replay(*rows, contention=contention, dependencies=waits).seconds)
    assert times == pytest.approx([150.0, 158.0, 166.0, 182.0, 200.0, 200.0]), "a kernel keeps half of them"


def test_windows_hold_what_runs_at_each_instant() -> None:
    """Whatever collectives overlap, a kernel of arithmetic is as slow as the multiprocessors that are taken make it."""
    draw = random.Random(5)
    for _ in range(50):
        spans = [(begin := draw.uniform(0, 50), begin + draw.uniform(0, 20)) for _ in range(6)]
        windows = Windows(Contention(100, 1.0, {0: Taken(10, 0.0)}, [(0.0, 1.0)] * 2))
        for begin, end in sorted(spans) if draw.random() < 0.5 else spans:
            windows.add(0, begin, end)
        begin, seconds = draw.uniform(0, 40), draw.uniform(1, 30)
        end = windows.end_of(1, begin, seconds)
        moments = sorted({begin, end, *(min(max(at, begin), end) for span in spans for at in span)})
        done = sum(
            (later - at) * (1 - 0.1 * min(sum(one[0] <= at and later <= one[1] for one in spans), 5))
            for at, later in pairwise(moments)
        )
        assert done == pytest.approx(seconds)


def nccl(kind: str, size: int, ranks: int, nodes: int = 1) -> Call:
    array = Array((size // 4,), (1,), "float32", 4, 0)
    numbers = (("bytes", str(size)), ("ranks", str(ranks)), ("nodes", str(nodes)))
    return Call(f"nccl::{kind}", (array,), (array,), numbers=numbers)


@pytest.mark.parametrize(
    ("gpu", "per_node", "nodes", "link", "expected"),
    [
        ("h200", 2, 1, None, 24),  # as NCCL's logs say of rings over NVLink 4
        ("a100", 8, 1, None, 24),  # github.com/NVIDIA/nccl/issues/1225: 24 blocks for 12 links
        ("a100", 8, 8, "infiniband-hdr", 16),  # issues/689: 16 with eight network cards
        ("a100", 8, 8, "ethernet-100", 2),  # and 2 with one
        ("h200", 8, 8, "infiniband-ndr", 16),
        ("h200", 4, 8, "infiniband-ndr", 16),  # 8, doubled since Hopper
        ("a100", 8, 2, "efa-100", 8),  # four cards in a machine
    ],
)
def test_channels_of_known_machines(gpu: str, per_node: int, nodes: int, link: str | None, expected: int) -> None:
    group = Group(links_of(find_gpu(gpu), per_node, nodes, None, link), per_node * nodes, nodes)
    assert channels("all_gather" if gpu == "a100" or nodes > 1 else "reduce", GIB, group) == expected


def test_multicast_and_small_messages_take_fewer() -> None:
    group = Group(links_of(find_gpu("h200"), 8), 8, 1)
    assert channels("all_reduce", GIB, group) == 16
    pair = Group(links_of(find_gpu("h200"), 2), 2, 1)
    assert [channels("all_gather", size, pair) for size in (4, 2**16, 2**18, 2**20)] == [1, 2, 8, 24]


def test_what_passes_through_the_memory() -> None:
    """An all-gather of 1 GiB on two GPUs: half of it passes, is written once and read once."""
    chip = cost_model_of(find_gpu("h200"), links=links_of(find_gpu("h200"), 2)).chip
    found = taken_by(nccl("all_gather", GIB, 2), 2e-3, chip)
    assert found == (24, pytest.approx(2 * GIB / 2 / 2e-3))
    reducing = taken_by(nccl("all_reduce", GIB, 2), 4e-3, chip)
    assert reducing is not None and reducing.bytes_per_second == pytest.approx(3 * GIB / 4e-3)
    assert taken_by(KERNEL, 1.0, chip) is None
    assert taken_by(nccl("all_gather", GIB, 2)._replace(name="peer::copy"), 1.0, chip) is None


def test_products_keep_the_multiprocessors_that_are_left() -> None:
    """Beside 24 blocks that copied, products on an H200 took 1.22 to 1.37 times as long."""
    a, b, out = (Array((4096, 4096), (4096, 1), "bfloat16", 2, storage) for storage in range(3))
    step = Operations([Call("aten::mm", (a, b), (out,), flop=2 * 4096**3), nccl("all_gather", GIB, 2)], [])
    slowdowns = []
    for name in ("h200", "a100"):
        gpu = find_gpu(name)
        cost_model = cost_model_of(gpu, links=links_of(gpu, 2))
        found = contention_in(step, [kernel_cost(call, cost_model) for call in step.calls], cost_model.chip)
        assert found is not None
        slowdowns.append(found.slowdown(0, found.taken[1]))
    assert slowdowns == [pytest.approx(132 / (132 - 24)), pytest.approx(108 / (108 - 24))]


def test_one_gpu_has_no_contention() -> None:
    cost_model = cost_model_of(find_gpu("h200"))
    step = Operations([KERNEL, nccl("all_gather", GIB, 2)], [])
    assert contention_in(step, [kernel_cost(call, cost_model) for call in step.calls], cost_model.chip) is None
