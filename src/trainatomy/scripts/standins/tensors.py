"""Parameters without data, and values that only a GPU would compute."""

from __future__ import annotations

import weakref
from functools import partial
from math import prod
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter
from torch.utils._device import _device_constructors
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from trainatomy.scripts.standins.notes import StandIns
from trainatomy.simulator import execution, placement
from trainatomy.simulator.placement import CPU


def install(stand_ins: StandIns) -> None:
    """Put them in place."""
    _device_constructors()  # a cache, which is to hold PyTorch's own functions
    stand_ins.put(nn.Parameter, "__new__", staticmethod(_parameter(stand_ins, nn.Parameter.__new__)))
    stand_ins.put(UninitializedParameter, "__new__", staticmethod(_uninitialized(stand_ins)))
    stand_ins.put(torch, "empty", _empty(stand_ins, torch.empty))
    stand_ins.process.functions.host_factories = frozenset({"meta"})
    _install_values(stand_ins)
    stand_ins.process.recorder.mixed.checks_weights = True
    results = stand_ins.process.recorder.execution.results
    stand_ins.put(results, "run", _on_host(stand_ins, results.run))


def _parameter(stand_ins: StandIns, original: Any) -> Any:
    """Return ``Parameter.__new__`` that makes tensors without data, in host memory.

    They keep their identity when a model moves to the GPU, which parameters with data would not.
    """
    storages = stand_ins.process.storages

    def make(cls: Any, data: Any = None, requires_grad: bool = True, **more: Any) -> Any:
        with torch._C.DisableTorchFunction():
            if isinstance(data, torch.Tensor) and not data.is_meta and data.device.type == "cpu":
                with _disable_current_modes():
                    data = torch.empty_like(data.detach(), device="meta")
                    storages.mark_host([data])
                    return original(cls, data, requires_grad, **more)
            return original(cls, data, requires_grad, **more)

    return make


def _uninitialized(stand_ins: StandIns) -> Any:
    """Return ``UninitializedParameter.__new__`` (lazy modules) that makes parameters in host memory without data."""

    def make(cls: Any, requires_grad: bool = True, device: Any = None, dtype: Any = None) -> Any:
        place = torch.device(device) if device is not None else torch.get_default_device()
        if place != CPU:
            return torch.Tensor._make_subclass(cls, torch.empty(0, device=device, dtype=dtype), requires_grad)
        with torch._C.DisableTorchFunction(), _disable_current_modes():
            data = torch.empty(0, device="meta", dtype=dtype)
            stand_ins.process.storages.mark_host([data])
            return torch.Tensor._make_subclass(cls, data, requires_grad)

    return make


_LARGE = 2**26
"""Elements from which on an empty tensor of the CPU takes no memory: this machine may have no room for the weight."""


def _empty(stand_ins: StandIns, original: Any) -> Any:
    """Return ``torch.empty`` that makes large floating-point tensors of the CPU without memory."""

    def make(*size: Any, **options: Any) -> torch.Tensor:
        shape = size[0] if len(size) == 1 and isinstance(size[0], list | tuple) else size
        large = all(type(one) is int for one in shape) and prod(shape) >= _LARGE
        dtype = options.get("dtype") or torch.get_default_dtype()
        place = torch.device(options.get("device") or torch.get_default_device()) if large else None
        if place != CPU or not dtype.is_floating_point or options.get("pin_memory"):  # a pinned one has none anyway
            return original(*size, **options)
        with torch._C.DisableTorchFunction(), _disable_current_modes():
            made: torch.Tensor = original(*size, **{**options, "device": "meta", "pin_memory": False})
            stand_ins.process.storages.mark_host([made])
        return made

    return make


def _on_host(stand_ins: StandIns, original: Any) -> Any:
    """Return the executor of operations that also computes on the CPU with weights, which have no data there.

    Where all meta tensors of an operation stand for the host's, its tensors with data become such, too.
    """
    storages = stand_ins.process.storages

    def run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            return original(func, args, kwargs)
        except RuntimeError as error:
            tensors = [one for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)]
            without = [one for one in tensors if one.is_meta]
            on_gpu = any(storages.on_device(one) for one in without)
            if "device" not in str(error) or on_gpu or not without or func._schema.is_mutable:
                raise

        def emptied(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor) or leaf.is_meta:
                return leaf
            made = torch.empty_like(leaf, device="meta")
            storages.mark_host([made])
            return made

        return original(func, *tree_map(emptied, (args, kwargs)))

    return run


def _keep_array(stand_ins: StandIns, array: Any) -> None:
    """Count an array of values that came from the GPU as long as it lives."""
    host = stand_ins.process.storages.host_memory
    host.keep(id(array), array.nbytes, pinned=False)
    weakref.finalize(array, host.drop, id(array)).atexit = False


def _install_values(stand_ins: StandIns) -> None:
    """Let computed values that Python reads be 0, and note it."""

    def assumed(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        stand_ins.note("computed values", "tensors")
        return torch.zeros((), dtype=dtype or tensor.dtype, device="cpu").expand(tensor.shape).clone()

    stand_ins.put(placement, "assumed_values", assumed)
    stand_ins.put(stand_ins.process.placement, "array_made", partial(_keep_array, stand_ins))
    stand_ins.put(execution, "assumed_values", assumed)
    reads = stand_ins.process.recorder.scalar_reads
    original = reads._scalar

    def scalar(tensor: torch.Tensor) -> bool | int | float:
        if stand_ins.process.recorder.values.of(tensor) is None:
            stand_ins.note("computed values", "bools" if tensor.dtype == torch.bool else "numbers")
        return original(tensor)

    stand_ins.put(reads, "_scalar", scalar)
    stand_ins.put(stand_ins.process.recorder.sizes, "assumes", lambda _: stand_ins.note("selection"))
