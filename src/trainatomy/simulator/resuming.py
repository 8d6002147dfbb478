"""Trainings that continue from a checkpoint: the checkpoint is that of one simulated step of the same training."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from trainatomy.errors import WorkloadError
from trainatomy.simulator.recorder import Recorder
from trainatomy.simulator.saving import CheckpointFiles
from trainatomy.simulator.watcher import Watcher
from trainatomy.workload.schema import Workload

FIRST_STEP = {
    "train.resume_from_checkpoint": None,
    "train.load_best_model_at_end": False,
    "train.save_strategy": "steps",
    "train.eval_strategy": "no",
    "train.do_eval": False,
    "train.eval_on_start": False,
    "train.gradient_accumulation_steps": 1,
}
"""Settings of the training that makes the checkpoint: it ends with it, after one step."""


@contextlib.contextmanager
def continued(
    workload: Workload, files: CheckpointFiles | None, simulate: Callable[..., Any], rank: int = 0
) -> Iterator[tuple[Workload, CheckpointFiles]]:
    """Yield the training to simulate, and the files that it finds: those of its checkpoint if it continues from one.

    Args:
        workload: The training.
        files: The files, if they are given.
        simulate: Simulates a workload; takes ``steps``, ``watch`` and ``files``.
        rank: The rank that is simulated.

    Raises:
        WorkloadError: The rank needs files of a checkpoint that only rank 0 writes.
    """
    if files is not None or not workload.resumes:
        yield workload, CheckpointFiles() if files is None else files
        return
    if rank > 0:
        raise WorkloadError(
            f"train.resume_from_checkpoint: is simulated for rank 0, not for rank {rank}, which reads what that wrote",
            key="train.resume_from_checkpoint",
        )
    files = CheckpointFiles()
    with tempfile.TemporaryDirectory(prefix="trainatomy-") as folder:

        def watch(recorder: Recorder, steps: int) -> Watcher:
            return _Keeper(recorder, steps, files, Path(folder) / "checkpoint-1")

        simulate(workload.replace(FIRST_STEP), steps=1, watch=watch, files=files, operations=False)
        yield workload.replace("train.resume_from_checkpoint", str(Path(folder) / "checkpoint-1")), files


class _Keeper(Watcher):
    """Observer that moves the checkpoint of a training to another folder.

    Args:
        recorder: Recorder of the simulated process.
        steps: Steps of the training.
        files: What the files contain.
        place: Where the checkpoint goes.
    """

    def __init__(self, recorder: Recorder, steps: int, files: CheckpointFiles, place: Path) -> None:
        super().__init__(recorder, steps)
        self._files = files
        self._place = place

    def saving_end(self, files: Mapping[str, int], folder: Path) -> None:
        super().saving_end(files, folder)
        folder.rename(self._place)
        self._files.moved(folder, self._place)
