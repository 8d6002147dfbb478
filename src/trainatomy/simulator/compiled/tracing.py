"""Traces on meta tensors as a GPU's: with the operators that CUDA runs, and given to Inductor as graphs of the GPU."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx
from torch._subclasses import fake_tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

_aten: Any = torch.ops.aten
_nn: Any = torch._C._nn


def nll_loss_nd(
    input: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    reduction: int = 1,
    ignore_index: int = -100,
) -> torch.Tensor:
    """Run the operators that ``nll_loss_nd`` consists of: with Python's dispatcher, autograd does not know it.

    Source: aten/src/ATen/native/LossNLL.cpp (``nll_loss_nd_symint``).
    """
    if input.dim() in (1, 2):
        flat: torch.Tensor = _aten.nll_loss_forward(input, target, weight, reduction, ignore_index)[0]
        return flat
    if input.dim() == 4:
        planes: torch.Tensor = _aten.nll_loss2d_forward(input, target, weight, reduction, ignore_index)[0]
        return planes
    batch, classes, shape = input.shape[0], input.shape[1], input.shape[2:]
    logits, classes_wanted = input.reshape(batch, classes, 1, -1), target.reshape(batch, 1, -1)
    loss: torch.Tensor = _aten.nll_loss2d_forward(logits, classes_wanted, weight, reduction, ignore_index)[0]
    return loss if reduction else loss.view(batch, *shape)


FUNCTIONS = {_nn.nll_loss_nd: nll_loss_nd}
"""Operators that a compiler cannot trace as CUDA runs them, and what runs in their place."""


class BelowFunctions(TorchDispatchMode):
    """Keeps the process's function mode out of the compiler's own dispatch modes."""

    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        traces = isinstance(func, torch._ops.HigherOrderOperator)  # functions of its own, with modes of its own
        with without_function_modes() if traces else torch._C.DisableTorchFunction():
            return func(*args, **kwargs or {})


@contextlib.contextmanager
def without_function_modes() -> Iterator[None]:
    """Run the block as if the function modes around it were not there."""
    modes = [torch._C._pop_torch_function_stack() for _ in range(torch._C._len_torch_function_stack())]
    try:
        yield
    finally:
        for mode in reversed(modes):
            torch._C._push_on_torch_function_stack(mode)


class _AutocastBackward(TorchDispatchMode):
    """Casts the operands of the products that autograd's formulas consist of, as autocast does.

    AOTAutograd traces the backward pass with the autocast that is on around what is compiled, which an eager backward
    pass does not see (``torch._functorch.config.backward_pass_autocast``, torch 2.11-2.15).
    """

    supports_higher_order_operators = True

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype = dtype

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _PRODUCTS:
            args = tree_map(self._cast, args)
        return func(*args, **kwargs or {})

    def _cast(self, value: Any) -> Any:
        """Return a tensor of float32 in autocast's type, everything else unchanged."""
        is_cast = isinstance(value, torch.Tensor) and value.dtype == torch.float32
        return value.to(self._dtype) if is_cast else value


_PRODUCTS = frozenset({_aten.mm.default, _aten.bmm.default, _aten.addmm.default, _aten.baddbmm.default})


@contextlib.contextmanager
def tracing_backward(tagged: Callable[[], contextlib.AbstractContextManager[Any]]) -> Iterator[None]:
    """Trace a backward pass, given the context in which AOTAutograd does."""
    with tagged(), contextlib.ExitStack() as stack:
        if torch.is_autocast_enabled("cuda"):
            stack.enter_context(_AutocastBackward(torch.get_autocast_dtype("cuda")))
        yield


GPU = torch.device("cuda", 0)


def put_on_gpu(module: fx.GraphModule, mode: Any) -> fx.GraphModule:
    """Let every value and every device of a graph that stand for the GPU's be of the GPU.

    Args:
        module: The graph, which is changed.
        mode: Fake mode of its values.
    """
    for node in module.graph.nodes:
        if "val" in node.meta:
            node.meta["val"] = on_gpu(node.meta["val"], mode)
        node.meta.pop("tensor_meta", None)
        node.args = fx.node.map_aggregate(node.args, on_cuda)
        node.kwargs = fx.node.map_aggregate(node.kwargs, on_cuda)
    module.recompile()
    return module


def on_gpu(value: Any, mode: Any) -> Any:
    """Return fake tensors of the meta device as such of the GPU, everything else unchanged."""
    if isinstance(value, torch.Tensor) and value.device.type == "meta":
        made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
        found = fake_tensor.FakeTensor(mode, made, GPU)
        return found.as_strided(value.shape, value.stride(), offset) if (offset := value.storage_offset()) else found
    if isinstance(value, (list, tuple)):
        return type(value)(on_gpu(each, mode) for each in value)
    return value


def off_gpu(value: Any) -> Any:
    """Return fake tensors of the GPU as such of the meta device, everything else unchanged.

    Where DDP splits a graph at its buckets, Dynamo takes the results of one part, as its code leaves them, to trace the
    next one (torch/_dynamo/backends/distributed.py, ``FakeifyFirstAOTInvocationGuard``).
    """
    if isinstance(value, fake_tensor.FakeTensor) and value.device.type == "cuda":
        with value.fake_mode:
            made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
            return made.requires_grad_(value.requires_grad)
    return value


def on_cuda(value: Any) -> Any:
    """Return the meta device as the GPU, everything else unchanged."""
    return GPU if isinstance(value, torch.device) and value.type == "meta" else value
