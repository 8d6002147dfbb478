"""Make the checkpoint that a case continues from: ``python lab/everyday/checkpoint.py NAME FOLDER``.

One step of the case's training runs in a process of its own, so that nothing of it is measured.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import everyday_cases

from trainatomy.simulator.steps import FIRST_STEP
from trainatomy.training.model import build_model
from trainatomy.training.observer import Observer
from trainatomy.training.run import run


class _Keeper(Observer):
    """Observer that keeps the checkpoint that is saved after the first step."""

    def __init__(self, place: Path) -> None:
        self.place = place

    def evaluates_after(self, step: int) -> bool:
        return step == 0

    def saving_end(self, files: Mapping[str, int], folder: Path) -> None:
        shutil.move(folder, self.place)


def make(name: str, place: Path, device: str = "cuda", cases: Path = everyday_cases.CASES) -> None:
    """Train a case for one step, and save its checkpoint as ``place``."""
    (case,) = everyday_cases.chosen(everyday_cases.cases(cases), name, None)
    workload = case.workload("h200").replace({**FIRST_STEP, "steps": 1})
    run(workload, build_model(workload), device=device, steps=1, observer=_Keeper(place))


def made_elsewhere(name: str, place: Path, cases: Path, seconds: float) -> None:
    """Make a checkpoint in another process."""
    command = [sys.executable, __file__, name, str(place), "cuda", str(cases)]
    subprocess.run(command, check=True, timeout=seconds, stdout=subprocess.DEVNULL)


if __name__ == "__main__":
    case_name, checkpoint, kind, folder = [*sys.argv[1:], *["cuda", str(everyday_cases.CASES)][len(sys.argv) - 3 :]]
    make(case_name, Path(checkpoint), kind, Path(folder))
