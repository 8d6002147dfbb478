"""Measure a user's own training on a GPU, from inside its process.

``LiveMeasurement`` connects the parts: hooks (the position in the loop), recorder (notes), history (PyTorch's record of
allocations) and stopwatch.  It takes no GPU memory and synchronises with the GPU only once, at the end.

Predict a training that just ran, from its live model, to compare it with the measurement.
"""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from statistics import median
from typing import Any, Literal, NamedTuple

import torch
from torch import nn

from trainatomy.api import predict
from trainatomy.catalog.gpus import gpu_of_driver
from trainatomy.errors import DeviceError, MissingLibrary, WorkloadError
from trainatomy.integrations.recorder import LiveRecorder, LoopHooks, unwrap_optimizer
from trainatomy.integrations.utilization import utilization, utilization_notes
from trainatomy.integrations.windows import Window, WindowedHistory
from trainatomy.measurement.device import nvml
from trainatomy.measurement.device.host import HostProbe
from trainatomy.measurement.device.power import sampler_of
from trainatomy.measurement.process.job import ALLOCATOR_VARIABLES, WARM_UP_STEPS
from trainatomy.measurement.step.instruments import DataWaits, Monitors, Stopwatch
from trainatomy.measurement.step.recorder import AllocatorCounters, read_counters
from trainatomy.measurement.step.results import allocator_setup, driver_version, is_out_of_memory, versions
from trainatomy.measurement.traces.breakdown import (
    RESERVED_NOTE,
    Failure,
    MeasuredBreakdown,
    MeasuredTotals,
    measured_breakdown,
)
from trainatomy.option import shared_fields
from trainatomy.results.measurement import Measurement, PowerUse, Stage, Utilization
from trainatomy.results.prediction import Prediction
from trainatomy.simulator.live import on_meta
from trainatomy.training.checkpointing import checkpointed_every, checkpointed_layers

PRECISIONS = {torch.float16: "fp16", torch.bfloat16: "bf16"}
"""Setting of ``TrainingArguments`` by the dtype of autocast."""


def predict_live(
    model: nn.Module,
    optimizer: Any,
    batch: Mapping[str, Any] | None,
    measurement: Measurement,
    autocast: torch.dtype | None = None,
) -> Prediction | None:
    """Predict the training of ``measurement`` on the GPU that it ran on.

    Warns and returns ``None`` if that is not possible, because the training must not fail for it.

    Args:
        model: The trained model.
        optimizer: Its optimizer.
        batch: A micro-batch with the training's shapes (``None``: one that fits a transformers model).
        measurement: The measurement.
        autocast: The dtype in which modules computed under autocast.
    """
    if (place := process_place()).size > 1:
        warnings.warn(
            f"no prediction: a live model is predicted on one GPU, and this training has {place.size} processes; "
            "`trainatomy predict --gpus` predicts it from a description",
            RuntimeWarning,
            stacklevel=2,
        )
        return None
    gpu = gpu_of_driver(measurement.gpu)
    if gpu is None:
        warnings.warn(
            f"no prediction: trainatomy has no data for the GPU {measurement.gpu!r}", RuntimeWarning, stacklevel=2
        )
        return None
    workload = measurement.workload
    train: dict[str, Any] = dict(workload.get("train", {}))  # type: ignore[call-overload]
    if "optim" not in train and workload.get("loop") != "trainer" and optimizer is not None:
        train["optimizer"] = type(optimizer)
    if workload.get("loop") != "trainer" and autocast in PRECISIONS:
        train.setdefault(PRECISIONS[autocast], True)
    try:
        if train.get("gradient_checkpointing") and checkpointed_layers(model) and checkpointed_every(model) is None:
            raise WorkloadError("the layers that recompute their activations are not every n-th one")
        with restored_accelerate_state():
            bare = unprepared(on_meta(model))
            return predict(bare, batch=batch, gpu=gpu.id, loop=workload.get("loop", "pytorch"), **train)
    except Exception as error:  # whatever happens, the end of the training must not fail
        warnings.warn(f"no prediction: {type(error).__name__}: {error}", RuntimeWarning, stacklevel=2)
        return None


