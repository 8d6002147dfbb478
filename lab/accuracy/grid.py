"""The rows of ``grid.yaml`` as workloads, and the draw of the held-out rows.

A row is held out when a hash of ``SEED`` and its name falls below a threshold.  Anyone can repeat the draw, adding a
row moves no other, and nobody chose.  Held-out rows are measured and reported; no rule may be changed because of a
single one of them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from trainatomy.workload.factory import resolve
from trainatomy.workload.schema import Workload

HERE = Path(__file__).resolve().parent
SEED = "trainatomy accuracy grid, first draw"
HELD_OUT_SHARE = 0.4
"""Share of held-out rows; at least 40 rows."""

PRECISIONS: Mapping[str, Mapping[str, Any]] = {
    "fp32": {},
    "tf32": {"train": {"tf32": True}},
    "fp16": {"train": {"fp16": True}},
    "bf16": {"train": {"bf16": True}},
    "bf16-weights": {"model": {"dtype": "bfloat16"}},
}
SHORT = {
    "batch": ("train", "per_device_train_batch_size"),
    "sequence": ("data", "sequence_length"),
    "target": ("data", "target_length"),
}


@dataclass(frozen=True, slots=True)
class Row:
    """A training of the grid; ``mapping``: as in a workload file; ``alone``: measured with no other process running."""

    name: str
    family: str
    mapping: Mapping[str, Any]
    alone: bool
    held_out: bool

    def workload(self, folder: Path = HERE) -> Workload:
        """Return the row as a workload; factories are resolved in ``folder``, by default beside this file.

        A row that names no dtype has float32 weights: the measured models were built from configurations in float32,
        whatever dtype their checkpoints are stored in. One with quantised weights that says nothing of checkpointing
        was measured without.
        """
        mapping = deepcopy(dict(self.mapping))
        if "factory" not in mapping["model"]:
            mapping["model"] = {"dtype": "float32", **mapping["model"]}
        if "quantization" in mapping["model"]:
            mapping["train"] = {"gradient_checkpointing": False, **mapping.get("train", {})}
        for section in ("model", "data"):
            if "factory" in mapping.get(section, {}):
                mapping[section]["factory"] = resolve(mapping[section]["factory"], folder)
        return Workload.from_mapping(mapping)


def rows(path: Path = HERE / "grid.yaml", models: Path | None = None) -> list[Row]:
    """Return all rows of a grid, in the order of the file, whose models may be described in another file.

    Raises:
        ValueError: If a row is malformed.
    """
    content = yaml.safe_load(path.read_text(encoding="utf-8"))
    known = content if models is None else yaml.safe_load(models.read_text(encoding="utf-8"))
    return [_row(name, written, known["models"]) for name, written in content["rows"].items()]


def is_held_out(name: str) -> bool:
    """Return whether a row is held out: a fraction drawn from seed and name is below ``HELD_OUT_SHARE``."""
    digest = hashlib.sha256(f"{SEED}/{name}".encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64 < HELD_OUT_SHARE


def _row(name: str, written: Mapping[str, Any], models: Mapping[str, Any]) -> Row:
    rest = dict(written)
    family = rest.pop("of")
    alone = rest.pop("alone", False)
    mapping: dict[str, Any] = {"name": name}
    for part in (models[family], PRECISIONS[rest.pop("precision", "fp32")], _shorts(rest), rest):
        mapping = _merge(mapping, part)
    return Row(name, family, mapping, alone, is_held_out(name))


def _shorts(rest: dict[str, Any]) -> dict[str, Any]:
    """Move the short keys of ``rest`` to where a workload has them."""
    long: dict[str, Any] = {}
    for short, (section, key) in SHORT.items():
        if short in rest:
            long.setdefault(section, {})[key] = rest.pop(short)
    return long


def _merge(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Merge two mappings, section by section; the second one wins."""
    merged = {**one, **other}
    for key in one.keys() & other.keys():
        if isinstance(one[key], Mapping) and isinstance(other[key], Mapping):
            merged[key] = _merge(one[key], other[key])
    return merged
