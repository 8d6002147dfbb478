"""Run the steps of a workload: the one entry point for prediction and for measurement.

Steps that PyTorch's gradient scaling lets an optimizer take, and those that it skips.

``GradScaler`` starts with a scale of 65,536 and skips the step of an optimizer where a scaled gradient is infinite or
NaN in float16; each skipped step halves the scale.  An optimizer that unscales inside its kernel
(``_step_supports_amp_scaling``, the fused ones) is called in either case.
Source: torch/amp/grad_scaler.py (``_maybe_opt_step``), torch 2.9-2.13.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch

from trainatomy.training.arguments import training_arguments
from trainatomy.training.batch import BatchesOfLengths, MakeBatch, SyntheticDataset, build_dataset
from trainatomy.training.factory import user_code
from trainatomy.training.process import isolated_process_settings, seed_host
from trainatomy.training.shape import samples_per_step
from trainatomy.workload.loops import loop_of

if TYPE_CHECKING:
    from torch import nn
    from transformers import TrainingArguments

    from trainatomy.training.observer import Observer
    from trainatomy.workload.schema import Workload


class CountedSteps:
    """Count of the first steps that are skipped, before one is taken.

    Attributes:
        count: Their number; None where gradient scaling decides about no step.
    """

    def __init__(self) -> None:
        self.count: int | None = None
        self._taken = False

    def decided(self, taken: bool) -> None:
        """Count a decision."""
        self._taken = self._taken or taken
        self.count = (self.count or 0) + (not self._taken)


@contextlib.contextmanager
def following_scaled_steps(
    around: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
    decided: Callable[[bool], None] = lambda taken: None,
) -> Iterator[None]:
    """Follow the steps that gradient scaling may skip.

    Args:
        around: Makes a context in which each of them runs.
        decided: Called after each decision, with whether the step was taken.
    """
    original = torch.amp.GradScaler._maybe_opt_step

    def follow(scaler: Any, optimizer: Any, state: Any, *args: Any, **kwargs: Any) -> Any:
        taken = False

        def step(*args: Any, **kwargs: Any) -> Any:
            nonlocal taken
            taken = True
            with around():
                return optimizer.step(*args, **kwargs)

        found = original(scaler, SimpleNamespace(step=step), state, *args, **kwargs)  # type: ignore[arg-type]
        decided(taken)
        return found

    with mock.patch.object(torch.amp.GradScaler, "_maybe_opt_step", follow):
        yield


@dataclass(frozen=True, slots=True)
class Run:
    """What a loop is given: the steps of a workload to run on a model.

    Attributes:
        workload: The training or inference to run.
        model: The model to train, on the CPU or on meta tensors.
        device: ``"cuda"`` or ``"cpu"``; the Trainer always takes the first GPU.
        steps: Optimizer steps; forward passes in inference.
        observer: Notified of every phase.
        make_batch: Takes a batch size and returns a batch, in place of what ``workload.data`` says; or the batches of
            samples that differ in length.
    """

    workload: Workload
    model: nn.Module
    device: str
    steps: int
    observer: Observer
    make_batch: MakeBatch | BatchesOfLengths | None = None

    @property
    def samples(self) -> int:
        """Samples that all ranks of data parallelism train on."""
        return samples_per_step(self.workload) * self.steps * self.workload.parallel.data_parallel_size

    def dataset(self, size: int) -> SyntheticDataset:
        """Return a dataset of ``size`` samples; see ``training.batch.build_dataset``."""
        return build_dataset(self.workload, self.model, size, self.make_batch)

    def arguments(self, folder: str) -> TrainingArguments:
        """Return the Trainer's arguments; see ``training.arguments.training_arguments``."""
        use_cpu = torch.device(self.device).type == "cpu"
        return training_arguments(self.workload, steps=self.steps, output_dir=folder, use_cpu=use_cpu)


def run(
    workload: Workload,
    model: nn.Module,
    *,
    device: str | None,
    steps: int,
    observer: Observer,
    make_batch: MakeBatch | BatchesOfLengths | None = None,
) -> None:
    """Run ``steps`` steps of ``workload`` on ``model``, which is moved to ``device``.

    The host's random numbers begin with ``train.seed``, whatever building the model drew: a prediction, which draws no
    weights, leaves out the same layers as a measurement.

    The arguments are the attributes of ``Run``; the device ``None`` is ``"cuda"``.

    Raises:
        WorkloadError: A setting cannot be applied to this model.
        MissingLibrary: An optional library is not installed.
        FactoryError: The user's code failed; the message names its file and line.
        Exception: Whatever the step itself raises, out of memory included.
    """
    loop = loop_of(workload).function()
    with ExitStack() as stack:
        stack.enter_context(isolated_process_settings())
        seed_host(workload.train.seed)
        if workload.model.factory is not None:
            stack.enter_context(user_code(f"model.factory: {workload.model.factory}: its forward"))
        loop(Run(workload, model, device or "cuda", steps, observer, make_batch))
