"""From what was typed to workloads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from trainatomy.errors import WorkloadError
from trainatomy.facts.cards import card
from trainatomy.facts.published import PublishedTable
from trainatomy.facts.published import notebook as published_notebook
from trainatomy.workload.notebook import notebook
from trainatomy.workload.overrides import merge
from trainatomy.workload.reading import read, read_all
from trainatomy.workload.schema import Workload

NOTEBOOK = "notebook"


def one_workload(file: str | None, overrides: Mapping[str, Any]) -> Workload:
    """The workload of a file with flags over it, or of flags alone; raises ``WorkloadError``."""
    return merge(read(file) if file is not None else None, overrides)


def several_workloads(files: Sequence[str], overrides: Mapping[str, Any]) -> tuple[Workload, ...]:
    """Every workload of several files, or the notebook's rows, with flags over each; raises ``WorkloadError``."""
    if NOTEBOOK in files:
        if len(files) > 1:
            raise WorkloadError(
                f"{NOTEBOOK!r} stands alone: it is nine trainings already (a file of that name: ./{NOTEBOOK})"
            )
        return _notebook(overrides)
    return tuple(merge(workload, overrides) for file in files for workload in read_all(file))


def _notebook(overrides: Mapping[str, Any]) -> tuple[Workload, ...]:
    """On the notebook's own card and day; where a card is named, with today's software unless ``--era 2022``."""
    gpu, era = overrides.get("gpu"), overrides.get("era")
    if gpu is not None:
        card(gpu)
    rows = notebook("2022" if era == "2022" or (gpu is None and era is None) else "today", gpu)
    rest = {name: value for name, value in overrides.items() if name not in ("gpu", "era")}
    return tuple(merge(row, rest | ({"era": era} if era not in (None, "2022") else {})) for row in rows)


def published_table(files: Sequence[str], workloads: Sequence[Workload]) -> PublishedTable | None:
    """What was published of the notebook's trainings, if they are asked for as they were: their card, their day."""
    table = published_notebook()
    as_then = list(files) == [NOTEBOOK] and all(row.era == "2022" and row.gpu == table.gpu for row in workloads)
    return table if as_then else None
