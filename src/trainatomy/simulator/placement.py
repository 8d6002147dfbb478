"""Devices of tensors: answers when Python asks where a tensor is, and moves between host and GPU.

Handlers run with the simulation's function mode popped, so the calls inside see plain meta tensors.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.nn.parameter import UninitializedBuffer, is_lazy

from trainatomy.errors import SimulationError
from trainatomy.simulator.autograd import Handler, assignments, is_dense
from trainatomy.simulator.data_dependent import assumed_values
from trainatomy.simulator.driver import CurrentDevice
from trainatomy.simulator.storages import Storages
from trainatomy.training.stored_weights import is_packed, numbers, rebuilt

CPU = torch.device("cpu")
META = torch.device("meta")
NO_DATA = "Cannot copy out of meta tensor; no data!"
"""How PyTorch's error begins where a tensor of its meta device is moved."""


def names_cuda(device: Any) -> bool:
    """Return whether a ``device`` argument of any kind (string, index, torch.device) names a GPU."""
    if device is None or isinstance(device, bool):
        return False
    if isinstance(device, int):
        return True
    return torch.device(device).type == "cuda"


def _getter(name: str) -> Callable[..., Any]:
    """Return the function that a mode receives when Python reads an attribute of a tensor."""
    getter: Callable[..., Any] = getattr(torch.Tensor, name).__get__
    return getter