def unprepared(model: nn.Module) -> nn.Module:
    """Undo what ``accelerator.prepare`` did to ``model`` (a copy), and return it.

    It wrapped the forward in autocast, and marked the model as prepared, so that the predicted loop would not wrap it.
    Source: ``Accelerator.prepare_model`` (accelerate 1.0-1.15).
    """
    own = vars(model)
    own.pop("_is_accelerate_prepared", None)
    original = own.pop("_original_forward", None)
    if original is not None:
        del model.forward
        if getattr(original, "__func__", None) is not type(model).forward:  # the user had replaced it before
            model.forward = original
    return model


@contextmanager
def restored_accelerate_state() -> Iterator[None]:
    """Restore accelerate's shared states: a prediction resets them, and the Trainer continues to use them."""
    state: Any = sys.modules.get("accelerate.state")
    kinds = [] if state is None else [state.PartialState, state.AcceleratorState, state.GradientState]
    kept = [dict(kind._shared_state) for kind in kinds]
    try:
        yield
    finally:
        for kind, values in zip(kinds, kept, strict=True):
            kind._shared_state.clear()
            kind._shared_state.update(values)


_UNFINISHED = "the training did not finish"


class LiveMeasurement:
    """A watched training: ``start``, run the loop, ``stop``; ``result`` at any time after ``start``.

    ``on_step`` is called after each step with the number of steps so far and the allocator's counters.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Any,
        name: str = "",
        workload: Mapping[str, Any] | None = None,
        *,
        keep_batch: bool = False,
    ) -> None:
        """Prepare to measure the training of ``model`` by ``optimizer``.

        Args:
            model: The model; its class names the measurement unless ``name`` does.
            optimizer: The optimizer, possibly wrapped by accelerate, or ``None`` for inference.
            name: Name of the measurement.
            workload: The training as the mapping of a workload file, as far as it is known.
            keep_batch: Keep the first batch on the CPU.
        """
        self.name = name or type(model).__name__
        self.on_step: Callable[[int, AllocatorCounters], None] | None = None
        self._workload = workload or {"model": {"class": type(model).__name__}}
        self.model, self._optimizer, self._keep_batch = model, unwrap_optimizer(optimizer), keep_batch
        self._status: Literal["completed", "out of memory"] = "completed"
        self._message = ""
        self._failure: Failure | None = None
        self._final: Measurement | None = None

    def start(self) -> None:
        """Start to measure.  Existing allocations are labelled by address, or get a line of their own."""
        with contextlib.ExitStack() as attached:  # a failure before the end of the block leaves nothing attached
            self._start(attached)
            self._attached = attached.pop_all()

    def _start(self, attached: contextlib.ExitStack) -> None:
        """Start to measure; ``attached`` takes what ends it."""
        self._device = _device_of(self.model)
        self._before = utilization(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        self._stopwatch = Stopwatch(self._device)
        self._history = WindowedHistory(self._device)
        self._retries = _alloc_retries(self._device)
        self._monitors = self._watched_beside(attached)
        self.recorder = LiveRecorder(
            self.model,
            self._optimizer,
            self._stopwatch,
            self._counters,
            self._step_ended,
            keep_batch=self._keep_batch,
            monitors=self._monitors,
        )
        self._hooks = LoopHooks(self.model, self._optimizer, self.recorder)
        attached.callback(self._history.stop)
        self._history.start(self._counters(), self.recorder.known_addresses())
        attached.callback(self._monitors.end)
        attached.callback(self.recorder.stop_tracking)
        self.recorder.track_modules()
        attached.callback(self._hooks.detach)
        self._hooks.attach()
        self._monitors.prepare()
        self._monitors.begin(self._stopwatch, 0)
        self._stopwatch.tick()

    def stop(self, error: BaseException | None = None, *, unfinished: bool = False) -> Measurement:
        """Stop measuring and return the result, which stays the same from now on.

        Args:
            error: The exception that ended the loop, if one did.
            unfinished: The loop did not finish, for an unknown reason.
        """
        if self._final is not None:
            return self._final
        with self._attached:
            self._hooks.detach()
            self.recorder.stop_tracking()
            if error is not None:
                self._fail(_first_line(error), out_of_memory=is_out_of_memory(error))
            elif unfinished:
                self._fail(_UNFINISHED, out_of_memory=self._was_refused())
            with contextlib.suppress(RuntimeError):  # after a CUDA error, synchronising raises it again
                torch.cuda.synchronize(self._device)
            self._stopwatch.finish()
            self._monitors.end()
            self._final = self.result()
        return self._final

    def result(self) -> Measurement:
        """Return the measurement so far."""
        if self._final is not None:
            return self._final
        now, recorder = self._counters(), self.recorder
        window = self._history.window(now, recorder.notes, recorder.tracked_steps, latest=self._failure is not None)
        after = utilization(self._device)
        totals = self._totals(after)
        breakdown = self._breakdown(window, totals) if window.is_complete else None
        notes = [*history_notes(is_complete=window.is_complete, is_users=self._history.is_users)]
        notes += utilization_notes(self._before, after)
        if (place := process_place()).size > 1:
            notes.append(
                f"this is rank {place.rank} of {place.size}: memory and rates are those of its own GPU and samples"
            )
        if self._message and self._status == "completed":
            notes.append(f"the loop was ended by {self._message}")
        if breakdown is not None:
            notes += [note for note in breakdown.notes if window.is_whole or not note.startswith(RESERVED_NOTE)]
        return self._measurement(after, totals, breakdown, tuple(notes))

    @property
    def peak_bytes(self) -> int:
        """Peak allocated bytes since the start."""
        return self._counters().peak_bytes

    def _watched_beside(self, attached: contextlib.ExitStack) -> Monitors:
        """Return what is watched beside the steps; NVML stays open until the end."""
        gpu = None
        with contextlib.suppress(MissingLibrary, DeviceError):
            driver = attached.enter_context(nvml.session())
            gpu = driver.device(str(torch.cuda.get_device_properties(self._device).uuid))
        return Monitors(HostProbe(), DataWaits(self._device), sampler_of(gpu), between=process_place().size == 1)

    def _was_refused(self) -> bool:
        """Return whether the allocator refused a request after the loop's last event."""
        last = self.recorder.notes[-1].at if self.recorder.notes else 0
        return self._history.has_refused_since(self._counters(), last)

    def _fail(self, message: str, *, out_of_memory: bool) -> None:
        self._message = message
        if out_of_memory:
            self._status = "out of memory"
            reserved, allocated = torch.cuda.memory_reserved(self._device), torch.cuda.memory_allocated(self._device)
            self._failure = Failure(self.recorder.instant(), 0, allocated, reserved)
        self.recorder.failed()

    def _counters(self) -> AllocatorCounters:
        return read_counters(self._device)

    def _step_ended(self, now: AllocatorCounters) -> None:
        self._begin_new_window_if_full(now)
        if self.on_step is not None:
            self.on_step(self.recorder.steps, now)

    def _begin_new_window_if_full(self, now: AllocatorCounters) -> None:
        if self._history.is_full(now):
            self._history.keep(now, self.recorder.notes, self.recorder.tracked_steps)
            self._history.start(now, self.recorder.known_addresses())
            self.recorder.track_modules()

    def _breakdown(self, window: Window, totals: MeasuredTotals) -> MeasuredBreakdown:
        """Return the memory breakdown at the peak or, if memory ran out, at the failure."""
        setup = allocator_setup(_allocator_options(), self._device)
        return measured_breakdown(window.history(), setup, totals, window.tracked_steps, self._failure, window.segments)

    def _totals(self, after: Utilization) -> MeasuredTotals:
        reserved, context = torch.cuda.max_memory_reserved(self._device), after.context_bytes
        return MeasuredTotals(
            peak_allocated_bytes=torch.cuda.max_memory_allocated(self._device),
            peak_reserved_bytes=reserved,
            device_bytes=None if context is None else reserved + context,
            model_bytes=self._before.allocated_bytes,
            num_alloc_retries=_alloc_retries(self._device) - self._retries,
        )

    def _measurement(
        self,
        after: Utilization,
        totals: MeasuredTotals,
        breakdown: MeasuredBreakdown | None,
        notes: tuple[str, ...],
    ) -> Measurement:
        seconds = tuple(self._stopwatch.seconds[WARM_UP_STEPS:])
        return Measurement(
            name=self.name,
            workload=_with_checkpointing(self._workload, self.model),
            status=self._status,
            gpu=after.gpu,
            driver=driver_version(),
            versions=versions(),
            date=datetime.now(UTC).date().isoformat(),
            **shared_fields(MeasuredTotals, totals),
            process_bytes=after.process_bytes,
            nvml_used_bytes=after.used_bytes,
            idle_bytes=None,
            context_bytes=after.context_bytes,
            step_seconds=median(seconds) if seconds else None,
            steps=self.recorder.steps,
            message=self._message,
            tape_file=None,
            memory=breakdown.memory if breakdown else None,
            modules=breakdown.modules if breakdown else (),
            stages=(_stage("before the watch", self._before), _peak_stage(totals, after)),
            timed_step_seconds=seconds,
            recorded_step_seconds=median(seconds) if seconds else None,
            samples_per_second=_rate(self.recorder.samples, self._stopwatch.seconds),
            tokens_per_second=_rate(self.recorder.tokens, self._stopwatch.seconds),
            out_of_memory=breakdown.out_of_memory if breakdown else None,
            notes=notes,
            rank=process_place().rank,
            host_pace=self._monitors.host_pace(),
            power=self._power_use(),
            data_wait=self._monitors.data_wait(WARM_UP_STEPS),
        )

    def _power_use(self) -> PowerUse | None:
        """Return the power since the beginning of the watch."""
        samples, tokens, steps = sum(self.recorder.samples), sum(self.recorder.tokens), max(self.recorder.steps, 1)
        return self._monitors.power_use(samples / steps, tokens / steps or None)


