"""Record which module runs on the GPU, by global forward hooks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from trainatomy.training.recomputation import Recomputation

if TYPE_CHECKING:
    from collections.abc import Sequence

WeightCopies = tuple[tuple[int, int], ...]
"""Pairs of a weight's id and the bytes of its 16-bit copy."""


class ModuleTracker:
    """Report the beginning and end of each module's forward, and of each recomputation in the backward pass.

    The hooks are global, as in a simulated run: a module's own hooks would change what some modules do
    (``nn.TransformerEncoderLayer`` leaves its fast path).
    """

    def __init__(self, model: nn.Module, report: Callable[..., None]) -> None:
        """Track the modules of ``model``; call ``report(name, addresses, module, copies)`` for each event."""
        self._report = report
        self._model = model
        self._known: dict[int, tuple[str, WeightCopies]] = {}
        self._recomputation = Recomputation(lambda begins: report("recompute" if begins else "recompute end"))
        self._stack: list[str] = []
        self._installed = contextlib.ExitStack()

    def start(self) -> None:
        """Register the hooks."""
        for name, module in self._model.named_modules():
            path = name or type(module).__name__
            self._known.setdefault(id(module), (path, weight_copies(module)))
        for handle in (
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._leave, always_call=True),
        ):
            self._installed.callback(handle.remove)
        self._installed.enter_context(self._recomputation.following(self._caller, self._again))

    def stop(self) -> None:
        """Remove the hooks."""
        self._installed.close()

    def _caller(self) -> str:
        """Return the path of the module that is being called, "" for none."""
        return self._stack[-1] if self._stack else ""

    @contextlib.contextmanager
    def _again(self, path: str) -> Iterator[None]:
        """Run the block for a module, as if it were being called."""
        self._begin(path, ())
        try:
            yield
        finally:
            self._end()

    def _begin(self, path: str, copies: WeightCopies) -> None:
        self._stack.append(path)
        self._report("call", None, path, copies)

    def _end(self) -> None:
        self._stack.pop()
        self._report("return")

    def _enter(self, module: nn.Module, inputs: Any) -> None:
        self._recomputation.module_called(len(self._stack))
        path, copies = self._known.get(id(module)) or (type(module).__name__, weight_copies(module))
        self._begin(path, copies if torch.is_autocast_enabled("cuda") else ())

    def _leave(self, module: nn.Module, inputs: Any, output: Any) -> None:
        if self._stack:
            self._end()
            self._recomputation.module_returned(len(self._stack))


def weight_copies(module: nn.Module) -> WeightCopies:
    """Return the weights that autocast may copy when ``module`` runs: trained float32 weights, if one is a matrix.

    An embedding table is looked up, not multiplied.  Attention multiplies by the weight of its output projection
    without calling that module.  Source: ``cached_cast`` (aten/src/ATen/autocast_mode.cpp, torch 2.9-2.13).
    """
    if isinstance(module, nn.Embedding | nn.EmbeddingBag):
        return ()
    own: Sequence[nn.Parameter] = list(module.parameters(recurse=isinstance(module, nn.MultiheadAttention)))
    if not any(parameter.dim() > 1 for parameter in own):
        return ()
    return tuple(
        (id(parameter), 2 * parameter.numel())
        for parameter in own
        if parameter.dtype == torch.float32 and parameter.requires_grad
    )
