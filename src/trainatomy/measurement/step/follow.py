"""Which module is at work on the GPU: by hooks that every module's call passes, while somebody follows."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

if TYPE_CHECKING:
    from collections.abc import Sequence

Copies = tuple[tuple[int, int], ...]
"""Weights (any number that tells them apart), each with the bytes of its 16-bit copy."""


class Follower:
    """Takes a note at the beginning and the end of each module's call, and of each recomputation in backward.

    The hooks are global, as those of a simulated run: hooks of a module's own would change what some modules do
    (``nn.TransformerEncoderLayer`` leaves its fast path).
    """

    def __init__(self, model: nn.Module, take: Callable[..., None]) -> None:
        self._take = take
        self._model = model
        self._known: dict[int, tuple[str, Copies]] = {}
        self._depth = 0
        self._handles: list[Any] = []

    def start(self) -> None:
        """Follow from now on."""
        for name, module in self._model.named_modules():
            path = name or type(module).__name__
            self._known.setdefault(id(module), (path, copies_of(module)))
        self._handles = [
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._leave, always_call=True),
        ]

    def stop(self) -> None:
        """Follow no longer."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _enter(self, module: nn.Module, inputs: Any) -> None:
        if self._depth == 0 and torch._C._current_graph_task_id() != -1:
            self._take("recompute")
        self._depth += 1
        path, copies = self._known.get(id(module)) or (type(module).__name__, copies_of(module))
        self._take("call", None, path, copies if torch.is_autocast_enabled("cuda") else ())

    def _leave(self, module: nn.Module, inputs: Any, output: Any) -> None:
        if self._depth == 0:
            return
        self._depth -= 1
        self._take("return")
        if self._depth == 0 and torch._C._current_graph_task_id() != -1:
            self._take("recompute end")


def copies_of(module: nn.Module) -> Copies:
    """What autocast may copy when ``module`` runs: weights in float32 that are trained, where one is a matrix.

    A table of embeddings is looked up, not multiplied.  Attention multiplies by the weight of its last projection
    without calling it.  Source: ``cached_cast`` (aten/src/ATen/autocast_mode.cpp, torch 2.9-2.13).
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
