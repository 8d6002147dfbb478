"""Hooks of saved tensors in the simulated process: activations that are kept in host memory.

PyTorch's ``save_on_cpu``, transformers' checkpoints with ``offload`` and TRL's ``OffloadActivations`` use such hooks to
copy what autograd saves to host memory, and back in backward.  Their own code runs.  It needs four things:

- Autograd calls the hook that packs a tensor from inside an operation, where Python's function modes are off: hooks run
  with the simulation's mode on (``hooks_in_mode``).
- Storages of meta tensors have no address, by which TRL tells tensors apart: each gets one (``addresses``).
- Hooks see what checkpoints save for their recomputation, which differs between releases (``checkpoint_inputs``).
- ``save_on_cpu`` waits for its copies to pinned memory in older releases (``blocking_copies``).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils import checkpoint

from trainatomy.catalog.versions import behaviour
from trainatomy.simulator.operations import OperationWriter
from trainatomy.simulator.storages import HostMemory
from trainatomy.simulator.streams import Streams

Hook = Callable[[Any], Any]
_SPREAD, _ADDRESSES, _ALIGNED = 0x9E3779B97F4A7C15, 1 << 62, 512
"""An odd factor, the number of addresses and their alignment: storages that lie side by side get distant ones."""


def hooks_in_mode(
    stack: contextlib.ExitStack,
    mode: TorchFunctionMode,
    host: HostMemory,
    streams: Streams,
    operations: OperationWriter,
) -> None:
    """Let hooks of saved tensors run with a function mode on, and count them; ``stack`` undoes it.

    Args:
        stack: Undoes it.
        mode: The function mode of the simulation.
        host: Counts what hooks that pack put into host memory.
        streams: Of the process.  Autograd has made the node already that a tensor is saved for, and no operation of the
            hook: the stream that a hook chooses is not that of the node.
        operations: Counts the calls of hooks.
    """
    autograd: Any = torch._C._autograd
    push = autograd._push_saved_tensors_default_hooks

    def push_in_mode(pack: Hook, unpack: Hook) -> None:
        owner = getattr(pack, "__qualname__", "").partition(".")[0]

        def pack_apart(tensor: Any) -> Any:
            operations.count_call(owner)
            before = host.counts, streams.makes_nodes
            host.counts, streams.makes_nodes = True, False
            try:
                return _run(pack, tensor, mode)
            finally:
                host.counts, streams.makes_nodes = before

        def unpack_counted(packed: Any) -> Any:
            operations.count_call(owner)
            return _run(unpack, packed, mode)

        push(pack_apart, unpack_counted)

    stack.enter_context(mock.patch.object(autograd, "_push_saved_tensors_default_hooks", push_in_mode))


def _run(hook: Hook, value: Any, mode: TorchFunctionMode) -> Any:
    """Run a hook with a function mode on, once."""
    with torch._C._EnableTorchFunction():
        is_on = mode in _get_current_function_mode_stack()
        with contextlib.nullcontext() if is_on else mode:
            return hook(value)


def addresses(stack: contextlib.ExitStack) -> None:
    """Give storages of meta tensors addresses, which differ while they live; ``stack`` undoes it."""
    address = torch.UntypedStorage.data_ptr

    def data_ptr(storage: torch.UntypedStorage) -> int:
        if storage.device.type != "meta" or not storage.nbytes():
            return address(storage)
        return storage._cdata * _SPREAD % _ADDRESSES // _ALIGNED * _ALIGNED

    stack.enter_context(mock.patch.object(torch.UntypedStorage, "data_ptr", data_ptr))


def checkpoint_inputs(stack: contextlib.ExitStack, torch_version: tuple[int, int]) -> None:
    """Let checkpoints that are not reentrant save what they save in ``torch_version``; ``stack`` undoes it.

    Up to 2.11 an autograd function saves the inputs, and before them an empty tensor of the CPU that requires grad.
    Hooks pack that tensor, too: TRL counts it among the last five tensors, which it keeps on the GPU in forward.
    Source: torch/utils/checkpoint.py (``_NoopSaveInputs`` of 2.11, ``_CheckpointFrame.save_inputs`` of 2.13).
    """
    frame: Any = checkpoint._CheckpointFrame
    saved_by_function = not hasattr(frame, "save_inputs")  # the installed release does it by itself
    if saved_by_function or not behaviour("checkpoints_save_an_empty_tensor", torch_version):
        return
    save, get = frame.save_inputs, frame.get_inputs

    def save_inputs(self: Any, *inputs: Any) -> None:
        with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():  # it is in the cost of a checkpoint
            empty = torch.empty((0,), requires_grad=True)
        save(self, empty, *inputs)

    def get_inputs(self: Any) -> list[Any]:
        return list(get(self)[1:])

    stack.enter_context(mock.patch.multiple(frame, save_inputs=save_inputs, get_inputs=get_inputs))


def blocking_copies(stack: contextlib.ExitStack, torch_version: tuple[int, int], streams: Streams) -> None:
    """Let the CPU wait for each copy of ``save_on_cpu`` to pinned memory as in ``torch_version``; ``stack`` undoes it.

    Where the installed release waits by itself, waiting once more changes nothing.
    """
    if not behaviour("copies_of_save_on_cpu_block", torch_version):
        return
    hooks: Any = torch.autograd.graph.save_on_cpu
    make = hooks.__init__

    def make_blocking(self: Any, pin_memory: bool = False, *args: Any, **options: Any) -> None:
        make(self, pin_memory, *args, **options)
        if pin_memory:
            self.pack_hook = _followed_by(self.pack_hook, lambda: streams.executing.synchronize())

    stack.enter_context(mock.patch.object(hooks, "__init__", make_blocking))


def _followed_by(pack: Hook, then: Callable[[], object]) -> Hook:
    def pack_then(tensor: Any) -> Any:
        packed = pack(tensor)
        then()
        return packed

    return pack_then
