"""Watch a Hugging Face Trainer: ``trainer.add_callback(trainatomy.AnatomyCallback())``.

The Trainer calls its callbacks in the order in which they were added, and those of ``report_to`` come first
(transformers 5.17, ``Trainer.__init__``): they would not see what a later callback adds to ``logs``.  So while the
training runs, ``CallbackHandler.on_log`` is wrapped, and the components are in ``logs`` before any callback sees them.
"""

from __future__ import annotations

import atexit
import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from transformers.trainer_callback import CallbackHandler, TrainerCallback

from trainatomy.integrations.watch import Watch
from trainatomy.results.host import HostBill, HostPhaseName
from trainatomy.results.measurement import Measurement
from trainatomy.results.prediction import Prediction
from trainatomy.training.observer import wrapped
from trainatomy.units import GIB
from trainatomy.workload.train import TrainSpec

PREFIX = "memory/"
PREDICTED_PREFIX = "memory_predicted/"
FINAL = "train_runtime"
"""Key of the log that the Trainer writes when the training is over (``Trainer._finalize_training``)."""
MAX_LOG_SHARE = 0.02
"""Share of the training's time that computing the breakdown for the logs may take, after the first time."""


class AnatomyCallback(TrainerCallback):
    """Watches the training of a Trainer: memory by component in its logs, a summary at its end.

    ``measurement``, ``host_bill`` and ``prediction`` are set after the training.  On a machine without a GPU, where the
    callback warns once, only ``host_bill`` is: what the training took of the host's memory.  A training that ends with
    an exception is analyzed when the next one begins or Python exits.
    """

    def __init__(
        self,
        *,
        log: bool = True,
        print: bool = True,
        records: str | os.PathLike[str] | None = None,
        predict: bool = False,
    ) -> None:
        """Configure what happens with the measurement.

        Args:
            log: Add ``memory/weights_gib`` and so on, in GiB at the peak so far, to the Trainer's logs.
            print: Print the summary when the training ends.
            records: Folder in which to write a record of it.
            predict: Predict the same training from the live model, for the same GPU, and show both.  With ``log``, the
                Trainer's last log has ``memory_predicted/weights_gib`` and so on, and the predicted time of a step.
        """
        self._log, self._print, self._records, self._predict = log, print, records, predict
        self._watch: Watch | None = None
        self._wrapping = ExitStack()
        self._logged: dict[str, float] = {}
        self._logged_peak = -1
        self._began = self._spent = 0.0
        self._settings: dict[str, Any] = {}
        self._is_closed = self._is_predicted = False

    @property
    def measurement(self) -> Measurement | None:
        """The measurement, once the training is over."""
        return None if self._watch is None else self._watch.measurement

    @property
    def host_bill(self) -> HostBill | None:
        """What the training took of the host, once it is over."""
        return None if self._watch is None else self._watch.host_bill

    @property
    def prediction(self) -> Prediction | None:
        """The prediction, with ``predict=True``."""
        return None if self._watch is None else self._watch.prediction

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: Any = None, optimizer: Any = None, **kwargs: Any
    ) -> None:
        """Start to watch."""
        self._close_unfinished()
        self._watch = Watch(model, optimizer, predictable=self._predict, workload=workload_of(args, model))
        self._logged, self._logged_peak, self._spent = {}, -1, 0.0
        self._is_closed = self._is_predicted = False
        self._began = time.monotonic()
        self._watch.__enter__()
        if self._log and self._watch.live is not None:
            self._wrapping.enter_context(wrapped(CallbackHandler, "on_log", self._add_to_logs))
        atexit.register(self._close_unfinished)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Note what the Trainer does next: it evaluates, then saves."""
        self._enter("evaluation" if control.should_evaluate else "saving" if control.should_save else "training")

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Note that an evaluation is over."""
        self._enter("saving" if control.should_save else "training")

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Note that a checkpoint has been saved."""
        self._enter("training")

    def _enter(self, phase: HostPhaseName) -> None:
        if self._watch is not None:
            self._watch.phase(phase)

    def on_train_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Stop watching, then predict, write and print as configured."""
        self._close(unfinished=False)

    def __getstate__(self) -> dict[str, Any]:
        """Return a state in which a copy or a pickle watches nothing."""
        return {**self.__dict__, "_watch": None, "_wrapping": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _wrapping=ExitStack())

    def _close_unfinished(self) -> None:
        self._close(unfinished=True)

    def _close(self, *, unfinished: bool) -> None:
        watch = self._watch
        if watch is None or self._is_closed:
            return
        self._is_closed = True
        atexit.unregister(self._close_unfinished)
        self._wrapping.close()
        if watch.host_bill is None:
            watch.end(unfinished=unfinished)
        if self.measurement is None:
            if self._print:
                watch.print()
            return
        if self._predict and not unfinished:
            self._predict_once()
        if self._records is not None:
            watch.write(self._records, "trainatomy.AnatomyCallback")
        if self._print:
            watch.print()

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
        """Add the components to the logs of this callback's Trainer, then call ``CallbackHandler.on_log``."""
        if self in handler.callbacks and "loss" in logs:
            logs.update(self._log_values())
            if state.log_history and state.log_history[-1].get("step") == state.global_step:
                state.log_history[-1].update(self._logged)
        elif self in handler.callbacks and FINAL in logs and self._predict:
            predicted = self._predicted_values()
            logs.update(predicted)
            if state.log_history and FINAL in state.log_history[-1]:
                state.log_history[-1].update(predicted)
        return original(handler, args, state, control, logs, **kwargs)

    def _predicted_values(self) -> dict[str, float]:
        """End the watch and return the predicted values to log; the training is over."""
        assert self._watch is not None
        self._watch.end()
        if self.measurement is None:
            return {}
        self._predict_once()
        return {} if self.prediction is None else predicted_values(self.prediction)

    def _predict_once(self) -> None:
        """Predict the training, unless that was done or tried before."""
        assert self._watch is not None
        if not self._is_predicted:
            self._is_predicted = True
            self._watch.predict()

    def _log_values(self) -> dict[str, float]:
        """Return GiB by component at the peak so far, recomputed only if the peak rose and not too often."""
        assert self._watch is not None and self._watch.live is not None
        peak = self._watch.live.peak_bytes
        allowed = MAX_LOG_SHARE * (time.monotonic() - self._began)
        if peak > self._logged_peak and (not self._logged or self._spent <= allowed):
            began = time.monotonic()
            self._logged = log_values(self._watch.live.result())
            self._logged_peak = peak
            self._spent += time.monotonic() - began
        return self._logged


