"""Inductor's code around its kernels, executed in a simulated process: it allocates, kernels do nothing."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch._inductor import async_compile
from torch._prims_common import make_contiguous_strides_for

from trainatomy.errors import SimulationError
from trainatomy.operators.allocation.above_autograd import no_operation, one_operation
from trainatomy.simulator.adapters.triton import write_launch
from trainatomy.simulator.compiled.source import flex_shapes, read_source
from trainatomy.simulator.compiled.trials import Trials
from trainatomy.simulator.flex.attention import BACKWARD, FORWARD

_RANDOM = "torch.ops.higher_order.graphsafe_run_with_rng_state"
"""Name of what runs a random operator with the state of a generator, so that recomputation draws the same numbers."""
GRAPH = "compiled_graph"
"""Name of calls of compiled graphs among what takes the CPU time besides operations."""
Call = Callable[[list[Any]], Any]


def load_wrapper(text: str, trials: Trials, count: Callable[[str], None]) -> SimpleNamespace:
    """Return the module of a wrapper: ``call`` runs a graph, given a list of its inputs that it empties.

    Args:
        text: Inductor's code.
        trials: Tries kernels before their first launch.
        count: Counts its calls, which take the CPU time besides their kernels.

    Returns:
        The module; ``call`` has the code as ``source``.
    """
    space: dict[str, Any] = {"__name__": "compiled", "__file__": "compiled"}
    with mock.patch.object(async_compile, "AsyncCompile", partial(_Kernels, trials)):
        exec(compile(text.replace(_RANDOM, "with_rng_state"), "<inductor>", "exec"), space)
    space.update(
        empty_strided_cuda=_buffer,
        reinterpret_tensor=_reinterpret,
        assert_size_stride=lambda *arguments: None,
        assert_alignment=lambda *arguments: None,
        copy_misaligned=lambda tensor: tensor,
        extern_kernels=_ExternKernels(),
        with_rng_state=lambda operator, *arguments, rng_state=None, **options: operator(*arguments, **options),
    )
    call: Call = space["call"]

    def run(inputs: list[Any]) -> Any:
        count(GRAPH)
        return call(inputs)

    run.source = text  # type: ignore[attr-defined]
    parts = {name: space.get(name) for name in ("runner", "recursively_apply_fns")}
    return SimpleNamespace(call=run, __file__="", key="", **parts)


def _buffer(size: Any, stride: Any, dtype: torch.dtype) -> torch.Tensor:
    with no_operation("aten::empty_strided"):
        return torch.empty_strided(size, stride, dtype=dtype, device="cuda")


def _reinterpret(tensor: torch.Tensor, size: Any, stride: Any, offset: int = 0) -> torch.Tensor:
    with no_operation("aten::as_strided"):
        return torch.as_strided(tensor, size, stride, offset + tensor.storage_offset())


class _ExternKernels:
    """Kernels of libraries: those of PyTorch."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


class _Kernels:
    """Inductor's ``AsyncCompile``: makes kernels that do nothing."""

    def __init__(self, trials: Trials) -> None:
        self._trials = trials

    def triton(self, name: str, source: str, **options: Any) -> _Kernel:
        return _Kernel(name, source, self._trials)

    def wait(self, scope: dict[str, Any]) -> None:
        """Nothing is compiled."""


_OF_LIBRARY = "user_autotune"
"""Kind of the kernels that Dynamo found in Python that it traced, which Inductor only launches."""


_TEMPLATE = "template"
"""Kind of the kernels that Inductor fills in a template for."""


class _Kernel:
    """A kernel that Inductor generated, or that of a library."""

    def __init__(self, name: str, source: str, trials: Trials) -> None:
        self.name = name
        self._source, self._trials = source, trials
        self._said = read_source(source)

    def run(self, *arguments: Any, **options: Any) -> None:
        """Write a launch, with the memory in which the kernel is tried before its first one."""
        self._trials.before(self._source, arguments)
        if self._said.kind == _OF_LIBRARY:
            write_launch(self.name, dict(zip(self._said.names, arguments, strict=False)))
            return
        if self._said.kind == _TEMPLATE:
            self._write_template(dict(zip(self._said.names, arguments, strict=False)))
            return
        tensors = [each for each in arguments if isinstance(each, torch.Tensor)]
        moved = self._said.moved_bytes(arguments)
        with one_operation("inductor::fused", *tensors, kernel=self.name, bytes=moved, **self._said.numbers(arguments)):
            pass

    def _write_template(self, named: dict[str, Any]) -> None:
        """Write a launch of FlexAttention, with all blocks of scores; what the mask leaves out is not known here.

        Raises:
            SimulationError: The kernel is of another template, or for sizes that vary.
        """
        shapes = flex_shapes(self._source) if "flex_attention" in self.name else None
        if shapes is None:
            raise SimulationError(
                f"torch.compile: the kernel {self.name} is of a template of Inductor that is not simulated"
            )
        tensors = [
            _reinterpret(named[name], shape, make_contiguous_strides_for(shape))
            for name, shape in zip(("arg_Q", "arg_K", "arg_V"), shapes, strict=True)
        ]
        gradients = [named[name] for name in ("arg_DO",) if name in named]
        with one_operation(BACKWARD if gradients else FORWARD, *gradients, *tensors, kept=1.0):
            pass
