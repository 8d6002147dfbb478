"""Where the driver puts segments, as observed (see ``addresses.py``)."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from trainatomy.allocator.addresses import CONTEXT_RANGE_BYTES, TopDownReservations
from trainatomy.allocator.sizes import MIB


def test_reservations_go_down_and_are_filled_up() -> None:
    policy = TopDownReservations()
    first = policy.take(20 * MIB)
    assert first % (32 * MIB) == 0
    assert policy.take(16 * MIB) == first - 32 * MIB
    assert policy.take(16 * MIB) == first - 16 * MIB
    assert policy.take(120 * MIB) == first - 160 * MIB
    assert policy.take(2 * MIB) == first - 40 * MIB  # the lowest tail: that of the reservation of 128 MiB


def test_the_context_range_is_filled_first_once_kernels_are_loaded() -> None:
    policy = TopDownReservations()
    before = policy.take(32 * MIB)
    policy.kernels_loaded()
    first = policy.take(20 * MIB)
    assert first > before
    assert policy.take(32 * MIB) == first + 20 * MIB
    assert policy.take(2 * MIB) < before
    assert policy.take(CONTEXT_RANGE_BYTES) < before
    policy.kernels_loaded()
    assert policy.take(2 * MIB + 512) == first + 52 * MIB


def test_an_empty_reservation_is_used_again() -> None:
    policy = TopDownReservations()
    held = [policy.take(size * MIB) for size in (16, 16, 64)]
    policy.give_back(held[0], 16 * MIB)
    assert policy.take(20 * MIB) < held[2]
    policy.give_back(held[1], 16 * MIB)
    assert policy.take(20 * MIB) == held[0]


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 70)), max_size=80))
def test_ranges_never_overlap(steps: list[tuple[bool, int]]) -> None:
    policy = TopDownReservations()
    live: list[tuple[int, int]] = []
    for number, (takes, value) in enumerate(steps):
        if number == 30:
            policy.kernels_loaded()
        if takes or not live:
            size = 2 * value * MIB
            address = policy.take(size)
            assert all(address + size <= other or other + room <= address for other, room in live)
            live.append((address, size))
        else:
            policy.give_back(*live.pop(value % len(live)))
