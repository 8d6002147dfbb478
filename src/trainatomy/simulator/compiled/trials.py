"""Kernels of Inductor that are tried before their first launch.

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
from importlib import import_module
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._inductor.runtime import triton_helpers, triton_heuristics

from trainatomy.operators.allocation.above_autograd import one_operation
from trainatomy.simulator.compiled.source import read_source
from trainatomy.simulator.flex.attention import OPERATION


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
