"""Run code without a GPU: a script in a process of its own, or any code in a ``with`` block."""

from __future__ import annotations

import contextlib
import inspect
import shlex
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from trainatomy.catalog.gpus import find_gpu
from trainatomy.errors import TrainatomyError, WorkloadError
from trainatomy.requests.predicting import HERE, PredictRequest, dataset_bytes, memory_size
from trainatomy.scripts import launch
from trainatomy.scripts.command import check_gpu, read_command, with_gpus
from trainatomy.scripts.imports import preload
from trainatomy.scripts.job import Job
from trainatomy.scripts.prediction import prediction_of_script, run_of
from trainatomy.scripts.session import Session, Settings
from trainatomy.scripts.signals import StepsDone

if TYPE_CHECKING:
    from trainatomy.results.prediction import Prediction


def run_script(
    command: str | Sequence[str],
    *,
    gpu: str | None = None,
    gpus: int | None = None,
    steps: int = 3,
    time_limit: float = 300.0,
    network: bool = False,
    data: Path | str | None = None,
    samples: int = 512,
    lengths: int = 256,
    timeline: bool = False,
    compiles: bool | None = None,
    look_ahead: bool = True,
    host_memory: int | str | None = None,
    dataset_memory: int | str | None = None,
    output: Path | str | None = None,
) -> Prediction:
    """Run a training script without a GPU, in a process of its own, and predict its memory and time.

    Args:
        command: The script with its arguments, ``-m module``, ``torchrun …`` or ``accelerate launch …``: words, or one
            line as in a shell.
        gpu: The GPU to predict for; an H200 where none is named.
        gpus: Simulate rank 0 of a training on this many GPUs.
        steps: Optimizer steps after which the script is stopped.
        time_limit: Seconds after which it is stopped.
        network: Let it use the network.
        data: A local file whose rows take the place of data sets of a hub.
        samples: Rows of made-up data sets.
        lengths: Words of made-up texts.
        timeline: Include memory by component over the step.
        compiles: Simulate ``torch.compile``; None: where the script names it and its compiler is installed.
        look_ahead: Also execute what comes after the steps: the evaluation and the checkpoint that a trainer's
            configuration plans, the longest sample, further steps where memory grows.
        host_memory: Memory of each machine in bytes or as ``"64 GiB"``, or ``"here"`` for this one: also say in
            ``Prediction.host_bill`` whether the processes fit in it.
        dataset_memory: Memory of a data set that lies in Python objects, in bytes or as ``"8 GiB"``.
        output: File for what the script prints.

    Raises:
        TrainatomyError: The script failed, or never trained; ``prediction`` of the error holds what ran until then.
    """
    script = read_command(shlex.split(command) if isinstance(command, str) else list(command))
    if gpu is None:
        check_gpu(script, "h200", "run_script('{script}', gpu='{gpu}')")
    job = Job(
        with_gpus(script, gpus),
        (find_gpu(gpu or "h200").id,),
        steps=steps,
        time_limit=time_limit,
        network=network,
        data=None if data is None else str(data),
        samples=samples,
        lengths=lengths,
        compiled=compiles,
        looks_ahead=look_ahead,
        timeline=timeline,
        host_memory=memory_size("host_memory", HERE, host_memory),
        dataset_memory=dataset_bytes("dataset_memory", dataset_memory),
    )
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
