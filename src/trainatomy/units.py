"""Formatting of bytes, shares, counts and seconds, in one place.  KiB, MiB, GiB and TiB are powers of 1024."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

KIB = 1024
MIB = 1024**2
GIB = 1024**3
TIB = 1024**4


CONTROLS = frozenset(map(chr, (*range(32), *range(127, 160)))) - {"\n", "\t"}
"""Characters that a terminal obeys instead of showing them: escapes begin with one, in one byte or in two."""
_WITHOUT_CONTROLS = dict.fromkeys(map(ord, CONTROLS))


def printable(text: str) -> str:
    """Return a text without control characters: names, modules and errors are foreign, and a terminal obeys them."""
    return text.translate(_WITHOUT_CONTROLS)


def human_bytes(count: int) -> str:
    """Format a size: ``9797894144`` -> ``9.12 GiB``.

    Three digits from 1000 MiB on, whole MiB from 10 MiB on, exact below 1 KiB.
    """
    sign, size = ("-" if count < 0 else ""), abs(count)
    if size < KIB:
        return f"{sign}{size} B"
    if size < MIB:
        return f"{sign}{size / KIB:.1f} KiB"
    if size < 1000 * MIB:
        return f"{sign}{size / MIB:.{1 if size < 10 * MIB else 0}f} MiB"
    unit, name = (GIB, "GiB") if size < 1000 * GIB else (TIB, "TiB")
    return f"{sign}{size / unit:.{2 if size < 10 * unit else 1}f} {name}"


_UNITS = {"": 1, "B": 1, "KiB": KIB, "MiB": MIB, "GiB": GIB, "TiB": TIB}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)")


def bytes_in(text: str) -> int | None:
    """Return the bytes of ``80 GiB``; a number without a unit is bytes already. None where it is no size."""
    found = _SIZE.fullmatch(text.strip().replace("_", ""))
    if found is None or found[2] not in _UNITS or (not found[2] and "." in found[1]):
        return None
    return round(float(found[1]) * _UNITS[found[2]]) if found[2] else int(found[1])


def mebibytes(count: int) -> int:
    """Return whole MiB, rounded down, as ``nvidia-smi`` and the guides print them (under the name MB or MiB)."""
    return count // MIB


def exact_bytes(count: int) -> str:
    """Format a size to the byte: ``9797894144`` -> ``9,797,894,144``."""
    return f"{count:,}"


def difference(count: int) -> str:
    """Format a difference of sizes with its sign: ``+1.30 GiB``, ``-300 MiB``, ``0``."""
    return "0" if count == 0 else ("+" if count > 0 else "") + human_bytes(count)


def percent(part: float, whole: float, digits: int = 1) -> str:
    """Format a share: ``percent(1, 8)`` -> ``12.5 %``; ``-`` if ``whole`` is 0."""
    return "-" if whole == 0 else f"{100 * part / whole:.{digits}f} %"


def signed_percent(part: float, whole: float, digits: int = 2) -> str:
    """Format a relative difference with its sign: ``+0.31 %``; ``-`` if ``whole`` is 0."""
    return "-" if whole == 0 else f"{100 * part / whole:+.{digits}f} %"


def count_of(number: int) -> str:
    """Format a count in powers of 1000 with three significant digits: ``334000000`` -> ``334 M``."""
    return _in_powers(number, "kMBT")


def _in_powers(number: int, suffixes: str) -> str:
    """Format a number with three significant digits and the suffix of a power of 1000."""
    for power in range(len(suffixes), 0, -1):
        if number >= 1000**power:
            value = number / 1000**power
            return f"{value:,.{2 if value < 10 else 1 if value < 100 else 0}f} {suffixes[power - 1]}"
    return str(number)


def many(number: int, noun: str) -> str:
    """Format a count with its noun, whose plural takes an s: ``1 step``, ``1,294 kernels``."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def by(sides: Sequence[int]) -> str:
    """Write sizes of several dimensions: ``336 × 448``."""
    return " × ".join(map(str, sides))


def flop_of(number: float) -> str:
    """Format a number of FLOP with SI prefixes, three significant digits: ``3.35e11`` -> ``335 G``."""
    return _in_powers(round(number), "kMGTPE")


def whole_flop(number: float) -> str:
    """Format a number of FLOP with its unit: ``3.35e11`` -> ``335 GFLOP``."""
    text = flop_of(number)
    return f"{text}FLOP" if text[-1].isalpha() else f"{text} FLOP"


def rate(number: float) -> str:
    """Format samples or tokens per second: ``0.594`` -> ``0.59``, ``31.68`` -> ``31.7``, ``16229`` -> ``16,229``."""
    if number < 0.1:
        return f"{number:.2g}"
    return f"{number:,.{2 if number < 10 else 1 if number < 1000 else 0}f}"


def seconds(duration: float) -> str:
    """Format a duration with a unit that suits it.

    ``310 µs``, ``4.2 ms``, ``42 ms``, ``2.1 s``; from 100 s on in minutes (``9 min 59 s``), from an hour on in hours
    (``2 h 05 min``), from two days on in days (``3.4 days``).
    """
    if duration < 0.0009995:
        return f"{duration * 1e6:.0f} µs"
    if duration < 0.9995:
        return f"{duration * 1000:.{1 if duration < 0.00995 else 0}f} ms"
    if duration < 99.95:
        return f"{duration:.1f} s"
    minutes, rest = divmod(round(duration), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    hours, minutes = divmod(round(duration / 60), 60)
    return f"{hours} h {minutes:02d} min" if hours < 48 else f"{duration / 86400:.1f} days"


def times(count: int) -> str:
    """Format how often something happens: ``once``, ``twice``, ``3 times``."""
    return {1: "once", 2: "twice"}.get(count, f"{count:,} times")
