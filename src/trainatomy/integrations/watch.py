"""Watch any training loop: ``with trainatomy.watch(model, optimizer) as anatomy:``."""

from __future__ import annotations

import os
import warnings
from typing import TYPE_CHECKING, Any

import torch

from trainatomy.integrations.live_measurement import LiveMeasurement
from trainatomy.integrations.live_view import LiveView

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import TracebackType

    from torch import nn

    from trainatomy.results.measurement import Measurement
    from trainatomy.results.prediction import Prediction

_has_warned = False


class Watch:
    """The handle of a watched training, a context manager around its loop.

    An exception inside the context passes through; running out of memory is part of the measurement.

    Attributes:
        measurement: The result, once the context has ended (``None`` without a GPU).
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
        self.prediction: Prediction | None = None
        self.live: LiveMeasurement | None = None
        if has_gpu():
            self.live = LiveMeasurement(model, optimizer, name, workload, keep_batch=predictable)
        self._view = view

    def __enter__(self) -> Watch:
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
        if self.live is not None:
            try:
                self.measurement = self.live.stop(error, unfinished=unfinished)
            except Exception as failure:
                warnings.warn(f"no anatomy: {type(failure).__name__}: {failure}", RuntimeWarning, stacklevel=3)

    def result(self) -> Measurement | None:
        """Return the measurement so far, or the final one after the end; ``None`` without a GPU."""
        if self.measurement is None and self.live is not None:
            return self.live.result()
        return self.measurement

    def predict(self) -> Prediction | None:
        """Predict the watched training from its live model, for its GPU; ``print`` then shows both.

        Returns ``None``, with a warning, if that is not possible.
        """
        measurement = self.result()
        if measurement is not None and self.live is not None:
            from trainatomy.integrations.live_prediction import predict_live

            model, recorder = self.live.model, self.live.recorder
            self.prediction = predict_live(
                model, recorder.optimizer, recorder.first_batch, measurement, recorder.autocast
            )
        return self.prediction

    def print(self) -> None:
        """Print the summary: device memory by component, time, samples per second."""
        from trainatomy.integrations.printing import print_summary

        print_summary(self)

    def write(self, folder: str | os.PathLike[str], command: str = "trainatomy.watch") -> str | None:
        """Write a record into a folder of records and return its path.

        Returns ``None`` without a GPU, and in every process but rank 0 of a training on several: one training has one
        record.
        """
        measurement = self.result()
        if measurement is None or measurement.rank != 0:
            return None
        from trainatomy.records.create import make_record
        from trainatomy.records.store import Store

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
    without a GPU it warns once and does nothing.

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
            "trainatomy finds no GPU on this machine: the training is not watched. `trainatomy.predict` needs no GPU.",
            RuntimeWarning,
            stacklevel=3,
        )
    return False
