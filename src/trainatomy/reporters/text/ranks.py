"""The ranks of a training that was measured on several GPUs, each with its prediction."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.text import Text

from trainatomy.reporters import sentences
from trainatomy.reporters.labels import COLUMNS
from trainatomy.reporters.settings import rank_name
from trainatomy.reporters.text.rendering import AdaptiveTable, Column
from trainatomy.results.plan import Plan
from trainatomy.units import human_bytes, seconds, signed_percent

if TYPE_CHECKING:
    from trainatomy.results.measurement import Measurement, RankMeasurement
    from trainatomy.results.prediction import Prediction

_COLUMNS = (
    Column("allocated"),
    Column("reserved"),
    Column("device"),
    Column("NCCL", rank=1),
    Column("per step"),
    Column("CPU waiting", rank=2),
)
_NCCL = "nccl"

Figures = tuple[float | None, ...]
"""Allocated, reserved, device and NCCL bytes, then seconds per step: without and with a synchronisation after each."""


def ranks_section(measurement: Measurement, prediction: Prediction | None) -> Group:
    """Return a table with each rank as measured, as predicted, and the gap, and what it leaves open in words."""
    table = AdaptiveTable("", _COLUMNS)
    own = prediction.ranks if prediction else {}
    plan = Plan.of(measurement.workload)
    for number, rank in measurement.ranks.items():
        measured = _measured(rank)
        table.add_row(f"{rank_name(plan, number)}, {COLUMNS['measured']}", *_cells(measured))
        if prediction is not None:
            predicted = _predicted(prediction, number if number in own else prediction.rank)
            table.add_row(f"  {COLUMNS['predicted']}", *_cells(predicted))
            if rank.status == "completed":
                table.add_row(f"  {COLUMNS['gap']}", *map(_gap, measured, predicted))
    others = tuple(number for number in measurement.ranks if number and number not in own)
    parts: list[RenderableType] = [table]
    if any(rank.nccl_bytes is not None for rank in measurement.ranks.values()):
        parts.append(Text(sentences.FIRST_COLLECTIVE, style="dim"))
    if prediction is not None and others:
        parts.append(Text(sentences.same_prediction(others), style="dim"))
    return Group(*parts)


def _measured(rank: RankMeasurement) -> Figures:
    sizes = (rank.peak_allocated_bytes, rank.peak_reserved_bytes, rank.device_bytes, rank.nccl_bytes)
    return (*sizes, rank.step_seconds, rank.synchronized_step_seconds)


def _predicted(prediction: Prediction, rank: int) -> Figures:
    memory, time = prediction.ranks[rank].memory, prediction.time
    nccl = memory.components.as_dict().get(_NCCL)
    sizes = (memory.peak_allocated_bytes, memory.peak_reserved_bytes, memory.device_bytes, nccl)
    return (*sizes, time.step_seconds if time else None, None)


def _cells(figures: Figures) -> Sequence[str]:
    sizes = ["-" if size is None else human_bytes(round(size)) for size in figures[:4]]
    return [*sizes, *("-" if each is None else seconds(each) for each in figures[4:])]


def _gap(measured: float | None, predicted: float | None) -> str:
    return "-" if not measured or predicted is None else signed_percent(predicted - measured, measured, 2)
