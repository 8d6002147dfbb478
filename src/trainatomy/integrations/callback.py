"""``trainer.add_callback(trainatomy.AnatomyCallback())``: a Trainer's anatomy, in its logs and at its end.

The Trainer calls its callbacks in the order in which it got them, and those of ``report_to`` come first (transformers
5.17, ``Trainer.__init__``): what a later callback adds to ``logs`` would reach none of them.  So while the training
runs, ``CallbackHandler.on_log`` is wrapped: the components are in ``logs`` before any callback sees them.
"""

from __future__ import annotations

import atexit
import os
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from transformers.trainer_callback import CallbackHandler, TrainerCallback

from trainatomy.integrations.signals import wrapped
from trainatomy.integrations.watch import Watch
from trainatomy.units import GIB

if TYPE_CHECKING:
    from collections.abc import Callable

    from trainatomy.results.measurement import Measurement
    from trainatomy.results.prediction import Prediction

PREFIX = "memory/"
LOG_SHARE = 0.02
"""Of the time of the training, what settling the bill for the logs may take after the first time."""


class AnatomyCallback(TrainerCallback):
    """Watches a Trainer's training: the components in its logs, the summary at its end.

    ``log``: add ``memory/weights_gib`` and so on, GiB at the peak so far, to what the Trainer reports; ``print``: print
    the summary when the training ends; ``records``: a folder for a record of it; ``predict``: predict the same
    training of the live model, for the same card, and show it beside the measurement.

    ``measurement`` and ``prediction`` are there after the training; they stay ``None`` on a machine without a GPU,
    where the callback says so once and does nothing.  A training that ends with an exception is settled when the next
    one begins or Python ends.
    """

    def __init__(
        self,
        *,
        log: bool = True,
        print: bool = True,
        records: str | os.PathLike[str] | None = None,
        predict: bool = False,
    ) -> None:
        self._log, self._print, self._records, self._predict = log, print, records, predict
        self._anatomy: Watch | None = None
        self._wrapping = ExitStack()
        self._logged: dict[str, float] = {}
        self._logged_peak = -1
        self._began = self._spent = 0.0
        self._settings: dict[str, Any] = {}

    @property
    def measurement(self) -> Measurement | None:
        """What the training held, once it is over."""
        return None if self._anatomy is None else self._anatomy.measurement

    @property
    def prediction(self) -> Prediction | None:
        """What was predicted for it, with ``predict=True``."""
        return None if self._anatomy is None else self._anatomy.prediction

    # -- the Trainer's events ------------------------------------------------------------------------------------------

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: Any = None, optimizer: Any = None, **kwargs: Any
    ) -> None:
        """Begin to watch."""
        self._close_unfinished()
        self._anatomy = Watch(model, optimizer, predictable=self._predict, workload=workload_of(args, model))
        if self._anatomy.attachment is None:
            return
        self._logged, self._logged_peak, self._spent = {}, -1, 0.0
        self._began = time.monotonic()
        if self._log:
            self._wrapping.enter_context(wrapped(CallbackHandler, "on_log", self._add_to_logs))
        self._anatomy.__enter__()
        atexit.register(self._close_unfinished)

    def on_train_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Settle, predict, write and print, as asked for."""
        self._close(unfinished=False)

    def __getstate__(self) -> dict[str, Any]:
        """A copy or a pickle watches nothing."""
        return {**self.__dict__, "_anatomy": None, "_wrapping": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _wrapping=ExitStack())

    # -- what they lead to ---------------------------------------------------------------------------------------------

    def _close_unfinished(self) -> None:
        self._close(unfinished=True)

    def _close(self, *, unfinished: bool) -> None:
        anatomy = self._anatomy
        if anatomy is None or anatomy.attachment is None or anatomy.measurement is not None:
            return
        atexit.unregister(self._close_unfinished)
        self._wrapping.close()
        anatomy.end(unfinished=unfinished)
        if self.measurement is None:
            return
        if self._predict and not unfinished:
            anatomy.predict()
        if self._records is not None:
            anatomy.write(self._records, "trainatomy.AnatomyCallback")
        if self._print:
            anatomy.print()

    def _add_to_logs(
        self,
        original: Callable[..., Any],
        handler: Any,
        args: Any,
        state: Any,
        control: Any,
        logs: dict[str, Any],
        **kwargs: Any,
    ) -> Any:
        """``CallbackHandler.on_log``: the components come first, for the Trainer that this callback belongs to."""
        if self in handler.callbacks and "loss" in logs:
            logs.update(self._figures())
            if state.log_history and state.log_history[-1].get("step") == state.global_step:
                state.log_history[-1].update(self._logged)
        return original(handler, args, state, control, logs, **kwargs)

    def _figures(self) -> dict[str, float]:
        """GiB by component at the peak so far; settled anew only if the peak rose, and seldom enough."""
        assert self._anatomy is not None and self._anatomy.attachment is not None
        peak = self._anatomy.attachment.peak_bytes
        allowed = LOG_SHARE * (time.monotonic() - self._began)
        if peak > self._logged_peak and (not self._logged or self._spent <= allowed):
            began = time.monotonic()
            self._logged = figures_of(self._anatomy.attachment.result())
            self._logged_peak = peak
            self._spent += time.monotonic() - began
        return self._logged


def figures_of(measurement: Measurement) -> dict[str, float]:
    """What goes into a log: GiB, by component and in total."""
    found = {} if measurement.memory is None else measurement.memory.components.as_dict()
    found |= {"peak_allocated": measurement.peak_allocated_bytes, "peak_reserved": measurement.peak_reserved_bytes}
    if measurement.device_bytes is not None:
        found["device"] = measurement.device_bytes
    return {f"{PREFIX}{name}_gib": round(count / GIB, 4) for name, count in found.items()}


def workload_of(args: Any, model: Any) -> dict[str, Any]:
    """The training as the mapping of a workload file: the model's class, and those settings of ``TrainingArguments``
    that count and differ from their defaults."""
    from trainatomy.workload.train import TrainSpec

    train: dict[str, Any] = {}
    for name, field in TrainSpec.model_fields.items():
        value = getattr(args, name, None)
        value = getattr(value, "value", value)
        if value is not None and value != field.default and name != "per_device_eval_batch_size":
            train[name] = value
    return {"loop": "trainer", "model": {"class": type(model).__name__}, "train": train}
