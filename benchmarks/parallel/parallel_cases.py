"""The trainings of ``cases.yaml``, and which of them are held out from tuning."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

sys.path.insert(0, str(Path(__file__).parents[2] / "src"))  # a checkout that is not installed, such as a GPU machine's

from trainatomy.workload.schema import Workload

HERE = Path(__file__).parent
CASES = HERE / "cases.yaml"
GPUS = 2
_SECTIONS = ("model", "data", "train", "parallel")


@dataclass(frozen=True, slots=True)
class Case:
    """A training on several GPUs; ``mapping``: as in a workload file."""

    name: str
    mapping: Mapping[str, Any]

    @property
    def held_out(self) -> bool:
        """True if the case is held out: the last bit of its name's SHA-256 is 0."""
        return hashlib.sha256(self.name.encode()).digest()[-1] % 2 == 0

    def workload(self) -> Workload:
        """Return the training."""
        return Workload.from_mapping(self.mapping)


def cases(path: Path = CASES) -> tuple[Case, ...]:
    """Return the cases of a file in order."""
    content = yaml.safe_load(path.read_text(encoding="utf-8"))
    return tuple(_case(name, written, content["models"]) for name, written in content["cases"].items())


def _case(name: str, written: Mapping[str, Any], models: Mapping[str, Any]) -> Case:
    base: dict[str, Any] = {"loop": "pytorch", "gpu": "h200", "parallel": {"gpus": GPUS}} | models[written["of"]]
    rest = {key: value for key, value in written.items() if key != "of"}
    merged = (
        base | rest | {key: base.get(key, {}) | rest.get(key, {}) for key in _SECTIONS if key in base or key in rest}
    )
    return Case(name, {"name": name, **merged})
