"""Watch any training loop: ``with trainatomy.watch(model, optimizer) as anatomy:``.

A live view of a watched training on a terminal: step, GPU memory, time of a step, time left.
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from types import TracebackType
from typing import Any

import torch
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from torch import nn

import trainatomy
from trainatomy.integrations.live_measurement import LiveMeasurement, predict_live
from trainatomy.measurement.step.instruments import host_sampler
from trainatomy.measurement.step.recorder import AllocatorCounters
from trainatomy.records.create import make_record
from trainatomy.records.store import Store
from trainatomy.reporters.text.rendering import error_paper
from trainatomy.results.host import HostBill, HostPhaseName
from trainatomy.results.measurement import Measurement
from trainatomy.results.prediction import Prediction
from trainatomy.units import human_bytes, seconds

_BETWEEN = 0.25
"""Seconds between two updates, so that short steps are not slowed down."""


class LiveView:
    """A line on stderr that follows the steps of a training; nothing where stderr is no terminal."""

    def __init__(self, name: str, steps: int | None = None, paper: Console | None = None) -> None:
        """Prepare the view.

        Args:
            name: Name of the training.
            steps: Optimizer steps in total, for the time left; None: not known.
            paper: Where to draw (default: stderr).
        """
        self._name, self._steps = name, steps
        self._paper = paper or error_paper()
        self._bars: Progress | None = None
        self._task = TaskID(0)
        self._updated = self._began = 0.0
        self._first = 0

    def start(self) -> None:
        """Begin to draw."""
        if not self._paper.is_terminal:
            return
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[held]}", markup=False),
        )
        self._bars = Progress(*columns, console=self._paper, transient=True, auto_refresh=False)
        self._task = self._bars.add_task(self._name, total=self._steps, held="")
        self._bars.start()

    def step_ended(self, steps: int, counters: AllocatorCounters) -> None:
        """Show a step that ended, unless the last update was a moment ago."""
        now = time.monotonic()
        if self._bars is None or now - self._updated < _BETWEEN:
            return
        if not self._updated:
            self._began, self._first = now, steps
        self._updated = now
        held = f"peak {human_bytes(counters.peak_bytes)} allocated"
        if steps > self._first:
            held += f", {seconds((now - self._began) / (steps - self._first))} per step"
        with suppress(OSError, ValueError):  # stderr was closed: no reason to end a training
            self._bars.update(self._task, completed=steps, held=held)
            self._bars.refresh()

    def stop(self) -> None:
        """Remove the line."""
        if self._bars is not None:
            self._bars.stop()
            self._bars = None


_has_warned = False


class Watch:
    """The handle of a watched training, a context manager around its loop.

    An exception inside the context passes through; running out of memory is part of the measurement.

    Attributes:
        measurement: The result, once the context has ended (``None`` without a GPU).
        host_bill: What the training took of the host, once the context has ended; also without a GPU (``None``: the
            system has no ``/proc``).
        prediction: The result of ``predict``.
        live: The running measurement (``None`` without a GPU).
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Any = None,
        *,
        name: str = "",
        predictable: bool = False,
        workload: Mapping[str, Any] | None = None,
        view: LiveView | None = None,
    ) -> None:
        """Prepare to watch; see ``watch`` for the arguments.

        ``workload``: the training as the mapping of a workload file, as far as it is known.  ``view`` shows its steps.
        """
        self.measurement: Measurement | None = None
        self.host_bill: HostBill | None = None
        self.prediction: Prediction | None = None
        self.live: LiveMeasurement | None = None
        self._sampler = host_sampler()
        if has_gpu():
            self.live = LiveMeasurement(model, optimizer, name, workload, keep_batch=predictable)
        self._view = view

    def __enter__(self) -> Watch:
        self._sampler.start("training")
        if self.live is not None:
            self.live.start()
            if self._view is not None:
                self.live.on_step = self._view.step_ended
                self._view.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.end(error)

    def end(self, error: BaseException | None = None, *, unfinished: bool = False) -> None:
        """Stop watching.

        A failure of ours becomes a warning, because it must neither end a training nor hide its error.

        Args:
            error: The exception that ended the loop.
            unfinished: The loop did not finish, for an unknown reason.
        """
        if self._view is not None:
            self._view.stop()
        self._sampler.stop()
        self.host_bill = self._sampler.bill()
        if self.live is not None:
            try:
                self.measurement = replace(self.live.stop(error, unfinished=unfinished), host_bill=self.host_bill)
            except Exception as failure:
                warnings.warn(f"no anatomy: {type(failure).__name__}: {failure}", RuntimeWarning, stacklevel=3)

    def phase(self, name: HostPhaseName) -> None:
        """Say that another part of the training begins, such as ``evaluation``, for what it takes of the host.

        Until it is called, everything counts as ``training``; ``AnatomyCallback`` calls it for the Trainer.
        """
        self._sampler.phase(name)

    def result(self) -> Measurement | None:
        """Return the measurement so far, or the final one after the end; ``None`` without a GPU."""
        if self.measurement is None and self.live is not None:
            return replace(self.live.result(), host_bill=self._sampler.bill())
        return self.measurement

    def predict(self) -> Prediction | None:
        """Predict the watched training from its live model, for its GPU; ``print`` then shows both.

        Returns ``None``, with a warning, if that is not possible.
        """
        measurement = self.result()
        if measurement is not None and self.live is not None:
            model, recorder = self.live.model, self.live.recorder
            self.prediction = predict_live(
                model, recorder.optimizer, recorder.first_batch, measurement, recorder.autocast
            )
        return self.prediction

    def print(self) -> None:
        """Print the summary: device memory by component, time, samples per second."""
        trainatomy.print_summary(self)

    def write(self, folder: str | os.PathLike[str], command: str = "trainatomy.watch") -> str | None:
        """Write a record into a folder of records and return its path.

        Returns ``None`` without a GPU, and in every process but rank 0 of a training on several: one training has one
        record.
        """
        measurement = self.result()
        if measurement is None or measurement.rank != 0:
            return None
        return Store(folder).write(make_record(measurement, self.prediction, command))


def watch(
    model: nn.Module,
    optimizer: Any = None,
    *,
    name: str = "",
    predictable: bool = False,
    show: bool = False,
    steps: int | None = None,
) -> Watch:
    """Watch a training loop of ``model`` and ``optimizer``: return a context manager to put around it.

    The loop itself does not change; model and optimizer may be wrapped by ``accelerator.prepare``.  On a machine
    without a GPU it warns once, and watches only what the training takes of the host.

    Args:
        model: The model.
        optimizer: The optimizer; ``None`` for inference.
        name: Name of the measurement (default: the model's class).
        predictable: Keep the first batch on the CPU, so that ``Watch.predict`` can predict the same training.
        show: Show step, peak of memory and time of a step while it runs, if stderr is a terminal.
        steps: Optimizer steps in total, for the time left that ``show`` shows.
    """
    view = LiveView(name or type(model).__name__, steps) if show else None
    return Watch(model, optimizer, name=name, predictable=predictable, view=view)


def has_gpu() -> bool:
    """Return whether PyTorch has a GPU; warn the first time that it has none."""
    global _has_warned
    if torch.cuda.is_available():
        return True
    if not _has_warned:
        _has_warned = True
        warnings.warn(
            "trainatomy finds no GPU on this machine: of a training, only what it takes of the host is watched. "
            "`trainatomy.predict` needs no GPU.",
            RuntimeWarning,
            stacklevel=3,
        )
    return False
