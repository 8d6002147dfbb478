"""Figures that others published for the training runs of a built-in comparison."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainatomy.catalog.gpus import find_gpu
from trainatomy.catalog.published import (
    mixed_precision_by_batch,
    mixed_precision_machine,
    mixed_precision_remark,
    parallel_runs,
)
from trainatomy.catalog.published import notebook as published_notebook
from trainatomy.results.comparison import PublishedFigures
from trainatomy.workload.notebook import NOTEBOOK, PARALLEL, READY, ready

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trainatomy.workload.schema import Workload

MIB = 2**20


@dataclass(frozen=True, slots=True)
class Published:
    """Published figures, one for each workload, or none.

    Attributes:
        source: Where they were published.
        remark: What to know before comparing ours with them.
        samples: Number of samples that their times are given for.
        rows: The figures.
    """

    source: str = ""
    remark: str = ""
    samples: int | None = None
    rows: tuple[PublishedFigures, ...] = ()


def published(workloads: Sequence[Workload]) -> Published:
    """Return the figures for the rows of a built-in comparison with its own GPU and era; else nothing.

    Those of the experiment on two GPUs are about the ratios between its rows, and returned for every GPU.
    """
    name = next((name for name in READY if list(workloads) == list(ready(name, "2022"))), None)
    if name is None:
        beside = published_beside(workloads)
        return beside if beside.source == parallel_runs().source else Published()
    return _figures(name)


def published_beside(workloads: Sequence[Workload]) -> Published:
    """Return the figures for the rows of a built-in comparison with today's libraries on any GPU; else nothing.

    The remark names the GPU and the software of the figures.
    """
    mappings = [_without_gpu(workload) for workload in workloads]
    name = next((name for name in READY if mappings == [_without_gpu(row) for row in ready(name)]), None)
    if name is None:
        return Published()
    known = _figures(name)
    table = published_notebook()
    theirs = f"{find_gpu(table.gpu).name}, the software of {table.software['date']}"
    others = {NOTEBOOK: theirs, PARALLEL: parallel_runs().machine}
    machine = others.get(name) or mixed_precision_machine()
    remark = f"The published figures were measured on another machine ({machine}) and need not agree with this one."
    return Published(known.source, remark, known.samples, known.rows)


def _figures(name: str) -> Published:
    if name == NOTEBOOK:
        table = published_notebook()
        rows = [PublishedFigures(row.memory_bytes, row.seconds, row.samples_per_second) for row in table.rows]
        return Published(table.source, "", table.samples, tuple(rows))
    if name == PARALLEL:
        runs = parallel_runs()
        times = [
            PublishedFigures(None, each, runs.samples / each, note)
            for each, note in zip(runs.seconds, runs.notes, strict=True)
        ]
        return Published(runs.source, runs.remark, runs.samples, tuple(times))
    source, by_batch = mixed_precision_by_batch()
    sizes = [size for row in by_batch for size in (row.fp32_mb, row.fp16_mb)]
    return Published(source, mixed_precision_remark(), None, tuple(PublishedFigures(size * MIB) for size in sizes))


def _without_gpu(workload: Workload) -> dict[str, object]:
    return {key: value for key, value in workload.to_mapping().items() if key != "gpu"}
