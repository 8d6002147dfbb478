"""Settings of the allocator, as written in ``PYTORCH_ALLOC_CONF`` (or ``PYTORCH_CUDA_ALLOC_CONF``).

Source: c10/core/AllocatorConfig.cpp and c10/cuda/CUDAAllocatorConfig.h, torch 2.9-2.15.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import TYPE_CHECKING, Final

from trainatomy.allocator.blocks import LARGE_SEGMENT_BYTES, MIB, OWN_SEGMENT_BYTES
from trainatomy.catalog.versions import first_release_with, version_text
from trainatomy.errors import WorkloadError

if TYPE_CHECKING:
    from collections.abc import Callable

ROUNDUP_INTERVALS: Final = 16
"""Number of intervals between powers of two: from 1 MiB, 2 MiB, ... up to 32 GiB and more."""

WITHOUT_EFFECT: Final = frozenset({
    "backend", "release_lock_on_cudamalloc", "release_lock_on_hipmalloc", "graph_capture_record_stream_reuse",
    "pinned_use_cuda_host_register", "pinned_use_hip_host_register", "pinned_num_register_threads",
    "pinned_use_background_threads", "pinned_reserve_segment_size_mb", "pinned_max_round_threshold_mb",
    "pinned_max_cached_size_mb", "pinned_free_catch_all", "throw_on_cudamalloc_oom", "expandable_segments_reserve",
    "expandable_segments_reserve_by_class",
})  # fmt: skip
"""Settings that do not change the memory of the GPU (``backend``: only ``native`` is accepted).

