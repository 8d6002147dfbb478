"""``with trainatomy.watch(model, optimizer) as anatomy:`` around any training loop."""

from __future__ import annotations

import os
import warnings
from typing import TYPE_CHECKING, Any

from trainatomy.integrations.attachment import Attachment
from trainatomy.integrations.missing import has_gpu

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import TracebackType

    from torch import nn

    from trainatomy.results.measurement import Measurement
    from trainatomy.results.prediction import Prediction


class Watch:
    """A watched training.  ``measurement``: what it held, once the ``with`` block has ended (``None`` without a GPU).

    An exception of the block passes through; out of memory is part of the measurement.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Any = None,
        *,
        name: str = "",
        predictable: bool = False,
        workload: Mapping[str, Any] | None = None,
    ) -> None:
        """As ``watch``; ``workload``: the training as the mapping of a workload file, as far as it is known."""
        self.measurement: Measurement | None = None
        self.prediction: Prediction | None = None
        self.attachment: Attachment | None = None
        if has_gpu():
            self.attachment = Attachment(model, optimizer, name, workload, keeps_batch=predictable)

    def __enter__(self) -> Watch:
        if self.attachment is not None:
            self.attachment.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.end(error)

    def end(self, error: BaseException | None = None, *, unfinished: bool = False) -> None:
        """Stop watching; what goes wrong here is a warning, because it must neither end a training nor hide its error.

        ``unfinished``: the loop did not come to its end, for a reason that is not known.
        """
        if self.attachment is not None:
            try:
                self.measurement = self.attachment.stop(error, unfinished=unfinished)
            except Exception as trouble:
                warnings.warn(f"no anatomy: {type(trouble).__name__}: {trouble}", RuntimeWarning, stacklevel=3)

    def result(self) -> Measurement | None:
        """What was measured so far, or in the end; ``None`` without a GPU."""
        if self.measurement is None and self.attachment is not None:
            return self.attachment.result()
        return self.measurement

    def predict(self) -> Prediction | None:
        """Predict the training that was watched, from its live model, for its card; ``print`` shows it beside what was
        measured.  ``None``, with a warning, where that cannot be done."""
        measurement = self.result()
        if measurement is not None and self.attachment is not None:
            from trainatomy.integrations.predicting import predict_live

            model, notes = self.attachment.model, self.attachment.notes
            self.prediction = predict_live(model, notes.optimizer, notes.first_batch, measurement, notes.autocast)
        return self.prediction

    def print(self) -> None:
        """Print the summary: device memory by component, time, samples per second."""
        from trainatomy.integrations.printing import print_summary

        print_summary(self)

    def write(self, folder: str | os.PathLike[str], command: str = "trainatomy.watch") -> str | None:
        """Write a record into a folder of records, and return where it is (``None`` without a GPU)."""
        measurement = self.result()
        if measurement is None:
            return None
        from trainatomy.records.make import make_record
        from trainatomy.records.store import Store

        return Store(folder).write(make_record(measurement, self.prediction, command))


def watch(model: nn.Module, optimizer: Any = None, *, name: str = "", predictable: bool = False) -> Watch:
    """Watch a training loop of ``model`` and ``optimizer`` (none: inference): a context manager around it.

    The loop is not changed; model and optimizer may be wrapped by ``accelerator.prepare``.  On a machine without a GPU
    it says so once and does nothing.  ``name``: of the measurement (the model's class unless given);
    ``predictable``: keep the first batch on the host, so that ``anatomy.predict()`` can say what was to be expected.
    """
    return Watch(model, optimizer, name=name, predictable=predictable)