class Placement:
    """Handlers of one simulation, by function.

    Args:
        current: GPU of the process.
        storages: Location of meta tensors.
        arrived: Called with a tensor that was copied to the GPU, and with its source where that has its values.
        on_host: Context in which meta tensors that are made stand for tensors in host memory.
        known: Returns the values of a tensor, None if they are unknown.  A tensor with known values comes back to the
            host with them (``pack_padded_sequence`` needs its lengths so).
        wait: Lets the CPU wait for the current stream.

    Attributes:
        array_made: Called with each NumPy array that is made of a tensor without data.
    """

    def __init__(
        self,
        current: CurrentDevice,
        storages: Storages,
        arrived: Callable[[torch.Tensor, torch.Tensor | None], None],
        on_host: Callable[[], AbstractContextManager[None]],
        known: Callable[[torch.Tensor], torch.Tensor | None],
        wait: Callable[[], None],
    ) -> None:
        self.gpu = current.device
        self._current = current
        self._storages = storages
        self._arrived = arrived
        self._on_host = on_host
        self._known = known
        self._wait = wait
        self.array_made: Callable[[Any], object] = lambda array: None

    def handlers(self) -> dict[Any, Handler]:
        """Return all handlers by the function (or property getter) that they answer for."""
        t = torch.Tensor
        return {
            _getter("device"): self._device,
            _getter("is_cuda"): self._is_cuda,
            _getter("is_meta"): lambda f, a, k: False,
            _getter("is_cpu"): self._is_cpu,
            t.get_device: lambda f, a, k: self.gpu_of(a[0]).index if self._is_cuda(f, a, k) else -1,
            t.to: self._to,
            t.cuda: self._cuda,
            t.cpu: lambda f, a, k: self.move(a[0], CPU),
            t.pin_memory: lambda f, a, k: self._pin(a[0]),
            t.is_pinned: lambda f, a, k: self._is_pinned(a[0]),
            t.type: self._type,
            t.copy_: self._copy_into,
            t.numpy: self._numpy,
            t.tolist: self._tolist,
            t.new_tensor: self._new_tensor,
            t.__getitem__: self._at,
            t.__setitem__: self._at,
            torch.device: self._torch_device,
            **assignments(self.keep_on_host),
            torch._C._nn._parse_to: self._parse_to,
        }

    def is_device(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor stands for one in GPU memory."""
        if is_packed(tensor):
            tensor = numbers(tensor)
        return tensor.is_meta and self._storages.on_device(tensor)

    def arrive(self, tensor: torch.Tensor) -> None:
        """Let a tensor that was made lie in GPU memory, if it does not yet."""
        if tensor.is_meta and not self._storages.on_device(tensor):
            self._arrived(tensor, None)

    def leaving_host(self) -> AbstractContextManager[None]:
        """Return a context in which tensors are made that arrive on the GPU (``arrive``)."""
        return self._storages.leaving()

    def is_building(self) -> bool:
        """Return whether a model is built on the host now, whose tensors are made on the meta device."""
        return self._storages.host_memory.stage() == "host"

    def keep_on_host(self, tensor: torch.Tensor, *, pinned: bool = False, takes_memory: bool = True) -> None:
        """Let a meta tensor stand for one in host memory; one of the meta device takes none."""
        with torch._C.DisableTorchFunction():
            self._storages.mark_host([tensor], pinned=pinned, takes_memory=takes_memory)

    def _pin(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy in pinned memory of a tensor without data in host memory; others as they are."""
        with torch._C.DisableTorchFunction():
            if not tensor.is_meta or self._storages.on_device(tensor) or self._storages.is_pinned(tensor):
                return tensor
            with torch._C._DisableTorchDispatch():
                made = torch.empty_like(tensor.detach(), device=META)
            self._storages.mark_host([made], pinned=True)
        return made

    def _is_pinned(self, tensor: torch.Tensor) -> bool:
        with torch._C.DisableTorchFunction():
            return tensor.is_meta and self._storages.is_pinned(tensor)

    def check(self, device: Any) -> torch.device:
        """Return the GPU that ``device`` names; raise SimulationError if this process does not simulate it."""
        return self._current.devices[self._current.check(device)]

    def on(self, device: Any) -> AbstractContextManager[object]:
        """Return a context in which the GPU that ``device`` names is the current one."""
        self.check(device)
        return contextlib.nullcontext()

    def gpu_of(self, tensor: torch.Tensor) -> torch.device:
        """Return the GPU that holds a tensor."""
        return self.gpu

    def _parse_to(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Read the arguments of ``nn.Module.to``; C++ finds no accelerator for a device that is a number.

        A meta device gets a number, by which ``_to`` knows that the training asked for it.
        """
        if args and type(args[0]) is int:
            args = (torch.device("cuda", args[0]), *args[1:])
        if type(kwargs.get("device")) is int:
            kwargs = {**kwargs, "device": torch.device("cuda", kwargs["device"])}
        device, *rest = func(*args, **kwargs)
        return (torch.device("meta", 0) if device is not None and device.type == "meta" else device, *rest)

    def _torch_device(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device:
        """Return ``torch.device(0)`` as a GPU; C++ finds no accelerator."""
        if len(args) == 1 and type(args[0]) is int and not kwargs:
            return torch.device("cuda", args[0])
        device: torch.device = func(*args, **kwargs)
        return device

    def _device(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device:
        tensor = args[0]
        if not tensor.is_meta:
            return tensor.device
        if self._storages.on_device(tensor):
            return self.gpu_of(tensor)
        return CPU if self._storages.has_data(tensor) else META

    def _is_cuda(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        return self.is_device(args[0])

    def _is_cpu(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        return not self.is_device(args[0])

    def _cuda(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        return self.move(args[0], self.check(args[1] if len(args) > 1 else kwargs.get("device")))

    def _numpy(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return an array with known or assumed values; a detector passes the costs of its matches to SciPy so."""
        tensor = args[0]
        if not tensor.is_meta:
            return func(*args, **kwargs)
        if self.is_device(tensor):
            raise TypeError("can't convert a CUDA tensor to numpy: copy it to the host with .cpu() first")
        if tensor.requires_grad and not kwargs.get("force"):
            raise RuntimeError("can't convert a tensor that requires grad to numpy: use .detach() first")
        values = self._assumed(tensor)
        if values is None:
            raise SimulationError(
                f"a NumPy array of computed {tensor.dtype} values cannot be made without data: what follows depends on "
                "values that do not exist in a run without a GPU.\nMeasure this model with `trainatomy measure`",
                operation="Tensor.numpy",
            )
        array = values.clone().numpy()
        self.array_made(array)
        return array

    def _assumed(self, tensor: torch.Tensor) -> torch.Tensor | None:
        known = self._known(tensor)
        return assumed_values(tensor) if known is None else known

    def _tolist(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return known or assumed values as a list."""
        values = self._assumed(args[0]) if args[0].is_meta else None
        return func(*args, **kwargs) if values is None else values.tolist()

    def _new_tensor(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make a tensor from data of the host, by default of the dtype and on the device of another one."""
        like, data = args[0], (args[1] if len(args) > 1 else kwargs["data"])
        device = kwargs.get("device")
        if not (self.is_device(like) if device is None else names_cuda(device)):
            return func(*args, **{**kwargs, "device": CPU})
        gpu = self.gpu_of(like) if device is None else self.check(device)
        made = torch.tensor(data, dtype=kwargs.get("dtype") or like.dtype)
        return self.move(made, gpu).requires_grad_(kwargs.get("requires_grad", False))

    def _at(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Index a tensor; an index that is a list becomes a tensor on the device of the indexed one, with its values.

        Source: torch/csrc/autograd/python_variable_indexing.cpp (``sequenceToVariable``), torch 2.9-2.13.
        """
        tensor, index = args[:2]
        several = isinstance(index, tuple)
        indices = index if several else (index,)
        if any(type(one) is list for one in indices) and self.is_device(tensor):
            indices = tuple(self._list_to_tensor(one, self.gpu_of(tensor)) for one in indices)
            return func(tensor, indices if several else indices[0], *args[2:], **kwargs)
        return func(*args, **kwargs)

    def _list_to_tensor(self, index: Any, gpu: torch.device) -> Any:
        """Return a list of numbers or bools as a tensor on the GPU, everything else unchanged."""
        plain = type(index) is list and index and all(isinstance(one, int) for one in index)
        return self.move(torch.tensor(index), gpu) if plain else index

    def _type(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Answer ``type()`` and ``type("torch.cuda.HalfTensor")``; a dtype moves nothing."""
        tensor, target = args[0], (args[1] if len(args) > 1 else kwargs.get("dtype"))
        if target is None:
            kind = func(tensor).rpartition(".")[2]
            return f"torch.cuda.{kind}" if self.is_device(tensor) else f"torch.{kind}"
        if isinstance(target, type):  # torch.cuda.FloatTensor, torch.FloatTensor
            target = f"{target.__module__}.{target.__name__}"
        if isinstance(target, str):
            place, _, kind = target.rpartition(".")
            return self.move(tensor, self.check(None) if place == "torch.cuda" else CPU, getattr(torch, kind).dtype)
        return func(*args, **kwargs)

    def _copy_into(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Copy into a tensor; to one in host memory that is laid out otherwise, by way of a contiguous copy on the GPU.

        A copy of pinned memory that blocks is one that does not, and a wait for the stream.
        Source: aten/src/ATen/native/cuda/Copy.cu (``copy_requires_temporaries``, ``copy_kernel_cuda``), torch 2.9-2.13.
        """
        target, source = args[:2]
        if isinstance(source, torch.Tensor) and self.is_device(source) and not self.is_device(target):
            is_alike = source.dtype == target.dtype and source.stride() == target.stride() and is_dense(source)
            if not is_alike:
                source = source.expand_as(target).contiguous()
        later = bool(args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
        if later or not isinstance(source, torch.Tensor) or not self._is_pinned_copy(target, source):
            return func(target, source, *args[2:], **kwargs)
        copied = func(target, source, non_blocking=True)
        self._wait()
        return copied

    def _is_pinned_copy(self, target: torch.Tensor, source: torch.Tensor) -> bool:
        """Return whether one of the tensors lies in pinned host memory and the other one on the GPU."""
        if self.is_device(target) == self.is_device(source):
            return False
        with torch._C.DisableTorchFunction():
            return any(one.is_meta and self._storages.is_pinned(one) for one in (target, source))

    def _to(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensor, rest = args[0], args[1:]
        if rest and isinstance(rest[0], torch.Tensor):
            other = rest[0]
            target = self.gpu_of(other) if self.is_device(other) else CPU
            return self.move(tensor, target, other.dtype, **kwargs)
        named = kwargs.get("device")
        if named is None and rest and isinstance(rest[0], (str, int, torch.device)) and not isinstance(rest[0], bool):
            named, rest = rest[0], rest[1:]
        if named is None:
            return func(*args, **kwargs)
        device = self.check(named) if names_cuda(named) else torch.device(named)
        options = {k: v for k, v in kwargs.items() if k != "device"}
        names = ("dtype", "non_blocking", "copy") if "dtype" not in options else ("non_blocking", "copy")
        options.update(zip(names, rest, strict=False))
        dtype = options.pop("dtype", None)
        if device.type == "meta" and (isinstance(named, str) or device.index is not None):
            return self._without_data(tensor, dtype or tensor.dtype)
        if device.type == "meta":  # C++ says so of the tensors that stand for those of the GPU
            return func(*args, **kwargs)
        return self.move(tensor, device, dtype, **options)

    def _without_data(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor of the meta device, which counts as one in host memory; it takes no memory."""
        if tensor.is_meta and tensor.dtype == dtype and not self.is_device(tensor):
            return tensor
        with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
            made = torch.empty_strided(tensor.size(), tensor.stride(), dtype=dtype, device=META)
        self.keep_on_host(made, takes_memory=False)
        return made

    def move(
        self,
        tensor: torch.Tensor,
        device: torch.device,
        dtype: torch.dtype | None = None,
        non_blocking: bool = False,
        copy: bool = False,
        **options: Any,
    ) -> torch.Tensor:
        """Copy a tensor between host and GPU, as ``Tensor.to`` does."""
        if tensor.is_meta and not self._storages.has_data(tensor):
            raise NotImplementedError(NO_DATA)
        if is_packed(tensor):
            return rebuilt(tensor, lambda part: self.move(part, device, None, non_blocking, copy, **options))
        to_gpu = device.type == "cuda"
        if is_lazy(tensor):
            with torch._C.DisableTorchFunction():
                made = torch.empty(0, dtype=dtype or tensor.dtype, device=META)
                if not to_gpu:
                    self.keep_on_host(made)
                if isinstance(tensor, UninitializedBuffer):  # of a parameter, only the data changes
                    made = torch.Tensor._make_subclass(type(tensor), made)
                    made.persistent = tensor.persistent
            return made
        is_on_gpu = self.is_device(tensor)
        dtype, waits = dtype or tensor.dtype, False
        if is_on_gpu == to_gpu:
            return torch.Tensor.to(tensor, dtype, copy=copy, **options)  # a subclass may have a ``to`` of its own
        if not tensor.is_meta:
            source = tensor if tensor.requires_grad else tensor.detach()
            moved = torch.Tensor.to(source, META, dtype, **options)
        elif not to_gpu and not tensor.requires_grad and (value := self._known(tensor)) is not None:
            return value.to(dtype, copy=True)
        else:
            if not to_gpu and not is_dense(tensor):
                tensor = tensor.contiguous()  # see ``_copy_into``
            waits = to_gpu and not non_blocking and self._storages.is_pinned(tensor)
            with self._storages.leaving() if to_gpu else self._copying_to_host(pinned=non_blocking):
                later = {"non_blocking": True} if non_blocking or waits else {}
                moved = torch.ops.aten._to_copy(tensor, dtype=dtype, **later, **options)
        if to_gpu:
            self._arrived(moved, _converted(tensor, moved.dtype))
            if waits:
                self._wait()
        return moved

    @contextlib.contextmanager
    def _copying_to_host(self, *, pinned: bool) -> Iterator[None]:
        """Let what is made stand for tensors in host memory: pinned for a copy that does not block.

        Source: aten/src/ATen/native/TensorConversions.cpp (``_to_copy``: ``pin_out``), torch 2.9-2.13.
        """
        before, self._storages.pins = self._storages.pins, pinned
        try:
            with self._on_host():
                yield
        finally:
            self._storages.pins = before


def _converted(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor | None:
    """Return a tensor of the host as what it becomes on the GPU; None where that is of no interest: other numbers."""
    if tensor.dtype == dtype:
        return tensor
    return None if tensor.is_meta or dtype.is_floating_point or dtype.is_complex else tensor.to(dtype)
