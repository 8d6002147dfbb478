"""Inductor's code around its kernels, executed in a simulated process: it allocates, kernels do nothing.

Kernels of Inductor that are tried before their first launch.

A kernel that Inductor writes may have several settings (how many numbers a block of threads computes, how many warps).
On its first launch each setting is timed: the arguments that the kernel overwrites are copied for each run, unless
that would raise the peak, and a buffer as large as the L2 cache is overwritten between two runs.  All of it is released
soon, but its segments stay.

Source: torch 2.11-2.13, torch/_inductor/runtime/triton_heuristics.py (``CachingAutotuner.run``, ``bench``) and
benchmarking.py (``InductorBenchmarker.benchmark_gpu``).  Inductor keeps the best settings in files, so that a later
training with the same code does not try them; the first one is simulated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._inductor import async_compile
from torch._inductor.runtime import triton_helpers, triton_heuristics
from torch._prims_common import make_contiguous_strides_for

from trainatomy.errors import SimulationError
from trainatomy.operators.allocation.above_autograd import no_operation, one_operation
from trainatomy.simulator.adapters.triton import write_launch
from trainatomy.simulator.compiled.source import flex_shapes, read_source
from trainatomy.simulator.flex.attention import BACKWARD, FORWARD, OPERATION


class Trials:
    """The kernels that one process tried.

    Args:
        buffer_bytes: Size of the L2 cache; None: not known, and nothing is tried.
    """

    def __init__(self, buffer_bytes: int | None) -> None:
        self._buffer_bytes = buffer_bytes
        self._tried: set[str] = set()

    def before(self, source: str, arguments: tuple[Any, ...]) -> None:
        """Try a kernel that is about to be launched, unless a kernel of the same source was tried before."""
        if self._buffer_bytes is None or source in self._tried:
            return
        self._tried.add(source)
        settings, meta = _settings_of(source)
        for _ in range(settings if settings > 1 else 0):
            overwritten = _copied(_overwritten(source, meta, arguments))
            with one_operation(OPERATION, bytes=0):
                _copy(overwritten)
                buffer = torch.empty(self._buffer_bytes // 4, dtype=torch.int32, device="cuda")
                _copy(overwritten)
                del buffer


def _settings_of(source: str) -> tuple[int, Mapping[str, Any]]:
    """Return how many settings Inductor's heuristics give a kernel, and what Inductor notes about it."""
    triton = import_module("triton")
    found: list[tuple[int, Mapping[str, Any]]] = []

    def noted(size_hints: Any, configs: list[Any], *_: Any, inductor_meta: Any = None, **__: Any) -> Callable[..., Any]:
        found.append((len(triton_heuristics.unique_configs(configs)), dict(inductor_meta or {})))
        return lambda function: function

    with (
        mock.patch.object(triton_heuristics, "cached_autotune", noted),
        mock.patch.object(triton_helpers, "set_driver_to_gpu", lambda: None),
        mock.patch.object(triton, "jit", lambda function: function),
    ):
        exec(compile(source, "<kernel>", "exec"), {"__name__": "kernel", "__file__": "kernel"})
    return found[-1] if found else (1, {})


def _overwritten(source: str, meta: Mapping[str, Any], arguments: tuple[Any, ...]) -> list[Tensor]:
    """Return the arguments that a kernel overwrites although something else reads them."""
    mutated = meta.get("mutated_arg_names", ())
    pairs = zip(read_source(source).names, arguments, strict=False)
    return [value for name, value in pairs if name in mutated and isinstance(value, Tensor)]


def _copied(overwritten: list[Tensor]) -> list[Tensor]:
    """Return those of the arguments whose copies fit below the peak so far; others are kept on the host."""
    if not overwritten:
        return []
    budget = torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated()
    found = []
    for tensor in overwritten:
        size = tensor.numel() * tensor.element_size()
        if size <= budget:
            budget -= size
            found.append(tensor)
    return found


def _copy(tensors: list[Tensor]) -> None:
    """Allocate copies of tensors, all of which are released at once."""
    copies = [torch.empty_like(tensor) for tensor in tensors]
    del copies


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
