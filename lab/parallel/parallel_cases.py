"""The trainings of ``cases.yaml`` (two GPUs), ``several.yaml`` (four or more) and ``drawn.yaml`` (drawn at random).

Of the first two, some are held out; the drawn ones were predicted before they were measured.
"""

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
SEVERAL = HERE / "several.yaml"
DRAWN = HERE / "drawn.yaml"
GPU = "h200"
GPUS = 2
NO_NVLS = {"link": {"nvls": False}}
"""The measured machines with more than two GPUs set ``NCCL_NVLS_ENABLE=0``; between two, NCCL uses no multicast."""
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


def cases(path: Path | None = None, gpus: int = GPUS, gpu: str = GPU) -> tuple[Case, ...]:
    """Return the cases of a file in order, for a number of GPUs of one kind.

    By default the file is that of two GPUs, or else that of several, whose names get the number as an ending.
    """
    chosen = path or (CASES if gpus == GPUS else SEVERAL)
    content = yaml.safe_load(chosen.read_text(encoding="utf-8"))
    ending = f"-{gpus}" if chosen == SEVERAL else ""
    return tuple(
        _case(name + ending, written, content["models"], gpus, gpu)
        for name, written in content["cases"].items()
        if gpus >= written.get("at_least", 1)
    )


def records(gpus: int = GPUS, gpu: str = GPU) -> Path:
    """Return the file of the measurements on a number of GPUs."""
    return HERE / "records" / f"{gpu}x{gpus}.jsonl"


def _case(name: str, written: Mapping[str, Any], models: Mapping[str, Any], gpus: int, gpu: str) -> Case:
    base: dict[str, Any] = {"gpu": gpu, "parallel": {"gpus": gpus, **(NO_NVLS if gpus > 2 else {})}}
    base |= {"loop": "pytorch", **models[written["of"]]} if "of" in written else {}
    rest = {key: value for key, value in written.items() if key not in ("of", "at_least")}
    merged = (
        base | rest | {key: base.get(key, {}) | rest.get(key, {}) for key in _SECTIONS if key in base or key in rest}
    )
    return Case(name, {"name": name, **merged})
