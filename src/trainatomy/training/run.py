"""Run the step of a workload: the one entry for prediction and for measurement."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

from trainatomy.training.factory import user_code
from trainatomy.training.process import own_process_settings

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    from trainatomy.training.batch import MakeBatch
    from trainatomy.training.observer import Observer
    from trainatomy.workload.schema import Workload


def run(
    workload: Workload,
    model: nn.Module,
    *,
    device: str | None,
    steps: int,
    observer: Observer,
    make_batch: MakeBatch | None = None,
) -> None:
    """Run ``steps`` steps of ``workload`` on ``model``, which is moved to ``device``.

    ``device`` is ``"cuda"`` (or ``None``: the same), or ``"cpu"``; the Trainer always takes the first GPU.
    ``make_batch`` takes a batch size and returns a batch, in place of what ``workload.data`` says.

    Raises ``WorkloadError``, ``MissingLibrary``, ``FactoryError`` (with the frame of the user's code where that is at
    fault), and what the step itself raises, out of memory included.
    """
    loop = _loop(workload)
    with ExitStack() as stack:
        stack.enter_context(own_process_settings())
        if workload.model.factory is not None:
            stack.enter_context(user_code(f"model.factory: {workload.model.factory}: its forward"))
        loop(workload, model, device=device or "cuda", steps=steps, observer=observer, make_batch=make_batch)


def _loop(workload: Workload) -> Callable[..., None]:
    """The loop of ``workload``; each is imported only where it runs."""
    if workload.mode == "inference":
        from trainatomy.training.loops import inference

        return inference.infer
    if workload.loop == "pytorch":
        from trainatomy.training.loops import pytorch

        return pytorch.train
    from trainatomy.training.loops import trainer

    return trainer.train
