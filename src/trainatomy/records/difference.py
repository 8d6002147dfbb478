"""What changed between two records, and which component it went to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from trainatomy.records.settings import settings, stated
from trainatomy.records.summary import summary_of
from trainatomy.results.difference import About, Difference, MemoryChange, SetupChange, Source, SpeedChange
from trainatomy.results.memory import Memory
from trainatomy.results.record import Record

FIGURES = ("device_bytes", "peak_reserved_bytes", "peak_allocated_bytes", "model_bytes")
NVML = ("process_bytes", "nvml_used_bytes", "idle_bytes", "context_bytes")
PACES = ("step_seconds", "samples_per_second", "tokens_per_second")


def difference(before: Record, after: Record) -> Difference:
    """``after`` against ``before``."""
    first, second = before.measurement, after.measurement
    source, bills = _bills(before, after)
    return Difference(
        before=summary_of(before),
        after=summary_of(after),
        changes=tuple(_changes(before, after)),
        source=source,
        components=_components(*bills) if bills else (),
        lines=tuple(_lines(*bills)) if bills else (),
        peaks=tuple(bill.peak for bill in bills) if bills else (),
        figures=tuple(MemoryChange("", name, getattr(first, name), getattr(second, name)) for name in FIGURES),
        nvml=tuple(MemoryChange("", name, getattr(first, name), getattr(second, name)) for name in NVML),
        paces=tuple(SpeedChange(name, getattr(first, name), getattr(second, name)) for name in PACES),
    )


def _bills(before: Record, after: Record) -> tuple[Source | None, tuple[Memory, Memory] | None]:
    """The bills of both from one source: two sources would show their own gap as a change."""
    measured = (before.measurement.memory, after.measurement.memory)
    if measured[0] is not None and measured[1] is not None:
        return "measured", (measured[0], measured[1])
    if before.prediction is not None and after.prediction is not None:
        return "predicted", (before.prediction.memory, after.prediction.memory)
    return None, None


def _components(before: Memory, after: Memory) -> tuple[MemoryChange, ...]:
    return tuple(
        MemoryChange(name, "", before.components[name], after.components[name]) for name in _names(before, after)
    )


def _names(before: Memory, after: Memory) -> list[str]:
    """Return the components that either side has, in display order."""
    return list(replace(before.components, others={**before.components.others, **after.components.others}).as_dict())


def _lines(before: Memory, after: Memory) -> Iterator[MemoryChange]:
    """Those that differ: by component, in the order of the bill, then the largest difference first."""
    first, second = _by_line(before), _by_line(after)
    order = _names(before, after)
    found = [MemoryChange(*line, first.get(line, 0), second.get(line, 0)) for line in {**first, **second}]
    differing = [line for line in found if line.change]
    yield from sorted(differing, key=lambda line: (order.index(line.component), -abs(line.change or 0)))


def _by_line(memory: Memory) -> dict[tuple[str, str], int]:
    """Bytes by component and name; lines of one name are one."""
    sums: dict[tuple[str, str], int] = {}
    for line in memory.lines:
        place = (line.component, line.name)
        sums[place] = sums.get(place, 0) + line.bytes
    return sums


def _changes(before: Record, after: Record) -> Iterator[SetupChange]:
    """What was asked for, then where it ran, then with what."""
    first, second = before.measurement, after.measurement
    yield from _differing("workload", *_settings(first.workload, second.workload))
    yield from _differing("gpu", {"gpu": first.gpu}, {"gpu": second.gpu})
    yield from _differing("driver", {"driver": first.driver}, {"driver": second.driver})
    yield from _differing("versions", first.versions, second.versions)


def _settings(first: Mapping[str, object], second: Mapping[str, object]) -> tuple[dict[str, object], dict[str, object]]:
    """With defaults where both workloads can be read by this version, else as they were written."""
    whole = settings(first), settings(second)
    both = whole[0] is not None and whole[1] is not None
    one, other = (whole[0] or {}, whole[1] or {}) if both else (stated(first), stated(second))
    one.pop("name", None)
    other.pop("name", None)
    return one, other


def _differing(about: About, first: Mapping[str, object], second: Mapping[str, object]) -> Iterator[SetupChange]:
    for name in {**first, **second}:
        if first.get(name) != second.get(name):
            yield SetupChange(about, name, first.get(name), second.get(name))
