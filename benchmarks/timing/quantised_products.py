"""Time the Python around products with 4-bit weights: ``python benchmarks/timing/quantised_products.py``.

No GPU is needed: the Python of bitsandbytes' CUDA backend runs on small tensors of the CPU, with its C library replaced
by functions that do nothing.  Prints microseconds of a layer with 4-bit weights, of a plain one and of a view, which
says how quick this host is (``plain.view`` of ``catalog/hosts.yaml``).
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import time
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch

SIZE = 64
_OPERATORS = ("gemm_4bit", "dequantize_4bit", "dequantize_blockwise")


class _NoLibrary:
    """The C library, each function of which does nothing."""

    def __getattr__(self, name: str) -> Callable[..., int]:
        def nothing(*arguments: Any, **keywords: Any) -> int:
            return 0

        object.__setattr__(self, name, nothing)
        return nothing


def use_cuda_backend() -> torch.library.Library:
    """Let bitsandbytes run the Python of its CUDA backend on tensors of the CPU, while the result lives."""
    found: dict[str, Callable[..., Any]] = {}

    def register(name: str, device: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        return lambda function: found.setdefault(name, function)

    importlib.import_module("bitsandbytes.backends.cuda")
    origin = importlib.util.find_spec("bitsandbytes.backends.cuda.ops")
    assert origin is not None and origin.origin is not None
    spec = importlib.util.spec_from_file_location("bitsandbytes.backends.cuda._timed_ops", origin.origin)
    assert spec is not None and spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    replaced = {
        ("bitsandbytes._ops", "register_kernel"): register,
        ("bitsandbytes.cextension", "lib"): _NoLibrary(),
        ("bitsandbytes.functional", "CUBLAS_Context"): mock.MagicMock(),
    }
    torch._C._cuda_getCurrentRawStream = lambda device: 0
    with contextlib.ExitStack() as stack:
        for (place, name), value in replaced.items():
            stack.enter_context(mock.patch.object(importlib.import_module(place), name, value, create=True))
        spec.loader.exec_module(module)
    module._gemm_4bit_use_custom_fn = lambda *arguments: False
    library = torch.library.Library("bitsandbytes", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in _OPERATORS:
            library.impl(name, found[f"bitsandbytes::{name}"], "CPU", allow_override=True)
    return library


def microseconds(function: Callable[[], Any], runs: int = 300, repeats: int = 15) -> float:
    """Return the shortest mean time of a call."""
    function()
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        for _ in range(runs):
            function()
        times.append((time.perf_counter() - began) / runs)
    return min(times) * 1e6


def layers() -> dict[str, torch.nn.Module]:
    """Return a plain layer and one with 4-bit weights, both frozen."""
    import bitsandbytes as bnb

    plain = torch.nn.Linear(SIZE, SIZE, bias=False).requires_grad_(False)
    quantised = bnb.nn.Linear4bit(SIZE, SIZE, bias=False, compute_dtype=torch.float32, quant_type="nf4")
    packed = bnb.nn.Params4bit(torch.randn(SIZE, SIZE), requires_grad=False, quant_type="nf4", compress_statistics=True)
    quantised.weight = packed.to("cpu")
    return {"plain layer": plain, "4-bit layer": quantised}


def main() -> None:
    """Print the times."""
    torch.set_num_threads(1)
    made = layers()
    library = use_cuda_backend()
    data = torch.randn(4, SIZE, requires_grad=True)
    gradient, plain = torch.randn(4, SIZE), torch.randn(4, SIZE)

    def step(layer: torch.nn.Module) -> None:
        layer(data).backward(gradient)
        data.grad = None

    print(f"view: {microseconds(lambda: plain.view(-1)):.2f} us")
    for name, layer in made.items():
        forward = microseconds(lambda layer=layer: layer(data))  # type: ignore[misc]
        both = microseconds(lambda layer=layer: step(layer))  # type: ignore[misc]
        with torch.no_grad():
            inference = microseconds(lambda layer=layer: layer(data))  # type: ignore[misc]
        print(f"{name}: forward {forward:.1f} us, backward {both - forward:.1f} us, inference {inference:.1f} us")
    del library


if __name__ == "__main__":
    main()
