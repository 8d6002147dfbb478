"""The function mode: what Python calls, before autograd sees it.

Python functions of torch (``torch.nn.functional``, ...) would be handed to the mode whole and then run with it off;
while the world is open they are told that nothing overrides them (``driver``), so that only the builtins inside arrive
here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from trainatomy.simulator.autocast import Autocast
from trainatomy.simulator.placement import CUDA, META, Handler, names_cuda

_FROM_DATA = (torch.tensor, torch.as_tensor, torch.asarray)


class CudaFunctions(TorchFunctionMode):
    """Answers for devices, makes autocast's casts, and swaps composite functions for what CUDA runs."""

    def __init__(
        self, handlers: dict[Any, Handler], composites: dict[Any, Callable[..., Any]], autocast: Autocast
    ) -> None:
        super().__init__()
        self._handlers = handlers
        self._composites = composites
        self._autocast = autocast

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        handler = self._handlers.get(func)
        if handler is not None:
            return handler(func, args, kwargs)
        composite = self._composites.get(func)
        autocast = self._autocast.enabled
        if composite is not None:
            if not autocast:
                with self:
                    return composite(*args, **kwargs)
            args, kwargs = self._autocast.cast(func, args, kwargs)
            with self._autocast.within(func), self:
                return composite(*args, **kwargs)
        if func in _FROM_DATA and args:
            args = (self._numbers(args[0]), *args[1:])
        if "device" in kwargs and names_cuda(kwargs["device"]):
            return self._make(func, args, {**kwargs, "device": META})
        if autocast:
            args, kwargs = self._autocast.cast(func, args, kwargs)
        return func(*args, **kwargs)

    def _numbers(self, data: Any) -> Any:
        """Lists that a tensor is made from: PyTorch asks each tensor in them for its number."""
        if type(data) in (list, tuple):
            return [self._number(one) if isinstance(one, torch.Tensor) else self._numbers(one) for one in data]
        return data

    def _number(self, tensor: torch.Tensor) -> Any:
        return tensor.item() if tensor.is_meta and tensor.numel() == 1 else tensor

    def _make(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A tensor made on the device: by a factory, or from data (``torch.tensor(..., device="cuda")``)."""
        if func in (torch.as_tensor, torch.asarray) and isinstance(args[0], torch.Tensor) and args[0].is_meta:
            dtype = args[1] if len(args) > 1 else kwargs.get("dtype")
            return self._handlers[torch.Tensor.to](torch.Tensor.to, (args[0], CUDA), {"dtype": dtype})
        if func in _FROM_DATA:
            host = {k: v for k, v in kwargs.items() if k not in ("device", "requires_grad", "pin_memory")}
            made = func(*args, **{**host, "device": "cpu"})
            made = self._handlers[torch.Tensor.to](torch.Tensor.to, (made, CUDA), {})
            made.requires_grad_(kwargs.get("requires_grad", False))
            return made
        kwargs.pop("pin_memory", None)
        if isinstance(kwargs.get("generator"), torch.Generator):
            kwargs = {**kwargs, "generator": None}
        return func(*args, **kwargs)
