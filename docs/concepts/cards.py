"""The table of docs/cards.md: what predictions for each card were held against."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from concepts.page import page, table
from trainatomy.catalog.files import read_yaml
from trainatomy.catalog.gpus import find_gpu, gpus
from trainatomy.timing.cost_model import cost_model_of
from trainatomy.timing.evidence import assumed_context


def cards_page() -> str:
    """Render docs/cards.md."""
    checked: Mapping[str, Any] = read_yaml("checked.yaml")["gpus"]
    intervals = read_yaml("intervals.yaml")["uncalibrated"]
    head = ("card", "context", "times", "products", "element-wise", "steps")
    rows = [_row(gpu.id, checked[gpu.id]) for gpu in gpus() if gpu.id in checked]
    values = {"count": len(gpus()), "table": table(head, rows, 3), "intervals": intervals}
    return page("cards.md", values)


def _row(gpu_id: str, errors: Mapping[str, Any]) -> tuple[str, ...]:
    gpu = find_gpu(gpu_id)
    context = "known" if assumed_context(gpu) is None else "assumed"
    times = "calibrated" if cost_model_of(gpu).calibrated else "extrapolated"
    return gpu.name, context, times, *(_error(errors.get(kind)) for kind in ("products", "moving", "steps"))


def _error(found: Mapping[str, float] | None) -> str:
    return f"{found['median']:.1%} ({found['most']:.0%})".replace("%", " %") if found else ""