class ProcessPlace(NamedTuple):
    """A process of a user's training: its rank, and the number of processes."""

    rank: int
    size: int


def process_place() -> ProcessPlace:
    """Return this process's place in its process group; a process without one is alone."""
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return ProcessPlace(distributed.get_rank(), distributed.get_world_size())
    return ProcessPlace(0, 1)


def _with_checkpointing(workload: Mapping[str, Any], model: nn.Module) -> dict[str, Any]:
    """Return ``workload`` with the layers of ``model`` that recompute, which a callback may have chosen."""
    train: dict[str, Any] = dict(workload.get("train", {}))
    every = checkpointed_every(model) if train.get("gradient_checkpointing") else 1
    if every in (None, 1):
        return dict(workload)
    rest = dict(train.pop("gradient_checkpointing_kwargs", None) or {})
    rest.pop("every_n_layers", None)  # what the Trainer did before a callback
    train |= {"gradient_checkpointing_every": every} | ({"gradient_checkpointing_kwargs": rest} if rest else {})
    return {**workload, "train": train}


USERS_HISTORY = "PyTorch's memory history was already being recorded; it was read and left unchanged"
_TOO_MANY_EVENTS = "one step makes more allocations than the memory history keeps: no components"
_INCOMPLETE_HISTORY = (
    "the memory history that was already being recorded does not reach back to the beginning of the watch: "
    "no components; record it with a larger max_entries, or leave the recording to trainatomy"
)


