"""The lists of docs/cards.md: what predictions for each card were held against."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from concepts.page import page
from trainatomy.catalog.files import read_yaml
from trainatomy.catalog.gpus import gpus
from trainatomy.timing.cost_model import cost_model_of
from trainatomy.timing.evidence import assumed_context


def cards_page() -> str:
    """Render docs/cards.md."""
    checked: Mapping[str, Any] = read_yaml("checked.yaml")["gpus"]
    intervals = read_yaml("intervals.yaml")["uncalibrated"]
    held = [gpu for gpu in gpus() if gpu.id in checked]
    values = {
        "count": len(gpus()),
        **{
            kind: [_errors(gpu.name, checked[gpu.id][kind]) for gpu in held if kind in checked[gpu.id]]
            for kind in ("products", "moving", "steps")
        },
        "known": ", ".join(gpu.name for gpu in held if assumed_context(gpu) is None),
        "calibrated": ", ".join(gpu.name for gpu in held if cost_model_of(gpu).calibrated),
        "intervals": intervals,
    }
    return page("cards.md", values)


def _errors(name: str, found: Mapping[str, float]) -> str:
    return f"{name}: " + f"{found['median']:.1%} ({found['most']:.0%})".replace("%", " %")
