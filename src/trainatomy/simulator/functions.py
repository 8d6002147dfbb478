"""Function mode: what Python calls, before autograd sees it.

Python functions of torch (``torch.nn.functional``, ...) would arrive here whole and then run with the mode off.  During
a simulation they are made to believe that nothing overrides them (see ``driver``), so that only the builtins inside
arrive.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import MethodWrapperType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _device

from trainatomy.errors import SimulationError
from trainatomy.operators.allocation import above_autograd, recurrent
from trainatomy.operators.allocation import recurrent as cells
from trainatomy.operators.allocation.matmul import grouped_mm
from trainatomy.operators.allocation.sdpa import Attention, SdpFlags, sdpa
from trainatomy.simulator.adapters.torchao import packed_function
from trainatomy.simulator.autocast import Autocast, cross_entropy_loss
from trainatomy.simulator.autograd import Handler
from trainatomy.simulator.cards import Cards
from trainatomy.simulator.placement import CPU, META, Placement, names_cuda
from trainatomy.simulator.releases import functions_of
from trainatomy.simulator.storages import NESTED
from trainatomy.training.stored_weights import is_packed_type

Function = Callable[..., Any]
_FROM_DATA = (torch.tensor, torch.as_tensor, torch.asarray)
_FACTORIES = frozenset(
    {
        torch.empty,
        torch.zeros,
        torch.ones,
        torch.full,
        torch.empty_like,
        torch.zeros_like,
        torch.ones_like,
        torch.full_like,
    }
)
_EMPTY = frozenset({torch.empty, torch.empty_like, torch.Tensor.new_empty})
_nn: Any = torch._C._nn


class CudaFunctions(TorchFunctionMode):
    """Function mode that answers for devices, casts as autocast does, and replaces composites by what CUDA runs.

    Args:
        placement: Devices of tensors.
        handlers: Answers by function, called with (function, args, kwargs).
        composites: Replacements by function, called with the function's own arguments.
        autocast: Casts.

    Attributes:
        host_factories: Devices on which floating-point tensors that factories make stand for tensors without having
            memory: "cpu", "meta", None for the default device.  Usually none: tensors on the CPU are real.
        has_packed: Whether there are tensors of torchao, which bring functions of their own.
    """

    def __init__(
        self,
        placement: Placement,
        handlers: dict[Any, Handler],
        composites: dict[Any, Function],
        autocast: Autocast,
    ) -> None:
        super().__init__()
        self._placement = placement
        self._handlers = handlers
        self._composites = composites
        self._autocast = autocast
        self.host_factories: frozenset[str | None] = frozenset()
        self.has_packed = False
        self._known_types: set[Any] = set()

    def _learn(self, types: Any) -> None:
        """Remember types of tensors that are simulated; refuse those that are not."""
        if any(each.__name__ == "NestedTensor" for each in types):
            raise SimulationError(NESTED)  # PyTorch's kernels for them would read memory that a meta tensor has not
        self._known_types.update(types)

    def handle(self, handlers: dict[Any, Handler]) -> None:
        """Let further handlers answer for functions that none answers for yet."""
        self._handlers = handlers | self._handlers

    def replace(self, functions: dict[Any, Function]) -> None:
        """Run further functions in place of those that Python calls."""
        self._composites |= functions

    @contextlib.contextmanager
    def traced(self, functions: dict[Any, Function]) -> Iterator[None]:
        """Run further functions in place of those that Python calls, in the block, but no operator of a library.

        A compiler keeps such an operator, and knows its results by what the library registers for tensors without data.
        """
        before = self._composites
        kinds = (torch._ops.OpOverload, torch._ops.OpOverloadPacket)
        self._composites = {each: own for each, own in before.items() if not isinstance(each, kinds)} | functions
        try:
            yield
        finally:
            self._composites = before

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not self._known_types.issuperset(types):
            self._learn(types)
        if self.has_packed and any(map(is_packed_type, types)):
            own = packed_function(func, types)
            if own is not None:
                with self:  # its Python runs, and autocast casts what it calls
                    return own(func, types, args, kwargs or {})
        handler = self._handlers.get(func)
        if handler is not None:
            return handler(func, args, kwargs or {})
        if type(func) is MethodWrapperType:  # Python reads or sets an attribute of a tensor
            return func(*args, **kwargs or {})
        kwargs = kwargs or {}
        default = _device.CURRENT_DEVICE
        if default is not None and default.type == "cuda":
            kwargs = self._by_default(default, func, kwargs)
        composite = self._composites.get(func)
        autocast = self._autocast.enabled
        if composite is not None:
            if not autocast:
                with self:
                    return composite(*args, **kwargs)
            args, kwargs = self._autocast.cast(func, args, kwargs)
            with self._autocast.suspended_inside(func), self:
                return composite(*args, **kwargs)
        if func in _FROM_DATA and args:
            args = (self._read_numbers(args[0]), *args[1:])
        if "device" in kwargs and names_cuda(kwargs["device"]):
            with self._placement.on(kwargs["device"]):
                return self._make_on_gpu(func, args, {**kwargs, "device": META})
        if func is torch.Tensor.new_empty and kwargs.get("pin_memory"):
            return self._make_pinned(func, args, kwargs)
        if func in _FACTORIES:
            if kwargs.get("pin_memory"):
                return self._make_pinned(func, args, kwargs)
            if self.host_factories:
                return self._make_on_host(func, args, kwargs)
        if autocast and self._autocast.is_of_extension(func):
            return self._autocast.in_fp32(func, args, kwargs)
        if autocast:
            args, kwargs = self._autocast.cast(func, args, kwargs)
        return func(*args, **kwargs)

    def _by_default(self, default: torch.device, func: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Name the default GPU (``torch.set_default_device``, ``with torch.device``) where a factory names no device.

        PyTorch's own mode would do so below this one, where only the names of simulated devices arrive.
        """
        if kwargs.get("device") is not None or func not in _device._device_constructors():
            return kwargs
        return {**kwargs, "device": default}

    def _read_numbers(self, data: Any) -> Any:
        """Replace tensors in lists that a tensor is made from by their numbers, which PyTorch reads."""
        if type(data) in (list, tuple):
            return [self._number(one) if isinstance(one, torch.Tensor) else self._read_numbers(one) for one in data]
        return data

    def _number(self, tensor: torch.Tensor) -> Any:
        return tensor.item() if tensor.is_meta and tensor.numel() == 1 else tensor

    def _make_on_host(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make a tensor that is not on the GPU; on one of ``host_factories``, without memory unless it is a number."""
        device = kwargs.get("device")
        if device is None and args and isinstance(args[0], torch.Tensor):  # torch.zeros_like(tensor)
            return func(*args, **kwargs)
        kind = None if device is None else torch.device(device).type
        if kind in self.host_factories:
            with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
                made = func(*args, **{**kwargs, "device": META, "pin_memory": False})
            if kind == "meta" or (made.is_floating_point() and made.numel() > 1):
                takes_memory = kind != "meta" or self._placement.is_building()
                self._placement.keep_on_host(made, takes_memory=takes_memory)
                return made
        return func(*args, **kwargs)

    def _make_pinned(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make a tensor in pinned host memory: without memory of its own as long as nothing is in it."""
        options = {name: value for name, value in kwargs.items() if name != "pin_memory"}
        if func not in _EMPTY:
            return func(*args, **{**options, "device": CPU})
        with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
            made = func(*args, **{**options, "device": META})
        self._placement.keep_on_host(made, pinned=True)
        return made

    def _make_on_gpu(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make a tensor on the GPU: by a factory, or from data (``torch.tensor(..., device="cuda")``)."""
        to, gpu = self._handlers[torch.Tensor.to], self._placement.check(None)
        if func in (torch.as_tensor, torch.asarray) and isinstance(args[0], torch.Tensor) and args[0].is_meta:
            dtype = args[1] if len(args) > 1 else kwargs.get("dtype")
            return to(torch.Tensor.to, (args[0], gpu), {"dtype": dtype})
        if func in _FROM_DATA:
            options = {k: v for k, v in kwargs.items() if k not in ("device", "requires_grad", "pin_memory")}
            made = to(torch.Tensor.to, (func(*args, **{**options, "device": "cpu"}), gpu), {})
            made.requires_grad_(kwargs.get("requires_grad", False))
            return made
        kwargs.pop("pin_memory", None)
        if isinstance(kwargs.get("generator"), torch.Generator):
            kwargs = {**kwargs, "generator": None}
        with self._placement.leaving_host():
            made = func(*args, **kwargs)
        if isinstance(made, torch.Tensor):  # like a tensor in host memory: ``torch.empty_like(host, device="cuda")``
            self._placement.arrive(made)
        return made


def dropout(input: torch.Tensor, p: float = 0.5, train: bool = True) -> torch.Tensor:
    """Run dropout as CUDA does: a fused kernel with a bool mask.

    Source: aten/src/ATen/native/Dropout.cpp (``is_fused_kernel_acceptable``).
    """
    if not train or p == 0 or p == 1 or input.numel() == 0:
        with torch._C.DisableTorchFunction():
            return torch.dropout(input, p, train)
    return torch.native_dropout(input, p, train)[0]


def composites(cards: Cards, misses_a_mask: Callable[[], object]) -> dict[Any, Function]:
    """Return what CUDA runs in place of functions that differ above autograd, by the builtin that Python calls.

    ``cards``: the GPU, and others that are served; ``misses_a_mask`` is called where attention stores all its scores
    for want of a mask.
    """
    processor = cards.processor

    def attention(*args: Any, **kwargs: Any) -> torch.Tensor:
        call = Attention(*args, **kwargs, processor=processor, flags=SdpFlags.current())
        return sdpa(call, misses_a_mask, cards.decide)

    return {
        torch.dropout: dropout,
        _nn.cross_entropy_loss: cross_entropy_loss,
        _nn.scaled_dot_product_attention: attention,
        torch._grouped_mm: grouped_mm,
        torch.rms_norm: above_autograd.rms_norm,
        torch.batch_norm: above_autograd.batch_norm,
        torch.binary_cross_entropy_with_logits: above_autograd.binary_cross_entropy_with_logits,
        _nn.linear: above_autograd.linear,
        _nn.one_hot: above_autograd.one_hot,
        torch.lstm_cell: cells.lstm_cell,
        torch.gru_cell: cells.gru_cell,
        **dict.fromkeys((torch.prod, torch.Tensor.prod), above_autograd.prod),
        **dict.fromkeys((torch.cumprod, torch.Tensor.cumprod), above_autograd.cumprod),
        **dict.fromkeys((torch.softmax, torch.Tensor.softmax), above_autograd.softmax),
        **dict.fromkeys((torch.log_softmax, torch.Tensor.log_softmax), above_autograd.log_softmax),
        **recurrent.RecurrentLayers(processor).functions(),
        **functions_of(processor.torch_version),
    }
