"""Gradient checkpointing of a transformers model, of all layers or every n-th, and activations in host memory.

transformers marks the layers that it can checkpoint with the class ``GradientCheckpointingLayer``, and switches all of
them on.  ``gradient_checkpointing_enable(every_n_layers=n)`` of transformers 5.16 and later chooses the same layers as
``checkpoint_every``, which works with earlier releases too.

Tells what backward runs again: checkpointed functions, and modules that other code calls there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from torch.utils import checkpoint

from trainatomy.catalog.versions import transformers_has
from trainatomy.errors import WorkloadError
from trainatomy.libraries import version_of
from trainatomy.training.model import unwrap

if TYPE_CHECKING:
    from torch import nn

    from trainatomy.workload.schema import Workload
    from trainatomy.workload.train import TrainSpec


_KEY = "train.gradient_checkpointing_every"


def check_checkpointing(model: nn.Module, train: TrainSpec) -> None:
    """Raise ``WorkloadError`` if the workload asks for checkpointing that the model does not support."""
    inner = unwrap(model)
    has_method = callable(getattr(inner, "gradient_checkpointing_enable", None))
    if train.gradient_checkpointing and not (has_method and getattr(inner, "supports_gradient_checkpointing", True)):
        raise WorkloadError(
            f"train.gradient_checkpointing: {type(inner).__name__} does not support it",
            key="train.gradient_checkpointing",
        )
    if train.gradient_checkpointing and train.gradient_checkpointing_every > 1:
        _check_layers(model)
    if train.offloads_checkpoints and not takes_every_and_offload():
        raise WorkloadError(
            f"train.gradient_checkpointing_kwargs.offload: needs transformers 5.16, found {version_of('transformers')}",
            key="train.gradient_checkpointing_kwargs",
        )


def takes_every_and_offload() -> bool:
    """Return whether this release of transformers checkpoints every n-th layer, and to host memory."""
    return transformers_has("checkpointing_of_layers_and_to_host")


def enable_checkpointing(model: Any, kwargs: Mapping[str, Any] | None, every: int) -> None:
    """Switch gradient checkpointing on.

    Args:
        model: A transformers model.
        kwargs: ``gradient_checkpointing_kwargs``, of which transformers takes ``offload`` for itself.
        every: Checkpoint every such layer.
    """
    rest = dict(kwargs or {})
    offload = {"offload": True} if rest.pop("offload", False) else {}
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=rest or None, **offload)
    if every > 1:
        checkpoint_every(model, every)


def offloading(workload: Workload) -> AbstractContextManager[object]:
    """Return the context that keeps what autograd saves in host memory, where the workload asks for it."""
    if workload.activation_offloading is None:
        return nullcontext()
    return torch.autograd.graph.save_on_cpu(pin_memory=workload.activation_offloading == "pinned")


def checkpoint_every(model: nn.Module, n: int) -> None:
    """Let only every n-th layer recompute its activations; the other layers keep them.

    Of the layers that transformers can checkpoint, in the order of ``model.modules()``, those with the numbers 0, n,
    2n, … recompute.  Checkpointing must be on already; enabling it again switches all layers on.

    Args:
        model: A transformers model, also inside peft's or accelerate's wrapper.
        n: 1 checkpoints every layer, 2 every second one.

    Raises:
        WorkloadError: Checkpointing is off, or the layers cannot be switched one by one.
        ValueError: ``n`` is not an integer of at least 1.
    """
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:
        raise ValueError(f"checkpoint_every: n must be an integer of at least 1, found {n!r}")
    layers = _check_layers(model)
    if not any(layer.gradient_checkpointing for layer in layers):
        raise WorkloadError(
            "gradient checkpointing is off: call model.gradient_checkpointing_enable() first, or set "
            "gradient_checkpointing=True in TrainingArguments",
            key="train.gradient_checkpointing",
        )
    for number, layer in enumerate(layers):
        layer.gradient_checkpointing = number % n == 0


def checkpointed_every(model: nn.Module) -> int | None:
    """Return the smallest n with which ``checkpoint_every`` gives the model's present state; None if no n does."""
    flags = [layer.gradient_checkpointing for layer in checkpointed_layers(model)]
    for n in range(1, len(flags) + 1):
        if flags == [number % n == 0 for number in range(len(flags))]:
            return n
    return None