``throw_on_cudamalloc_oom`` decides which error a full GPU raises; the two reserves, how many addresses a segment that
grows may have.
"""


@dataclass(frozen=True, slots=True)
class AllocatorSettings:
    """Settings of the caching allocator; the defaults are PyTorch's.

    Attributes:
        expandable_segments: True if segments grow page by page.
        max_split_size_bytes: Largest block that is split, None for no limit.
        max_non_split_rounding_bytes: Largest excess of a block that is not split, None for one large segment.
        roundup_power2_divisions: Divisions of each interval between powers of two; empty if off.
        garbage_collection_threshold: Share of the allowed memory above which cached blocks are released.  As in
            PyTorch, it takes effect only with a ``per_process_memory_fraction`` below 1.
        per_process_memory_fraction: Share of the GPU's memory that the process may reserve.
        large_segment_size_mb: Segment for requests of 1 to 10 MiB; a setting since torch 2.13.
        torch_version: Version of PyTorch that is simulated.
    """

    expandable_segments: bool = False
    max_split_size_bytes: int | None = None
    max_non_split_rounding_bytes: int | None = None
    roundup_power2_divisions: tuple[int, ...] = ()
    garbage_collection_threshold: float | None = None
    per_process_memory_fraction: float = 1.0
    large_segment_size_mb: int = LARGE_SEGMENT_BYTES // MIB
    torch_version: tuple[int, int] = (2, 13)

    @property
    def refer_to_device(self) -> bool:
        """True if what the allocator does depends on the memory of the GPU, where there is enough of it."""
        return self.expandable_segments or self.per_process_memory_fraction < 1.0

    @property
    def large_segment_bytes(self) -> int:
        """Size of the segment for requests of 1 to 10 MiB, and of the page of a large expandable segment."""
        return self.large_segment_size_mb * MIB

    @classmethod
    def parse(cls, text: str, torch_version: tuple[int, int]) -> AllocatorSettings:
        """Parse a string such as ``expandable_segments:True,max_split_size_mb:128``.

        Raises:
            WorkloadError: An option is unknown to this version, or has an invalid value.
        """
        settings = cls(torch_version=torch_version)
        added = {name: first_release_with("allocator_options", name) for name in {*_OPTIONS, *WITHOUT_EFFECT}}
        known = {name for name, since in added.items() if since is None or since <= torch_version}
        for name, value in _pairs(text):
            if name not in known:
                raise WorkloadError(_unknown(name, known, torch_version), key="allocator")
            if name in WITHOUT_EFFECT:
                _check_backend(name, value)
            else:
                settings = _OPTIONS[name](settings, name, value)
        settings._check_bounds()
        return settings

    def _check_bounds(self) -> None:
        """Check that sizes are at least one large segment.

        Source: ``parseMaxSplitSize`` and ``parseMaxNonSplitRoundingSize``.
        """
        for name, value in (
            ("max_split_size_mb", self.max_split_size_bytes),
            ("max_non_split_rounding_mb", self.max_non_split_rounding_bytes),
        ):
            if value is not None and value < self.large_segment_bytes:
                raise _wrong(name, f"{value // MIB}", f"a number of MiB of at least {self.large_segment_size_mb}")


def _pairs(text: str) -> list[tuple[str, str]]:
    compact = re.sub(r"\s+", "", text).removesuffix(",")
    pairs = []
    for part in re.split(r",(?![^\[]*\])", compact) if compact else []:
        name, colon, value = part.partition(":")
        if not name or not colon or not value:
            raise WorkloadError(
                f"allocator settings: {part!r} is not of the form option:value, in {text!r}", key="allocator"
            )
        pairs.append((name, value))
    return pairs


def _wrong(name: str, value: str, expected: str) -> WorkloadError:
    return WorkloadError(f"allocator option {name}: {value!r} is not {expected}", key="allocator")


def _unknown(name: str, known: frozenset[str] | set[str], torch_version: tuple[int, int]) -> str:
    version, since = version_text(torch_version), first_release_with("allocator_options", name)
    if since is not None:
        return f"allocator option {name}: exists since torch {version_text(since)}, this is {version}"
    near = get_close_matches(name, known, n=3)
    hint = f"did you mean {' or '.join(near)}?" if near else f"known are {', '.join(sorted(known))}"
    return f"allocator option {name!r} is unknown to torch {version}; {hint}"


def _check_backend(name: str, value: str) -> None:
    if name == "backend" and value != "native":
        raise _wrong(name, value, "native, the only backend that can be predicted")


def _number(name: str, value: str, expected: str, accepts: Callable[[int], bool]) -> int:
    if not value.isdecimal() or not accepts(int(value)):
        raise _wrong(name, value, expected)
    return int(value)


def _fraction(name: str, value: str, expected: str, accepts: Callable[[float], bool]) -> float:
    try:
        number = float(value)
    except ValueError:
        raise _wrong(name, value, expected) from None
    if not accepts(number):
        raise _wrong(name, value, expected)
    return number


def _expandable(settings: AllocatorSettings, name: str, value: str) -> AllocatorSettings:
    if value not in ("True", "False"):
        raise _wrong(name, value, "True or False")
    return replace(settings, expandable_segments=value == "True")


def _max_split(settings: AllocatorSettings, name: str, value: str) -> AllocatorSettings:
    return replace(settings, max_split_size_bytes=_number(name, value, "a number of MiB", bool) * MIB)


def _max_rounding(settings: AllocatorSettings, name: str, value: str) -> AllocatorSettings:
    return replace(settings, max_non_split_rounding_bytes=_number(name, value, "a number of MiB", bool) * MIB)


def _large_segment(settings: AllocatorSettings, name: str, value: str) -> AllocatorSettings:
    least = OWN_SEGMENT_BYTES // MIB
    expected = f"a number of MiB above {least}"
    return replace(settings, large_segment_size_mb=_number(name, value, expected, lambda mib: mib > least))


def _garbage_collection(settings: AllocatorSettings, name: str, value: str) -> AllocatorSettings:
    threshold = _fraction(name, value, "a number between 0 and 1", lambda share: 0 < share < 1)
    return replace(settings, garbage_collection_threshold=threshold)


def _memory_fraction(settings: AllocatorSettings, name: str, value: str) -> AllocatorSettings:
    fraction = _fraction(name, value, "a number from 0 to 1", lambda share: 0 <= share <= 1)
    return replace(settings, per_process_memory_fraction=fraction)


def _roundup(settings: AllocatorSettings, name: str, value: str) -> AllocatorSettings:
    if not value.startswith("["):
        parts = _number(name, value, "a power of two", _is_power_of_two)
        return replace(settings, roundup_power2_divisions=(parts,) * ROUNDUP_INTERVALS)
    if not value.endswith("]") or len(value) < 3:
        raise _wrong(name, value, "a list such as [256:1,512:2,1024:4,>:8]")
    return replace(settings, roundup_power2_divisions=_divisions(name, value))


def _divisions(name: str, value: str) -> tuple[int, ...]:
    """Parse a list of divisions (``parseRoundUpPower2Divisions``).

    The first entry also covers the intervals below it, ``>`` those above the last.
    """
    divisions = [0] * ROUNDUP_INTERVALS
    last = None
    for entry in value[1:-1].removesuffix(",").split(","):
        bound, _, number = entry.partition(":")
        parts = _number(name, number, "a power of two or 0", lambda n: n == 0 or _is_power_of_two(n))
        if bound == ">":
            start = (last or 0) + 1
            divisions[start:] = [parts] * (ROUNDUP_INTERVALS - start)
            continue
        power = _number(name, bound, "a power of two (in MiB)", _is_power_of_two)
        index = min(power.bit_length() - 1, ROUNDUP_INTERVALS - 1)
        if last is None:
            divisions[:index] = [parts] * index
        divisions[index] = parts
        last = index
    return tuple(divisions)


def _is_power_of_two(number: int) -> bool:
    return number > 0 and number & (number - 1) == 0


_OPTIONS: Final[dict[str, Callable[[AllocatorSettings, str, str], AllocatorSettings]]] = {
    "expandable_segments": _expandable,
    "max_split_size_mb": _max_split,
    "max_non_split_rounding_mb": _max_rounding,
    "roundup_power2_divisions": _roundup,
    "garbage_collection_threshold": _garbage_collection,
    "per_process_memory_fraction": _memory_fraction,
    "large_segment_size_mb": _large_segment,
}