def log_values(measurement: Measurement) -> dict[str, float]:
    """Return the values to log: GiB, by component and in total."""
    found = {} if measurement.memory is None else measurement.memory.components.as_dict()
    found |= {"peak_allocated": measurement.peak_allocated_bytes, "peak_reserved": measurement.peak_reserved_bytes}
    if measurement.device_bytes is not None:
        found["device"] = measurement.device_bytes
    return {f"{PREFIX}{name}_gib": round(count / GIB, 4) for name, count in found.items()}


def predicted_values(prediction: Prediction) -> dict[str, float]:
    """Return the predicted values to log: GiB, by component and in total, and the seconds of a step."""
    memory = prediction.memory
    found = memory.components.as_dict() | {
        "peak_allocated": memory.peak_allocated_bytes,
        "peak_reserved": memory.peak_reserved_bytes,
        "device": memory.device_bytes,
    }
    values = {f"{PREDICTED_PREFIX}{name}_gib": round(count / GIB, 4) for name, count in found.items()}
    step = {} if prediction.time is None else {"predicted_step_seconds": round(prediction.time.step_seconds, 6)}
    return values | step


def workload_of(args: Any, model: Any) -> dict[str, Any]:
    """Return the training as the mapping of a workload file.

    It has the model's class and the settings of ``TrainingArguments`` that a workload knows and that differ from their
    defaults.
    """
    train: dict[str, Any] = {}
    for name, field in TrainSpec.model_fields.items():
        value = getattr(args, name, None)
        value = getattr(value, "value", value)
        default = field.default if field.default is not None else _trainer_default(args, name)
        is_off = value in (None, "no") or (isinstance(value, list | tuple) and not value)
        if not is_off and value != default and name != "per_device_eval_batch_size":
            train[name] = value
    return {"loop": "trainer", "model": {"class": type(model).__name__}, "train": train}


def _trainer_default(args: Any, name: str) -> Any:
    """Return the default of a setting of ``TrainingArguments``, which is what an unset one means to a Trainer."""
    field = getattr(args, "__dataclass_fields__", {}).get(name)
    return None if field is None else field.default
