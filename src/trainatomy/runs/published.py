"""What was published of a ready comparison, beside the same trainings predicted or measured here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainatomy.catalog.gpus import find_gpu
from trainatomy.catalog.published import mixed_precision_by_batch, mixed_precision_machine, mixed_precision_remark
from trainatomy.catalog.published import notebook as published_notebook
from trainatomy.results.comparison import PublishedFigures
from trainatomy.workload.notebook import NOTEBOOK, READY, ready

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trainatomy.workload.schema import Workload

MIB = 2**20


@dataclass(frozen=True, slots=True)
class Published:
    """Figures of others, one for each workload; ``samples``: of how many samples they give the time; ``remark``: what a
    reader should know who holds ours against them."""

    source: str = ""
    remark: str = ""
    samples: int | None = None
    rows: tuple[PublishedFigures, ...] = ()


def published(workloads: Sequence[Workload]) -> Published:
    """What was published of a ready comparison, if these are its rows on its own card and day; else nothing."""
    name = next((name for name in READY if list(workloads) == list(ready(name, "2022"))), None)
    return _figures(name) if name else Published()


def published_beside(workloads: Sequence[Workload]) -> Published:
    """What was published of a ready comparison, if these are its rows with today's software on any card; else nothing.

    The remark says of which card and software it is.
    """
    asked = [_without_card(workload) for workload in workloads]
    name = next((name for name in READY if asked == [_without_card(row) for row in ready(name)]), None)
    if name is None:
        return Published()
    known = _figures(name)
    table = published_notebook()
    then = f"{find_gpu(table.gpu).name}, the software of {table.software['date']}"
    machine = then if name == NOTEBOOK else mixed_precision_machine()
    remark = f"The published figures are of another machine ({machine}): those of this one need not agree with them."
    return Published(known.source, remark, known.samples, known.rows)


def _figures(name: str) -> Published:
    if name == NOTEBOOK:
        table = published_notebook()
        rows = [PublishedFigures(row.memory_bytes, row.seconds, row.samples_per_second) for row in table.rows]
        return Published(table.source, "", table.samples, tuple(rows))
    source, by_batch = mixed_precision_by_batch()
    sizes = [size for row in by_batch for size in (row.fp32_mb, row.fp16_mb)]
    return Published(source, mixed_precision_remark(), None, tuple(PublishedFigures(size * MIB) for size in sizes))


def _without_card(workload: Workload) -> dict[str, object]:
    return {key: value for key, value in workload.to_mapping().items() if key != "gpu"}
