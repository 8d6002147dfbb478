"""From what was typed to workloads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from trainatomy.catalog.gpus import find_gpu
from trainatomy.catalog.published import notebook as published_notebook
from trainatomy.errors import WorkloadError
from trainatomy.workload.notebook import NOTEBOOK, NOTEBOOK_FP16, READY, ready
from trainatomy.workload.overrides import merge
from trainatomy.workload.reading import read, read_all
from trainatomy.workload.schema import Workload

_HOW_MANY = {NOTEBOOK: "nine trainings", NOTEBOOK_FP16: "eight trainings"}


def one_workload(file: str | None, overrides: Mapping[str, Any]) -> Workload:
    """The workload of a file with flags over it, or of flags alone; raises ``WorkloadError``."""
    return merge(read(file) if file is not None else None, overrides)


def several_workloads(
    files: Sequence[str], overrides: Mapping[str, Any], *, today: bool = False
) -> tuple[Workload, ...]:
    """Every workload of several files, or the rows of a ready comparison, with flags over each.

    ``today``: today's software, also where a ready comparison would be taken as it was then.
    Raises ``WorkloadError``.
    """
    for name in READY:
        if name in files:
            if len(files) > 1:
                raise WorkloadError(
                    f"{name!r} stands alone: it is {_HOW_MANY[name]} already (a file of that name: ./{name})"
                )
            return _ready(name, overrides, today=today)
    return tuple(merge(workload, overrides) for file in files for workload in read_all(file))


def _ready(name: str, overrides: Mapping[str, Any], *, today: bool) -> tuple[Workload, ...]:
    """On the source's own card and day; where a card is named, with today's software unless ``--era 2022``."""
    gpu, era = overrides.get("gpu"), overrides.get("era")
    if gpu is not None:
        find_gpu(gpu)
    as_then = era == "2022" or (gpu is None and era is None and not today)
    rows = ready(name, "2022" if as_then else "today", gpu)
    rest = {name: value for name, value in overrides.items() if name not in ("gpu", "era")}
    return tuple(merge(row, rest | ({"era": era} if era not in (None, "2022") else {})) for row in rows)


def samples_of(files: Sequence[str]) -> int | None:
    """How many samples a ready comparison trains on, in whose time its source gives it."""
    return published_notebook().samples if list(files) == [NOTEBOOK] else None
