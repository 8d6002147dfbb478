"""Where tensors are: the answers that Python gets when it asks for a device, and moves between host and device.

Handlers run with the world's function mode popped, so the calls inside see meta tensors as what they are.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from trainatomy.errors import SimulationError
from trainatomy.simulator.answers import assumed
from trainatomy.simulator.storages import Storages

CUDA = torch.device("cuda:0")
CPU = torch.device("cpu")
META = torch.device("meta")
Handler = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]


def names_cuda(device: Any) -> bool:
    """Whether a ``device`` argument of any kind (string, index, torch.device) means the GPU."""
    if device is None or isinstance(device, bool):
        return False
    if isinstance(device, int):
        return True
    return torch.device(device).type == "cuda"


def _getter(name: str) -> Callable[..., Any]:
    """The function that a mode is handed when Python asks a tensor for an attribute."""
    getter: Callable[..., Any] = getattr(torch.Tensor, name).__get__
    return getter


class Placement:
    """The handlers of one world, by function.

    ``arriving`` is told of a tensor that came over to the device, and of its source where that has its values; what
    is made inside ``on_host()`` stands for a tensor in host memory.  ``known``: the values of a device's tensor,
    if known; it comes back with them (``pack_padded_sequence`` wants its lengths so).
    """

    def __init__(
        self,
        storages: Storages,
        arriving: Callable[[torch.Tensor, torch.Tensor | None], None],
        on_host: Callable[[], AbstractContextManager[None]],
        known: Callable[[torch.Tensor], torch.Tensor | None] = lambda tensor: None,
    ) -> None:
        self._storages = storages
        self._arriving = arriving
        self._on_host = on_host
        self._known = known

    def handlers(self) -> dict[Any, Handler]:
        """All handlers by the function (or property getter) that they answer for."""
        t = torch.Tensor
        table: dict[Any, Handler] = {
            _getter("device"): self._device,
            _getter("is_cuda"): self._is_cuda,
            _getter("is_meta"): lambda f, a, k: False,
            _getter("is_cpu"): self._is_cpu,
            t.get_device: lambda f, a, k: 0 if self._is_cuda(f, a, k) else -1,
            t.to: self._to,
            t.cuda: lambda f, a, k: self._move(a[0], CUDA),
            t.cpu: lambda f, a, k: self._move(a[0], CPU),
            t.pin_memory: lambda f, a, k: a[0],
            t.is_pinned: lambda f, a, k: False,
            t.record_stream: lambda f, a, k: None,
            t.type: self._type,
            t.numpy: self._numpy,
            t.tolist: self._tolist,
            t.new_tensor: self._new_tensor,
            t.__getitem__: self._at,
            t.__setitem__: self._at,
        }
        return table

    def is_device(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor stands for one in GPU memory."""
        return tensor.is_meta and self._storages.on_device(tensor)

    def _device(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device:
        tensor = args[0]
        if not tensor.is_meta:
            return tensor.device
        return CUDA if self._storages.on_device(tensor) else CPU

    def _is_cuda(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        return self.is_device(args[0])

    def _is_cpu(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        return not self.is_device(args[0])

    def _numpy(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """An array of what was computed, with the values that are taken for granted (``answers``).  A detector hands
        the costs of its matches to SciPy so."""
        tensor = args[0]
        if not tensor.is_meta:
            return func(*args, **kwargs)
        if self.is_device(tensor):
            raise TypeError("a tensor of the device has no array: copy it to the host with .cpu() first")
        if tensor.requires_grad and not kwargs.get("force"):
            raise RuntimeError("a tensor that requires a gradient has no array: take .detach() of it first")
        values = self._assumed(tensor)
        if values is None:
            raise SimulationError(
                f"an array of computed {tensor.dtype} values cannot be made without data: what follows depends on "
                "values that do not exist in a run without a GPU.\nMeasure this model with `trainatomy measure`"
            )
        return values.clone().numpy()

    def _assumed(self, tensor: torch.Tensor) -> torch.Tensor | None:
        known = self._known(tensor)
        return assumed(tensor) if known is None else known

    def _tolist(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Known values, or those that are taken for granted (``answers``)."""
        values = self._assumed(args[0]) if args[0].is_meta else None
        return func(*args, **kwargs) if values is None else values.tolist()

    def _new_tensor(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Data of the host, by default as a tensor where another one is and of its kind."""
        like, data = args[0], (args[1] if len(args) > 1 else kwargs["data"])
        named = kwargs.get("device")
        if not (self.is_device(like) if named is None else names_cuda(named)):
            return func(*args, **{**kwargs, "device": CPU})
        made = torch.tensor(data, dtype=kwargs.get("dtype") or like.dtype)
        return self._move(made, CUDA).requires_grad_(kwargs.get("requires_grad", False))

    def _at(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """An index that is a list becomes a tensor where the indexed one is, with its values.

        Source: torch/csrc/autograd/python_variable_indexing.cpp (``sequenceToVariable``), torch 2.9-2.13.
        """
        tensor, index = args[:2]
        several = isinstance(index, tuple)
        indices = index if several else (index,)
        if any(type(one) is list for one in indices) and self.is_device(tensor):
            indices = tuple(self._listed(one) for one in indices)
            return func(tensor, indices if several else indices[0], *args[2:], **kwargs)
        return func(*args, **kwargs)

    def _listed(self, index: Any) -> Any:
        """A list of numbers or truths as a tensor of the device; everything else as it is."""
        plain = type(index) is list and index and all(isinstance(one, int) for one in index)
        return self._move(torch.tensor(index), CUDA) if plain else index

    def _type(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """``type()`` and ``type("torch.cuda.HalfTensor")``; a dtype moves nothing."""
        tensor, asked = args[0], (args[1] if len(args) > 1 else kwargs.get("dtype"))
        if asked is None:
            kind = func(tensor).rpartition(".")[2]
            return f"torch.cuda.{kind}" if self.is_device(tensor) else f"torch.{kind}"
        if isinstance(asked, str):
            place, _, kind = asked.rpartition(".")
            return self._move(tensor, CUDA if place == "torch.cuda" else CPU, getattr(torch, kind).dtype)
        return func(*args, **kwargs)

    def _to(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensor, rest = args[0], args[1:]
        if rest and isinstance(rest[0], torch.Tensor):
            other = rest[0]
            target = CUDA if self.is_device(other) else CPU
            return self._move(tensor, target, other.dtype, **kwargs)
        named = kwargs.get("device")
        if named is None and rest and isinstance(rest[0], (str, int, torch.device)) and not isinstance(rest[0], bool):
            named, rest = rest[0], rest[1:]
        if named is not None:
            device = CUDA if names_cuda(named) else torch.device(named)
            if device.type == "meta":
                return func(*args, **kwargs)
            options = {k: v for k, v in kwargs.items() if k != "device"}
            names = ("dtype", "non_blocking", "copy") if "dtype" not in options else ("non_blocking", "copy")
            options.update(zip(names, rest, strict=False))
            dtype = options.pop("dtype", None)
            return self._move(tensor, device, dtype, **options)
        return func(*args, **kwargs)

    def _move(
        self,
        tensor: torch.Tensor,
        device: torch.device,
        dtype: torch.dtype | None = None,
        non_blocking: bool = False,
        copy: bool = False,
        **options: Any,
    ) -> torch.Tensor:
        here = self.is_device(tensor)
        there = device.type == "cuda"
        dtype = dtype or tensor.dtype
        if here == there:
            return tensor.to(dtype, copy=copy, **options)
        if not tensor.is_meta:
            source = tensor if tensor.requires_grad else tensor.detach()
            moved = source.to(META, dtype, **options)
        elif not there and not tensor.requires_grad and (value := self._known(tensor)) is not None:
            return value.to(dtype, copy=True)
        else:
            with contextlib.nullcontext() if there else self._on_host():
                moved = torch.ops.aten._to_copy(tensor, dtype=dtype, **options)
        if there:
            self._arriving(moved, tensor if tensor.dtype == moved.dtype else None)
        return moved