def checkpointed_layers(model: nn.Module) -> list[Any]:
    """Return the layers that transformers can checkpoint one by one, in the order of ``model.modules()``."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


def _check_layers(model: nn.Module) -> list[Any]:
    """Return the layers that can be checkpointed one by one; raise ``WorkloadError`` if there are none."""
    layers = checkpointed_layers(model)
    if not layers:
        raise WorkloadError(
            f"{_KEY}: the layers of {type(unwrap(model)).__name__} cannot be switched one by one (none of them is a "
            "GradientCheckpointingLayer of transformers): leave the setting out, which checkpoints all of them",
            key=_KEY,
        )
    return layers


_FUNCTION = -1
"""In place of a depth: a checkpointed function runs again, whichever modules are being called."""


class Recomputation:
    """Stretches of backward in which a forward runs again.

    Functions that ``torch.utils.checkpoint`` runs again are followed there, since hooks of modules may not see them:
    transformers 5.24 checkpoints the ``forward`` of a layer, earlier releases its ``__call__``.  Checkpoints of other
    libraries are seen by the modules that they call in backward.  The engine's task tells backward from other code,
    and one backward from another: gradients that a recomputed function computes itself are no recomputation.

    Args:
        report: Called with True when a stretch begins, with False when it ends.
    """

    def __init__(self, report: Callable[[bool], None]) -> None:
        self._report = report
        self._running: list[tuple[int, int]] = []

    @property
    def runs(self) -> bool:
        """Whether a forward runs again, in the backward that runs."""
        return bool(self._running) and self._running[-1][0] == torch._C._current_graph_task_id()

    def module_called(self, depth: int) -> None:
        """Note a call of a module inside of ``depth`` others."""
        if torch._C._current_graph_task_id() != -1 and not self.runs:
            self._begin(depth)

    def module_returned(self, depth: int) -> None:
        """Note the end of a call of a module inside of ``depth`` others."""
        if self.runs and self._running[-1][1] == depth:
            self._end()

    @contextlib.contextmanager
    def following(
        self, checkpointed: Callable[[], str], again: Callable[[str], AbstractContextManager[object]]
    ) -> Iterator[None]:
        """Follow checkpointed functions in the block.

        Args:
            checkpointed: Called when a function is checkpointed, in forward; returns the module at work.
            again: Called with that module when the function runs again; it runs in the context that this returns.
        """
        frame: Any = checkpoint._CheckpointFrame
        function: Any = checkpoint.CheckpointFunction
        make, forward = frame.__init__, function.forward

        def followed(run: Callable[..., Any]) -> Callable[..., Any]:
            module = checkpointed()

            def run_followed(*args: Any, **kwargs: Any) -> Any:
                if torch._C._current_graph_task_id() == -1:
                    return run(*args, **kwargs)
                self._begin(_FUNCTION)
                try:
                    with again(module):
                        return run(*args, **kwargs)
                finally:
                    self._end()

            return run_followed

        def make_followed(self: Any, recompute_fn: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
            make(self, followed(recompute_fn), *args, **kwargs)

        def forward_followed(ctx: Any, run_function: Callable[..., Any], *args: Any) -> Any:
            return forward(ctx, followed(run_function), *args)

        with (
            mock.patch.object(frame, "__init__", make_followed),
            mock.patch.object(function, "forward", staticmethod(forward_followed)),
        ):
            yield

    def _begin(self, depth: int) -> None:
        if not self._running:
            self._report(True)
        self._running.append((torch._C._current_graph_task_id(), depth))

    def _end(self) -> None:
        self._running.pop()
        if not self._running:
            self._report(False)
