"""Run the steps of a workload: the one entry point for prediction and for measurement."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

from trainatomy.training.factory import user_code
from trainatomy.training.process import isolated_process_settings
from trainatomy.training.seeds import seed_host
from trainatomy.workload.loops import loop_of

if TYPE_CHECKING:
    from torch import nn

    from trainatomy.training.batch import BatchesOfLengths, MakeBatch
    from trainatomy.training.observer import Observer
    from trainatomy.workload.schema import Workload


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

    Args:
        workload: The training or inference to run.
        model: The model to train, on the CPU or on meta tensors.
        device: ``"cuda"`` (or ``None``, the same) or ``"cpu"``; the Trainer always takes the first GPU.
        steps: Optimizer steps; forward passes in inference.
        observer: Notified of every phase.
        make_batch: Takes a batch size and returns a batch, in place of what ``workload.data`` says.

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
        loop(workload, model, device=device or "cuda", steps=steps, observer=observer, make_batch=make_batch)