def history_notes(*, is_complete: bool, is_users: bool) -> list[str]:
    """Return notes on the memory history: whether the user records it, and whether its window is complete."""
    if is_users:
        return [USERS_HISTORY if is_complete else _INCOMPLETE_HISTORY]
    return [] if is_complete else [_TOO_MANY_EVENTS]


def _allocator_options() -> str:
    """Return the options of PyTorch's allocator, as it read them from the environment."""
    return next((os.environ[name] for name in reversed(ALLOCATOR_VARIABLES) if os.environ.get(name)), "")


def _peak_stage(totals: MeasuredTotals, after: Utilization) -> Stage:
    return Stage(
        "training", totals.device_bytes, after.used_bytes, totals.peak_allocated_bytes, totals.peak_reserved_bytes
    )


def _stage(name: str, found: Utilization) -> Stage:
    return Stage(name, found.process_bytes, found.used_bytes, found.allocated_bytes, found.reserved_bytes)


def _device_of(model: nn.Module) -> int:
    """Return the GPU that the model is on, or the current one while it is still on the CPU."""
    for parameter in model.parameters():
        if parameter.is_cuda and parameter.device.index is not None:
            return parameter.device.index
    return torch.cuda.current_device()


def _alloc_retries(device: int) -> int:
    return int(torch.cuda.memory_stats_as_nested_dict(device).get("num_alloc_retries", 0))


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _rate(amounts: list[int], seconds: list[float]) -> float | None:
    """Return the median amount per second over the steps after the warm-up; ``None`` if nothing was counted."""
    rates = [amount / time for amount, time in zip(amounts, seconds, strict=False) if time > 0][WARM_UP_STEPS:]
    return median(rates) if rates and any(rates) else None
