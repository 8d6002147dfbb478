"""One place formats sizes."""

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


def test_a_mebibyte_is_rounded_down_as_nvidia_smi_does() -> None:
    assert units.mebibytes(2 * 1024**2 - 1) == 1


def test_signs() -> None:
    assert units.difference(GIB) == "+1.00 GiB"
    assert units.difference(-GIB) == "-1.00 GiB"
    assert units.difference(0) == "0"
    assert units.signed_percent(-1, 100) == "-1.00 %"
    assert units.percent(1, 0) == "-"
