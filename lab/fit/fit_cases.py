"""The trainings of ``cases.yaml``, the grid of settings of each, and the GPUs that an H200 stands in for."""

from __future__ import annotations

import sys
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "accuracy"))

import grid  # noqa: E402 (beside the accuracy benchmark)

CASES = HERE / "cases.yaml"
HELD_OUT = HERE / "held-out"
RECORDS = HERE / "records"
BASE = "h200"
GIB = 2**30


@dataclass(frozen=True, slots=True)
class Setting:
    """A point of the grid: per-device batch, accumulation, gradient checkpointing."""

    batch: int
    accumulation: int
    checkpointing: bool

    @property
    def label(self) -> str:
        """Short form: ``8 × 8, checkpointing``."""
        return f"{self.batch} × {self.accumulation}{', checkpointing' if self.checkpointing else ''}"

    def apply(self, mapping: dict[str, Any]) -> dict[str, Any]:
        """Return a workload's mapping with this setting."""
        changed = deepcopy(mapping)
        changed.setdefault("train", {}).update(
            per_device_train_batch_size=self.batch,
            gradient_accumulation_steps=self.accumulation,
            gradient_checkpointing=self.checkpointing,
        )
        return changed


@dataclass(frozen=True, slots=True)
class Case:
    """A training; ``automatic``: limits (GiB) on which auto_find_batch_size runs; ``seen``: see ``cases.yaml``."""

    name: str
    mapping: dict[str, Any]
    seen: str
    automatic: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Cases:
    """The content of ``cases.yaml``; ``grid``: the settings of every case."""

    cases: tuple[Case, ...]
    grid: tuple[Setting, ...]
    effective_batch: int
    limits_gib: tuple[int, ...]


def read(path: Path = CASES) -> Cases:
    """Read the cases."""
    content = yaml.safe_load(path.read_text(encoding="utf-8"))
    automatic, effective = content["automatic"], content["effective_batch_size"]
    cases = [
        Case(row.name, row.workload().to_mapping(), content["seen"][row.family], tuple(automatic.get(row.name, ())))
        for row in grid.rows(path)
    ]
    settings = [
        Setting(batch, effective // batch, checkpointing)
        for checkpointing in (False, True)
        for batch in content["batches"]
    ]
    return Cases(tuple(cases), tuple(settings), effective, tuple(content["limits_gib"]))


def limited(gib: int) -> dict[str, Any]:
    """Return the ``gpu`` section of an H200 with that much memory."""
    return {"base": BASE, "memory_bytes": gib * GIB}


def setting_of(mapping: dict[str, Any], base: dict[str, Any]) -> Setting | None:
    """Return the point of the grid that a workload is; ``None`` if it changes anything else of ``base``."""
    train = mapping.get("train", {})
    setting = Setting(
        train.get("per_device_train_batch_size", 8),
        train.get("gradient_accumulation_steps", 1),
        bool(train.get("gradient_checkpointing", False)),
    )
    from trainatomy.workload.schema import Workload

    ignored = ("name", "gpu", "software")
    both = [
        {key: value for key, value in Workload.from_mapping(each).to_mapping().items() if key not in ignored}
        for each in (mapping, setting.apply(base))
    ]
    return setting if both[0] == both[1] else None
