"""Run code without a GPU: a script in a process of its own, or any code in a ``with`` block."""

from __future__ import annotations

import contextlib
import inspect
import shlex
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from trainatomy.api.verb import verb
from trainatomy.catalog.gpus import find_gpu
from trainatomy.errors import TrainatomyError, WorkloadError
from trainatomy.option import shared_fields
from trainatomy.requests.predicting import PredictRequest
from trainatomy.requests.scripts import ScriptRequest
from trainatomy.results.prediction import Prediction
from trainatomy.scripts import launch
from trainatomy.scripts.command import check_gpu, read_command, with_gpus
from trainatomy.scripts.imports import preload
from trainatomy.scripts.job import Job
from trainatomy.scripts.prediction import prediction_of_script, run_of
from trainatomy.scripts.session import Session, Settings
from trainatomy.scripts.signals import StepsDone


@verb(ScriptRequest)
def run_script(
    command: str | Sequence[str],
    *,
    gpu: str | None = None,
    gpus: int | None = None,
    request: ScriptRequest,
    output: Path | str | None = None,
) -> Prediction:
    """Run a training script without a GPU, in a process of its own, and predict its memory and time.

    Args:
        command: The script with its arguments, ``-m module``, ``torchrun …`` or ``accelerate launch …``: words, or one
            line as in a shell.
        gpu: The GPU to predict for; an H200 where none is named.
        gpus: Simulate rank 0 of a training on this many GPUs.
        request: How to run it.
        output: File for what the script prints.

    Raises:
        TrainatomyError: The script failed, or never trained; ``prediction`` of the error holds what ran until then.
    """
    script = read_command(shlex.split(command) if isinstance(command, str) else list(command))
    if gpu is None:
        check_gpu(script, "h200", "run_script('{script}', gpu='{gpu}')")
    job = Job(with_gpus(script, gpus), (find_gpu(gpu or "h200").id,), **shared_fields(ScriptRequest, request))
    outcome = launch.run_script(job, None if output is None else Path(output))[0]
    if outcome.exit_code or outcome.prediction is None:
        error = TrainatomyError(outcome.message)
        error.exit_code = outcome.exit_code
        error.prediction = outcome.prediction  # type: ignore[attr-defined]
        raise error
    return outcome.prediction


class DryRun:
    """A ``with`` block whose code runs without a GPU; see ``dry_run``.

    Attributes:
        prediction: The result, once the block has ended.
    """

    def __init__(self, gpu: str, steps: int, *, network: bool, timeline: bool, name: str) -> None:
        self._gpu, self._steps, self._network, self._timeline = find_gpu(gpu), steps, network, timeline
        self._name = name
        self._stack = contextlib.ExitStack()
        self.prediction: Prediction | None = None

    def __enter__(self) -> DryRun:
        self._started = time.perf_counter()
        preload()
        caller = inspect.stack()[1].filename
        settings = Settings(steps=self._steps, network=self._network, time_limit=float("inf"))
        self._session = Session(self._gpu, settings, caller)
        self._stack.enter_context(self._session.open())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        is_done = isinstance(error, StepsDone)
        self._stack.close()
        if error is not None and not is_done:
            return False
        if self._session.observer.steps == 0:
            raise WorkloadError(
                "dry_run: the block ended without an optimizer step: train in it, with a model that was made in it"
            )
        run = run_of(self._session, (self._name,), "steps" if is_done else "finished")
        request = PredictRequest(timeline=self._timeline)
        self.prediction = prediction_of_script(self._session, run, self._name, request, self._started)
        return is_done

    @property
    def fits(self) -> bool:
        """True if what ran fits on the GPU."""
        return bool(self._result.fits)

    @property
    def _result(self) -> Any:
        if self.prediction is None:
            raise WorkloadError("dry_run: the block has not ended, so there is no prediction yet")
        return self.prediction


def dry_run(
    *, gpu: str = "h200", steps: int = 3, network: bool = False, timeline: bool = False, name: str = "dry run"
) -> DryRun:
    """Return a context manager whose block runs without a GPU: ``with trainatomy.dry_run(gpu="h100") as dry:``.

    Make the model inside the block: its parameters have no data. The block ends by itself after ``steps`` optimizer
    steps, and ``dry.prediction`` then holds the result.

    Args:
        gpu: The GPU to predict for.
        steps: Optimizer steps after which the block is left.
        network: Let the code use the network.
        timeline: Include memory by component over the step.
        name: Name of the prediction.
    """
    return DryRun(gpu, steps, network=network, timeline=timeline, name=name)
