"""Runs of one training on the GPU of this process: timed steps, several settings in turn, auto_find_batch_size.

Imported in a fork that has a GPU.  Weights are made on the GPU, with values of no meaning: a model of a billion
parameters takes the CPU seconds to draw, and neither times nor sizes depend on them.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import tempfile
import time
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Any

import accelerate
import torch
from torch import nn
from transformers import PrinterCallback, Trainer, TrainerCallback

from trainatomy.measurement.device.meter import Meter
from trainatomy.measurement.process.job import set_environment
from trainatomy.measurement.step.instruments import Stopwatch
from trainatomy.measurement.step.results import is_out_of_memory
from trainatomy.measurement.step.timer import EnoughSteps, StepLimit, StepTimer
from trainatomy.training import model as models
from trainatomy.training import run as steps
from trainatomy.training.arguments import training_arguments
from trainatomy.training.batch import build_dataset
from trainatomy.workload.schema import Workload

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

LOSS_SCALE = 2.0**10
"""First loss scale of fp16: PyTorch's 2**16 overflows, which skips the first optimizer steps."""
_WRAPPED = ("forward", "_original_forward", "_is_accelerate_prepared")
"""Attributes that accelerate leaves on a model."""


@dataclass(frozen=True, slots=True)
class Length:
    """Number of steps: ``warm_up``, then timed ones until they took ``seconds``, ``timed`` to ``most`` of them."""

    warm_up: int
    timed: int
    most: int
    seconds: float

    def limit(self) -> StepLimit:
        """Return the limit of a run of that length."""
        return StepLimit(self.warm_up + self.most, self.warm_up + self.timed, self.seconds)


