"""The one place that formats bytes, shares, counts and seconds. KiB, MiB and GiB are powers of 1024."""

from __future__ import annotations

KIB = 1024
MIB = 1024**2
GIB = 1024**3


def human_bytes(count: int) -> str:
    """``9797894144`` -> ``9.12 GiB``: three digits above 1 GiB, whole MiB above 10 MiB, exact below 1 KiB."""
    sign, size = ("-" if count < 0 else ""), abs(count)
    if size < KIB:
        return f"{sign}{size} B"
    if size < MIB:
        return f"{sign}{size / KIB:.1f} KiB"
    if size < 1000 * MIB:
        return f"{sign}{size / MIB:.{1 if size < 10 * MIB else 0}f} MiB"
    return f"{sign}{size / GIB:.{2 if size < 10 * GIB else 1}f} GiB"


def mebibytes(count: int) -> int:
    """Whole MiB, rounded down, as ``nvidia-smi`` and the notebook print them (both call them MB or MiB)."""
    return count // MIB


def exact_bytes(count: int) -> str:
    """``9797894144`` -> ``9,797,894,144``."""
    return f"{count:,}"


def difference(count: int) -> str:
    """A difference with its sign: ``+1.3 GiB``, ``-300 MiB``, ``0``."""
    return "0" if count == 0 else ("+" if count > 0 else "") + human_bytes(count)


def percent(part: float, whole: float, digits: int = 1) -> str:
    """``percent(1, 8)`` -> ``12.5 %``; ``-`` where there is no whole."""
    return "-" if whole == 0 else f"{100 * part / whole:.{digits}f} %"


def signed_percent(part: float, whole: float, digits: int = 2) -> str:
    """A relative difference with its sign: ``+0.31 %``."""
    return "-" if whole == 0 else f"{100 * part / whole:+.{digits}f} %"


def count_of(number: int) -> str:
    """``334000000`` -> ``334 M``; parameters and the like, in powers of 1000, three significant digits."""
    for size, suffix in ((10**12, "T"), (10**9, "B"), (10**6, "M"), (10**3, "k")):
        if number >= size:
            value = number / size
            return f"{value:.{2 if value < 10 else 1 if value < 100 else 0}f} {suffix}"
    return str(number)


def many(number: int, noun: str) -> str:
    """``1 step``, ``1,294 kernels``: a count with its noun, whose plural takes an s."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def flop_of(number: float) -> str:
    """``3.35e11`` -> ``335 G``: as ``count_of``, with the prefixes of units."""
    return count_of(round(number)).replace("B", "G")


def rate(number: float) -> str:
    """``0.594`` -> ``0.59``, ``31.68`` -> ``31.7``, ``16229`` -> ``16,229``: samples or tokens in a second."""
    if number < 0.1:
        return f"{number:.2g}"
    return f"{number:,.{2 if number < 10 else 1 if number < 1000 else 0}f}"


def seconds(duration: float) -> str:
    """``0.00031`` -> ``310 µs``; ``0.0042`` -> ``4.2 ms``; ``0.0421`` -> ``42 ms``; ``2.13`` -> ``2.1 s``."""
    if duration < 0.0009995:
        return f"{duration * 1e6:.0f} µs"
    if duration < 0.9995:
        return f"{duration * 1000:.{1 if duration < 0.00995 else 0}f} ms"
    return f"{duration:.1f} s"


def times(count: int) -> str:
    """``once``, ``twice``, ``3 times``."""
    return {1: "once", 2: "twice"}.get(count, f"{count} times")
