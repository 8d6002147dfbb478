"""Autograd as it runs on a GPU: operations in place, assignments to ``data`` and ``grad``, the order of backward.

Operations that autograd runs in place on a GPU, but not under a dispatch mode.

The engine adds the second gradient of a tensor to the first in place if nobody else holds the first, and the backward
formulas of gather, index_select, indexing and value-selecting reductions fill zeros that they have just made.  Both
take a dispatch mode for a tensor subclass and make a new tensor instead, so that the recorder has to find these cases.

``tensor.data = other`` and ``tensor.grad = other`` between tensors with data and tensors without.

PyTorch allows the first between the CPU and a GPU (``VariableHooks::set_data``), but not between tensors with data and
meta tensors, which stand for the GPU's and for the host's weights.

Order of the backward pass where its own operations were recorded: gradient penalties, meta-learning, Hessians.

The autograd engine runs the node with the highest sequence number first.  Each thread counts for itself.  On a GPU the
backward pass runs in a thread of the GPU, so the nodes that ``create_graph=True`` makes have numbers of that thread,
which are often lower than those of the forward pass, and run after it.  On meta tensors everything runs in one thread,
so that they would run first, and other gradients would wait in memory.

Source: torch/csrc/autograd/engine.cpp (``CompareNodeTaskTime``), aten/src/ATen/SequenceNumber.cpp (``thread_local``).

Hooks of saved tensors in the simulated process: activations that are kept in host memory.

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
from bisect import bisect_right
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils import checkpoint
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from trainatomy.catalog.versions import behaviour
from trainatomy.simulator.operations import OperationWriter
from trainatomy.simulator.storages import HostMemory
from trainatomy.simulator.streams import Streams
from trainatomy.training.stored_weights import is_packed

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


_MAKES_ZEROS = frozenset({"aten::new_zeros", "aten::zeros", "aten::zeros_like"})
_FILLS_ZEROS = frozenset(
    {"aten::scatter", "aten::scatter_add", "aten::index_add", "aten::index_put", "aten::select_scatter"}
)
_MAX_DISTANCE = 4
"""Operations from the zeros to the one that fills them: views of the gradient and the indices may come between."""


def _reference_counts(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the number of references to a tensor and to its storage."""
    use_count = getattr(tensor, "_use_count", None)
    references = use_count() if use_count is not None else 0
    return references, torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)


class _CountProbe(TorchDispatchMode):
    """Notes the reference counts of the gradient that the engine adds to."""

    counts: tuple[int, int] | None = None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func._schema.name == "aten::add" and torch._C._current_graph_task_id() != -1:
            self.counts = _reference_counts(args[0])
        return result


class GradientReferences:
    """Reference counts of a gradient that only the autograd engine holds.

    Inside a dispatch mode a tensor has more references than the engine's own (Python's wrapper, the call's arguments).
    How many more depends on the version of PyTorch, so it is found out once with a gradient that is known to be held
    by the engine alone.
    """

    def __init__(self) -> None:
        with torch._C.DisableTorchFunction(), torch.enable_grad(), _CountProbe() as probe:
            leaf = torch.empty(2, device="meta", requires_grad=True)
            middle = leaf * 2
            (middle.sin() + middle.cos()).backward(torch.empty(2, device="meta"))
        self._exclusive = probe.counts
        self._node: int | None = None
        self._first = 0

    def allocated(self, number: int) -> None:
        """Remember which allocation is the first of the running autograd node; ``number``: a new one."""
        node = torch._C._current_autograd_node()
        running = None if node is None else node._sequence_nr()
        if running != self._node:
            self._node, self._first = running, number

    def adds_in_place(self, first: torch.Tensor, number: int | None) -> bool:
        """Return whether the engine adds to the first of two gradients in place on a GPU.

        It does if nobody else holds the first; under a dispatch mode it never does.  What a node made itself is added
        by its own formula, which makes a new tensor, unless two of its gradients belong to one tensor.  Source:
        torch/csrc/autograd/input_buffer.cpp (``accumulate``, ``can_accumulate_inplace``), torch 2.9-2.13.

        Args:
            first: The first gradient.
            number: The allocation that holds it.
        """
        if not is_dense(first) or self._exclusive is None or _reference_counts(first) != self._exclusive:
            return False
        node = torch._C._current_autograd_node()
        if number is None or node is None or number < self._first or node._sequence_nr() != self._node:
            return True
        following = [one for one in node.next_functions if one[0] is not None]
        return len(set(following)) < len(following)


