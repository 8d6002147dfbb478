"""Read records from Python: a history, one record, the difference between two.

Compare two records: what changed, and which memory components changed with it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import replace

from trainatomy.records.create import summarize
from trainatomy.records.query import Query, all_settings, stated_settings
from trainatomy.records.store import Store
from trainatomy.results.memory import Memory
from trainatomy.results.record import About, Difference, History, MemoryChange, Record, SetupChange, Source, SpeedChange

FIGURES = ("device_bytes", "peak_reserved_bytes", "peak_allocated_bytes", "model_bytes")
NVML = ("process_bytes", "nvml_used_bytes", "idle_bytes", "context_bytes")
PACES = ("step_seconds", "samples_per_second", "tokens_per_second")


def difference(before: Record, after: Record) -> Difference:
    """Return the difference of ``after`` from ``before``."""
    first, second = before.measurement, after.measurement
    source, breakdowns = _breakdowns(before, after)
    return Difference(
        before=summarize(before),
        after=summarize(after),
        changes=tuple(_changes(before, after)),
        source=source,
        components=_components(*breakdowns) if breakdowns else (),
        lines=tuple(_lines(*breakdowns)) if breakdowns else (),
        peaks=tuple(memory.peak for memory in breakdowns) if breakdowns else (),
        figures=tuple(MemoryChange("", name, getattr(first, name), getattr(second, name)) for name in FIGURES),
        nvml=tuple(MemoryChange("", name, getattr(first, name), getattr(second, name)) for name in NVML),
        paces=tuple(SpeedChange(name, getattr(first, name), getattr(second, name)) for name in PACES),
    )


def _breakdowns(before: Record, after: Record) -> tuple[Source | None, tuple[Memory, Memory] | None]:
    """Return both memory breakdowns from one source; with two sources their own gap would look like a change."""
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
    """Yield the lines that differ, by component, then the largest difference first."""
    first, second = _by_line(before), _by_line(after)
    order = _names(before, after)
    found = [MemoryChange(*line, first.get(line, 0), second.get(line, 0)) for line in {**first, **second}]
    differing = [line for line in found if line.change]
    yield from sorted(differing, key=lambda line: (order.index(line.component), -abs(line.change or 0)))


def _by_line(memory: Memory) -> dict[tuple[str, str], int]:
    """Return bytes by component and name; lines of the same name are added up."""
    sums: dict[tuple[str, str], int] = {}
    for line in memory.lines:
        key = (line.component, line.name)
        sums[key] = sums.get(key, 0) + line.bytes
    return sums


def _changes(before: Record, after: Record) -> Iterator[SetupChange]:
    """Yield the differences of the workload, then of the GPU and driver, then of the library versions."""
    first, second = before.measurement, after.measurement
    yield from _differing("workload", *_settings(first.workload, second.workload))
    yield from _differing("gpu", {"gpu": first.gpu}, {"gpu": second.gpu})
    yield from _differing("driver", {"driver": first.driver}, {"driver": second.driver})
    yield from _differing("versions", first.versions, second.versions)


def _settings(first: Mapping[str, object], second: Mapping[str, object]) -> tuple[dict[str, object], dict[str, object]]:
    """Return all settings of both workloads or, if this version cannot read both, the settings that they state."""
    whole = all_settings(first), all_settings(second)
    both = whole[0] is not None and whole[1] is not None
    one, other = (whole[0] or {}, whole[1] or {}) if both else (stated_settings(first), stated_settings(second))
    one.pop("name", None)
    other.pop("name", None)
    return one, other


def _differing(about: About, first: Mapping[str, object], second: Mapping[str, object]) -> Iterator[SetupChange]:
    for name in {**first, **second}:
        if first.get(name) != second.get(name):
            yield SetupChange(about, name, first.get(name), second.get(name))


Path = str | os.PathLike[str]


def history(path: Path | None = None, **conditions: object) -> History:
    """Return the records in a folder, oldest first, and the files that could not be read.

    Args:
        path: Path or URL of the folder (default: the environment's TRAINATOMY_RECORDS, or ``./trainatomy-records``).
        **conditions: Attributes of ``trainatomy.records.query.Query``, such as ``gpu="h200"``, ``last=10``,
            ``where=("train.bf16=true",)``.
    """
    return Store(path).history(Query(**conditions))  # type: ignore[arg-type]


def read_record(which: Path, path: Path | None = None) -> Record:
    """Return one record of the folder ``path``.

    Args:
        which: Id, prefix of the id or of the hash in it, ``last``, ``last~1`` and so on, or the path of a file.
        path: As for ``history``.

    Raises:
        TrainatomyError: There is no such record, several match, or it cannot be read.
    """
    return Store(path).read(which)


def diff(a: Record | Path, b: Record | Path, path: Path | None = None) -> Difference:
    """Return what changed from record ``a`` to ``b``, and which memory components changed with it.

    Args:
        a: A record, or a reference as for ``read_record``.
        b: The same.
        path: As for ``history``.
    """
    first, second = (each if isinstance(each, Record) else read_record(each, path) for each in (a, b))
    return difference(first, second)
