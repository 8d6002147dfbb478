"""Addresses of segments as observed (see ``segments.py``)."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from trainatomy.allocator import AllocatorSettings, CachingAllocator
from trainatomy.allocator.blocks import MIB
from trainatomy.allocator.segments import NewestFirst, Scattered


def without_spare() -> tuple[NewestFirst, int]:
    """Return a policy whose first two reservations are full, and the address below which it makes new ones."""
    policy = NewestFirst()
    policy.take(24 * MIB)
    return policy, policy.take(2 * MIB) - 414 * MIB


def test_the_first_segments_lie_in_what_the_context_left() -> None:
    policy = NewestFirst()
    small, spare = policy.take(2 * MIB), policy.take(20 * MIB)
    assert spare == small + 74 * MIB
    assert policy.take(2 * MIB) == spare + 20 * MIB
    assert policy.take(20 * MIB) == small - 414 * MIB - 32 * MIB


def test_reservations_go_downwards_and_are_filled() -> None:
    policy, top = without_spare()
    assert policy.take(20 * MIB) == top - 32 * MIB
    assert policy.take(16 * MIB) == top - 64 * MIB
    assert policy.take(16 * MIB) == top - 48 * MIB
    assert policy.take(120 * MIB) == top - 192 * MIB


def test_the_newest_reservation_with_space_is_used() -> None:
    policy, _ = without_spare()
    high, low = policy.take(64 * MIB), policy.take(20 * MIB)
    policy.give_back(high, 64 * MIB)
    assert policy.take(20 * MIB) == high + 32 * MIB  # a new reservation, above the older one
    assert policy.take(12 * MIB) == high + 52 * MIB
    assert policy.take(12 * MIB) == low + 20 * MIB


def test_the_context_range_opens_with_the_kernels_and_is_older_than_any_other() -> None:
    policy, top = without_spare()
    before = policy.take(20 * MIB)
    policy.kernels_loaded()  # 26 MiB below, 10 MiB behind the 20
    assert policy.take(2 * MIB) == before - 32 * MIB + 26 * MIB
    assert policy.take(12 * MIB) == top
    policy.kernels_loaded()
    assert policy.take(20 * MIB) == top + 12 * MIB


def test_each_handle_allocates_64_mib_and_the_first_loads_kernels() -> None:
    policy, top = without_spare()
    policy.kernels_loaded()  # 26 MiB below, 10 MiB at the start of the context's range
    policy.handle_created()
    assert policy.take(2 * MIB) == top - 32 * MIB + 28 * MIB
    assert policy.take(32 * MIB) == top + 74 * MIB
    policy.handle_created()
    assert policy.take(2 * MIB) == top - 32 * MIB + 30 * MIB
    assert policy.take(32 * MIB) == top + 170 * MIB


def test_an_empty_reservation_is_used_again() -> None:
    policy, _ = without_spare()
    held = [policy.take(size * MIB) for size in (16, 16, 64)]
    policy.give_back(held[0], 16 * MIB)
    assert policy.take(20 * MIB) < held[2]
    policy.give_back(held[1], 16 * MIB)
    assert policy.take(20 * MIB) == held[0]


def test_scattered_reservations_lie_above_others_now_and_then() -> None:
    policy, lowest, above = Scattered(0), 0, 0
    for number in range(1000):
        address = policy.take(32 * MIB)
        above += number > 0 and address > lowest
        lowest = address if number == 0 else min(lowest, address)
    assert 150 < above < 210


@given(
    st.lists(st.tuples(st.booleans(), st.integers(1, 70)), max_size=80),
    st.one_of(st.none(), st.integers(0, 5)),
)
def test_ranges_never_overlap(steps: list[tuple[bool, int]], seed: int | None) -> None:
    policy = NewestFirst() if seed is None else Scattered(seed)
    live: list[tuple[int, int]] = []
    for number, (takes, value) in enumerate(steps):
        if number == 30:
            policy.kernels_loaded()
            policy.handle_created()
        if takes or not live:
            size = 2 * value * MIB
            address = policy.take(size)
            assert all(address + size <= other or other + room <= address for other, room in live)
            live.append((address, size))
        else:
            policy.give_back(*live.pop(value % len(live)))


def test_blocks_of_trainings_that_fit_nowhere_are_found_again() -> None:
    """300 TiB, more than the 47 bits of a driver's addresses hold."""
    allocator = CachingAllocator(AllocatorSettings())
    for _ in range(3):
        blocks = [allocator.malloc(100 * 2**40) for _ in range(3)]
        for block in blocks:
            allocator.free(block)
    assert allocator.peak_reserved_bytes == 300 * 2**40