class FreshZeros:
    """Finds operations of the backward pass that fill the zeros made just before.

    Source: torch/csrc/autograd/FunctionsManual.cpp and aten/src/ATen/native (``areAnyTensorSubclassLike``), torch
    2.9-2.13.
    """

    def __init__(self) -> None:
        self._key: int | None = None
        self._age = 0

    def follow(
        self,
        name: str,
        args: tuple[object, ...],
        output: torch.Tensor,
        take_over: Callable[[torch.Tensor, torch.Tensor], bool],
    ) -> None:
        """Look at one operation; call ``take_over(zeros, output)`` if CUDA would have filled the zeros in place."""
        if torch._C._current_graph_task_id() == -1:
            return
        self._age += 1
        if name in _MAKES_ZEROS:
            self._key, self._age = output.untyped_storage()._cdata, 0
            return
        target = args[0] if args else None
        if (
            name in _FILLS_ZEROS
            and self._key is not None
            and self._age <= _MAX_DISTANCE
            and isinstance(target, torch.Tensor)
        ):
            if target.untyped_storage()._cdata == self._key and target.shape == output.shape:
                take_over(target, output)
            self._key = None


def is_dense(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is non-overlapping and dense: its sorted strides are running products of the sizes."""
    expected = 1
    for stride, size in sorted((st, sz) for st, sz in zip(tensor.stride(), tensor.shape, strict=True) if sz != 1):
        if stride != expected:
            return False
        expected *= size
    return True


Handler = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]


def assignments(
    keep_on_host: Callable[[torch.Tensor], None],
    part_of: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor,
) -> dict[Any, Handler]:
    """Return handlers of the setters of ``data`` and ``grad``.

    A tensor without data takes one of the host with data as one without.  One with data becomes one without when it
    takes the data of such a tensor, and takes zeros for a gradient without data.

    Args:
        keep_on_host: Lets a meta tensor stand for one in host memory.
        part_of: Returns what a rank holds of a tensor.
    """
    data: Any = torch.Tensor.data
    gradient: Any = torch.Tensor.grad

    def plain(tensor: Any) -> bool:
        return isinstance(tensor, torch.Tensor) and tensor.layout == torch.strided and not is_packed(tensor)

    def assign(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensor, value = args
        with torch._C.DisableTorchFunction():
            if not plain(tensor) or not plain(value) or part_of(tensor).is_meta == part_of(value).is_meta:
                return func(tensor, value)
            with _disable_current_modes():
                if part_of(tensor).is_meta:
                    value = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
                    keep_on_host(value)
                elif func == gradient.__set__:
                    value = torch.zeros(value.shape, dtype=value.dtype)
                else:
                    torch._C._swap_tensor_impl(tensor, value.detach().requires_grad_(tensor.requires_grad))
                    return None
            return func(tensor, value)

    return {data.__set__: assign, gradient.__set__: assign}


_COUNTED_ANEW = 1 << 62
"""Added to the numbers of nodes that are counted as on a GPU; gradients of parameters have 2^64 - 1."""


class BackwardOrder:
    """Sequence numbers as threads of their own would give them."""

    def __init__(self) -> None:
        self._first = 0
        self._starts: list[int] = []
        self._ends: list[int] = []
        self._made = [0]  # nodes of the GPU's thread before each of its passes
        self._depth = 0
        self._keeps_nodes = False

    def install(self, stack: contextlib.ExitStack) -> None:
        """Count nodes by threads from now on, from 0 as in a process that begins; ``stack`` undoes it."""
        self._first = _next_number()
        stack.enter_context(mock.patch.object(torch.autograd, "_engine_run_backward", self._run))

    def _run(
        self, outputs: Any, gradients: Any, retain_graph: bool, create_graph: bool, *arguments: Any, **keywords: Any
    ) -> Any:
        """Run the engine: a call from inside another backward pass stays in the GPU's thread."""
        if self._depth == 0 and self._keeps_nodes:
            self._count_anew(outputs)
        self._keeps_nodes = self._keeps_nodes or create_graph
        start = _next_number()
        self._depth += 1
        try:
            return _engine(outputs, gradients, retain_graph, create_graph, *arguments, **keywords)
        finally:
            self._depth -= 1
            if self._depth == 0 and (made := _next_number() - start):
                self._starts.append(start)
                self._ends.append(start + made)
                self._made.append(self._made[-1] + made)

    def _count_anew(self, outputs: Any) -> None:
        """Give all nodes below ``outputs`` the numbers that they have on a GPU."""
        edge = torch.autograd.graph.GradientEdge
        with torch._C.DisableTorchFunction():
            waiting = [one.node if isinstance(one, edge) else one.grad_fn for one in outputs]
        while waiting:
            node: Any = waiting.pop()
            if node is None or node._sequence_nr() >= _COUNTED_ANEW:
                continue
            node._set_sequence_nr(_COUNTED_ANEW + self._on_gpu(node._sequence_nr()))
            waiting += [following for following, _ in node.next_functions]

    def _on_gpu(self, number: int) -> int:
        """Return the number that a node has in its own thread."""
        passes = bisect_right(self._starts, number)
        if passes and number < self._ends[passes - 1]:
            return self._made[passes - 1] + number - self._starts[passes - 1]
        return max(0, number - self._first - self._made[passes])


_engine = torch.autograd.graph._engine_run_backward


def _next_number() -> int:
    found: int = torch._C._autograd._get_sequence_nr()
    return found