class Timer(StepTimer):
    """Timer that knows whether the optimizer has updated anything; fp16 skips updates that overflow."""

    optimizer: torch.optim.Optimizer | None = None

    def ready(self, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        self.optimizer = optimizer


def on_gpu(workload: Workload) -> nn.Module:
    """Build the model of ``workload`` with random weights on the GPU, in the order in which ``to("cuda")`` would."""
    with accelerate.init_empty_weights(include_buffers=False):
        model = models.build_model(workload)
    models.unwrap(model).tie_weights()  # on meta every module got a parameter of its own
    _fill(model, {})
    return model


def _fill(module: nn.Module, made: dict[nn.Parameter, nn.Parameter]) -> None:
    """Replace parameters on meta by random ones, recursing as ``Module._apply``; ``made``: those replaced so far."""
    for child in module.children():
        _fill(child, made)
    for name, parameter in module._parameters.items():
        if parameter is None or parameter.is_cuda:
            continue
        if parameter not in made:
            made[parameter] = nn.Parameter(_random(name, parameter), parameter.requires_grad)
        module._parameters[name] = made[parameter]
    for name, buffer in module._buffers.items():
        if buffer is not None:
            module._buffers[name] = buffer.to(_device())


def _random(name: str, like: torch.Tensor) -> torch.Tensor:
    """Return weights of a trainable size: matrices of standard deviation 0.02, biases 0, the rest (norms) 1."""
    empty = torch.empty_like(like, device=_device())
    with torch.no_grad():
        if empty.dim() > 1:
            return empty.normal_(std=0.02)
        return empty.zero_() if name == "bias" else empty.fill_(1)


def _device() -> str:
    """Return the device of the runs; tests run on the CPU."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def settle_loss_scale() -> None:
    """Let every gradient scaler of this process start at ``LOSS_SCALE``."""
    scaler: Any = torch.amp.GradScaler
    scaler.__init__ = functools.partialmethod(scaler.__init__, init_scale=LOSS_SCALE)


def set_allocator(options: str) -> None:
    """Give this process's allocator the options of ``PYTORCH_ALLOC_CONF``; CUDA must not be initialised yet."""
    set_environment(os.environ, options)
    if options:
        bindings: Any = torch._C
        bindings._accelerator_setAllocatorSettings(options)


def check_allocator(options: str) -> None:
    """Raise ``RuntimeError`` if expandable segments were asked for and are not in use."""
    if "expandable_segments:True" in options:
        settings = torch.cuda.memory._snapshot()["allocator_settings"]
        if not settings["expandable_segments"]:
            raise RuntimeError(f"the allocator did not take {options}: {settings}")


def timed_steps(mapping: Mapping[str, Any], model: nn.Module, length: Length) -> dict[str, Any]:
    """Train for some steps and return their figures: status, seconds, peaks. ``model`` stays usable."""
    workload = Workload.from_mapping(mapping)
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.reset_accumulated_memory_stats()
    held = torch.cuda.memory_allocated()
    timer = Timer(Meter(None, is_exclusive=True), warm_up=length.warm_up, limit=length.limit())
    status, message = "completed", ""
    try:
        with contextlib.suppress(EnoughSteps):
            steps.run(workload, model, device=_device(), steps=length.limit().max_steps, observer=timer)
        torch.cuda.synchronize()
    except (torch.OutOfMemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        status, message = "out of memory", str(error).splitlines()[0]
    finally:
        timer.finish()
    seconds = timer.step_seconds
    samples = workload.batch_size * workload.train.gradient_accumulation_steps
    return {
        "status": status,
        "message": message,
        "step_seconds": seconds,
        "timed_step_seconds": timer.timed_seconds,
        "samples_per_second": samples / seconds if seconds and status == "completed" else None,
        "peak_allocated_bytes": torch.cuda.max_memory_allocated(),
        "peak_reserved_bytes": torch.cuda.max_memory_reserved(),
        "held_before_bytes": held,
        "num_alloc_retries": int(torch.cuda.memory_stats().get("num_alloc_retries", 0)),
        "updated": bool(timer.optimizer is not None and timer.optimizer.state),
    }


def clear(model: nn.Module) -> None:
    """Free everything but the model, and undo what accelerate has done to it."""
    gc.collect()
    model.zero_grad(set_to_none=True)
    for name in _WRAPPED:
        model.__dict__.pop(name, None)
    gc.collect()
    torch.cuda.empty_cache()


@dataclass
class Attempt:
    """One batch size that auto_find_batch_size tried: samples, ``time.perf_counter`` of its first step's end."""

    batch: int
    steps: int = 0
    first_step: float | None = None
    stopwatch: Stopwatch = field(default_factory=Stopwatch)


class Attempts(TrainerCallback):
    """Callback that follows the Trainer's attempts, and ends the run when the last has been timed for long enough."""

    def __init__(self, length: Length) -> None:
        self.length = length
        self.made: list[Attempt] = []
        self.timed_since = 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.made.append(Attempt(state.train_batch_size))

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        attempt = self.made[-1]
        attempt.steps += 1
        if attempt.steps <= self.length.warm_up:
            torch.cuda.synchronize()
            self.timed_since = time.perf_counter()
        if attempt.first_step is None:
            attempt.first_step = time.perf_counter()
        if attempt.steps >= self.length.warm_up:
            attempt.stopwatch.tick()
        seconds = time.perf_counter() - self.timed_since
        if self.length.limit().is_reached(seconds, attempt.steps) or attempt.steps >= self.length.limit().max_steps:
            raise EnoughSteps


def automatic(mapping: Mapping[str, Any], model: nn.Module, length: Length) -> dict[str, Any]:
    """Train with the Trainer's ``auto_find_batch_size``, from the workload's batch on, and return what it came to.

    ``seconds_to_answer``: from the call of ``train`` to the end of the first step of the batch size that it kept.
    """
    workload = Workload.from_mapping(mapping)
    attempts = Attempts(length)
    dataset = build_dataset(workload, model, workload.batch_size * length.limit().max_steps)
    message = ""
    began = time.perf_counter()
    with _arguments(workload, length.limit().max_steps) as arguments:
        trainer: Any = Trainer(model, arguments, dataset.collate, dataset, callbacks=[attempts])
        trainer.remove_callback(PrinterCallback)
        try:
            with contextlib.suppress(EnoughSteps):
                trainer.train()
            torch.cuda.synchronize()
        except RuntimeError as error:  # no batch size is left
            message = str(error).splitlines()[0]
    last = attempts.made[-1]
    last.stopwatch.finish()
    timed = last.stopwatch.seconds
    seconds = median(timed) if timed else None
    return {
        "status": "failed" if message else "completed",
        "message": message,
        "tried": [attempt.batch for attempt in attempts.made],
        "steps_lost": sum(attempt.steps for attempt in attempts.made[:-1]),
        "batch": last.batch,
        "effective_batch": last.batch * workload.train.gradient_accumulation_steps,
        "seconds_to_answer": None if last.first_step is None else last.first_step - began,
        "step_seconds": seconds,
        "timed_step_seconds": timed,
        "samples_per_second": last.batch * workload.train.gradient_accumulation_steps / seconds if seconds else None,
        "peak_reserved_bytes": torch.cuda.max_memory_reserved(),
    }


@contextlib.contextmanager
def _arguments(workload: Workload, max_steps: int) -> Iterator[Any]:
    with tempfile.TemporaryDirectory(prefix="trainatomy-") as folder:
        arguments = training_arguments(workload, steps=max_steps, output_dir=folder, use_cpu=_device() == "cpu")
        arguments.auto_find_batch_size = True
        yield arguments
