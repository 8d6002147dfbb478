"""Formatting of sizes, durations, counts and rates."""

from __future__ import annotations

import pytest

from trainatomy import units

GIB = 1024**3


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1536, "1.5 KiB"),
        (8_519_680, "8.1 MiB"),
        (33_554_432, "32 MiB"),
        (999 * 1024**2, "999 MiB"),
        (1000 * 1024**2, "0.98 GiB"),
        (9_797_894_144, "9.12 GiB"),
        (150_109_880_320, "139.8 GiB"),
        (999 * GIB, "999.0 GiB"),
        (11_214_000_000_000, "10.2 TiB"),
        (-2 * GIB, "-2.00 GiB"),
    ],
)
def test_human_bytes(count: int, text: str) -> None:
    assert units.human_bytes(count) == text


@pytest.mark.parametrize(
    ("count", "text"), [(334_000_000, "334 M"), (1_100_000_000, "1.10 B"), (405 * 10**9, "405 B"), (12, "12")]
)
def test_counts_are_in_powers_of_1000(count: int, text: str) -> None:
    assert units.count_of(count) == text


@pytest.mark.parametrize(
    ("duration", "text"),
    [
        (0.0000124, "12 µs"),
        (0.00031, "310 µs"),
        (0.0009996, "1.0 ms"),
        (0.0042, "4.2 ms"),
        (0.00996, "10 ms"),
        (0.0421, "42 ms"),
        (0.9996, "1.0 s"),
        (2.13, "2.1 s"),
        (99.94, "99.9 s"),
        (99.96, "1 min 40 s"),
        (599.3, "9 min 59 s"),
        (3599.6, "1 h 00 min"),
        (7530.0, "2 h 06 min"),
        (3.4 * 86400, "3.4 days"),
    ],
)
def test_durations_have_a_unit_that_suits_them(duration: float, text: str) -> None:
    assert units.seconds(duration) == text


@pytest.mark.parametrize(
    ("number", "text"), [(0.0123, "0.012"), (0.594, "0.59"), (31.68, "31.7"), (2699.9, "2,700"), (16229.4, "16,229")]
)
def test_slow_rates_have_enough_digits(number: float, text: str) -> None:
    assert units.rate(number) == text


def test_one_is_singular() -> None:
    assert [units.many(number, "step") for number in (0, 1, 1294)] == ["0 steps", "1 step", "1,294 steps"]


def test_flop_have_the_prefixes_of_units() -> None:
    assert units.flop_of(3.35e11) == "335 G"
    assert units.flop_of(2.1965e13) == "22.0 T"
    assert [units.flop_of(2.7118e16), units.flop_of(4.2e18)] == ["27.1 P", "4.20 E"]
    assert [units.whole_flop(0), units.whole_flop(3.35e11)] == ["0 FLOP", "335 GFLOP"]


def test_a_mebibyte_is_rounded_down_as_nvidia_smi_does() -> None:
    assert units.mebibytes(2 * 1024**2 - 1) == 1


def test_signs() -> None:
    assert units.difference(GIB) == "+1.00 GiB"
    assert units.difference(-GIB) == "-1.00 GiB"
    assert units.difference(0) == "0"
    assert units.signed_percent(-1, 100) == "-1.00 %"
    assert units.percent(1, 0) == "-"
