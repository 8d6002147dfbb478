"""Run the step of a workload: the one entry for prediction and for measurement."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

from trainatomy.training.factory import user_code
from trainatomy.training.process import own_process_settings

if TYPE_CHECKING:
    from torch import nn

    from trainatomy.training.observer import Observer
    from trainatomy.workload.schema import Workload


def run(workload: Workload, model: nn.Module, *, device: str | None, steps: int, observer: Observer) -> None:
    """Run ``steps`` steps of ``workload`` on ``model``, which is moved to ``device``.

    ``device`` is ``"cuda"`` (or ``None``: the same), or ``"cpu"``; the Trainer always takes the first GPU.
    Raises ``WorkloadError``, ``MissingLibrary``, ``FactoryError`` (with the frame of the user's code where that is at
    fault), and what the step itself raises, out of memory included.
    """
    place = device or "cuda"
    with ExitStack() as stack:
        stack.enter_context(own_process_settings())
        if workload.model.factory is not None:
            stack.enter_context(user_code(f"model.factory: {workload.model.factory}: its forward"))
        if workload.mode == "inference":
            from trainatomy.training.loops.inference import infer

            infer(workload, model, device=place, steps=steps, observer=observer)
        elif workload.loop == "trainer":
            from trainatomy.training.loops import trainer

            trainer.train(workload, model, use_cpu=place == "cpu", steps=steps, observer=observer)
        else:
            from trainatomy.training.loops import pytorch

            pytorch.train(workload, model, device=place, steps=steps, observer=observer)
