"""Answers for the simulated GPU to what Inductor asks of one before it generates code."""

from __future__ import annotations

import contextlib
import ctypes
import sys
import types
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch._dynamo import device_interface, trace_rules, utils
from torch._dynamo.variables import ctx_manager
from torch._dynamo.variables import torch as functions
from torch._inductor.fx_passes import joint_graph, pad_mm
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.node import map_aggregate
from torch.utils import _triton

from trainatomy.catalog.gpus import gpu_of_driver
from trainatomy.operators.allocation.convolution import memory_format
from trainatomy.operators.cost.kernel import chip_of
from trainatomy.operators.cost.padding import padding_pays
from trainatomy.results.operations import Array
from trainatomy.simulator.device import DeviceProperties


def pads(device_name: str, match: Any, mat1: torch.Tensor, mat2: torch.Tensor, op: Any, input: Any = None) -> bool:
    """Return whether Inductor pads a product on a GPU.

    Source: torch 2.11-2.15, torch/_inductor/fx_passes/pad_mm.py (``_should_pad``, ``should_exclude_padding_time``).

    Args:
        device_name: The GPU's name, as its driver reports it.
        match: Inductor's match of the product's pattern.
        mat1: The first operand, [M, K] or a batch of such.
        mat2: The second one, [K, N].
        op: The product.
        input: What is added to it.
    """
    unit = pad_mm.get_alignment_size(mat1)
    # A dimension whose size varies is not padded.
    padded = [
        tuple(
            size + (pad_mm.get_padded_length(size, unit) if dimension >= each.ndim - 2 else 0)
            for dimension, size in enumerate(each.shape)
        )
        for each in (mat1, mat2)
    ]
    m, k, n = sizes_at_compile_time((mat1.shape[-2], mat1.shape[-1], mat2.shape[-1]))
    if not pad_mm.is_mm_compute_bound(m, k, n, mat1.dtype):
        return False
    gpu = gpu_of_driver(device_name)
    if gpu is None:
        return True
    chip = chip_of(gpu, torch.backends.cuda.matmul.fp32_precision == "tf32")
    operands = [
        Array(
            sizes_at_compile_time(each.shape),
            sizes_at_compile_time(each.stride()),
            str(each.dtype).removeprefix("torch."),
            each.itemsize,
            storage,
        )
        for storage, each in enumerate((mat1, mat2))
    ]
    is_free = [pad_mm.should_exclude_padding_time(match, name) for name in ("mat1", "mat2")]
    name = "aten::bmm" if op is torch.ops.aten.bmm else "aten::mm"
    return padding_pays(chip, name, operands, [sizes_at_compile_time(shape) for shape in padded], is_free)


def sizes_at_compile_time(sizes: Iterable[int | torch.SymInt]) -> tuple[int, ...]:
    """Return sizes as numbers: one that varies is what it was in the call that is compiled."""
    return tuple(size if isinstance(size, int) else size.node.hint for size in sizes)


_CUDA, _META = 1, 14
"""Numbers of device types.  Source: torch/headeronly/core/DeviceType.h."""


def text_of(properties: DeviceProperties) -> str:
    """Return all of a GPU that code depends on."""
    count = properties.multi_processor_count
    return f"{properties.name}, {properties.major}.{properties.minor}, {count} multiprocessors"


def tell_dynamo(stack: contextlib.ExitStack) -> None:
    """Let Dynamo ask about the simulated GPU as about a real one; ``stack`` undoes it.

    It calls these functions while it traces, and keeps their answers as constants (torch 2.11-2.15,
    torch/_dynamo/variables/torch.py and utils.py).
    """
    answered = [getattr(torch.cuda, name) for name in _ANSWERED]
    rules = dict.fromkeys(answered, functions.TorchInGraphFunctionVariable)
    stack.enter_context(mock.patch.dict(trace_rules.get_torch_obj_rule_map(), rules))
    stack.enter_context(mock.patch.dict(functions.constant_fold_functions, dict.fromkeys(answered)))
    contexts: Any = getattr(ctx_manager, "_device_context_manager_map", None)  # since torch 2.13; before, it asks anew
    if contexts is not None:
        variable: Any = ctx_manager.CUDADeviceVariable
        stack.enter_context(mock.patch.dict(contexts, {torch.cuda.device: variable}))
        for name in ("_exchange", "_maybe_exchange"):
            exchange = getattr(torch.cuda, f"{name}_device")
            stack.enter_context(mock.patch.object(variable, f"{name}_fn", staticmethod(exchange)))
    types_: Any = utils.common_constant_types
    if DeviceProperties not in types_:
        types_.add(DeviceProperties)
        stack.callback(types_.discard, DeviceProperties)


_ANSWERED = ("is_available", "is_bf16_supported", "get_device_capability", "get_device_name", "get_device_properties")
"""Functions of ``torch.cuda`` that are replaced in a simulated process, and answer the same all the time."""


def install_compiler(stack: contextlib.ExitStack, properties: DeviceProperties) -> None:
    """Let Inductor generate code for the simulated GPU; ``stack`` undoes it."""
    from torch._inductor import codecache, utils
    from triton import runtime
    from triton.backends.compiler import GPUTarget

    def patch(target: Any, name: str, value: Any) -> None:
        stack.enter_context(mock.patch.object(target, name, value, create=True))

    capability = properties.major * 10 + properties.minor
    interface: Any = device_interface.CudaInterface
    answers: dict[str, Any] = {
        "get_device_properties": lambda device=None: properties,
        "get_compute_capability": lambda device=None: capability,
        "is_available": lambda: True,
        "current_device": lambda: 0,
        "device_count": lambda: 1,
        "is_triton_capable": lambda device=None: True,
        "raise_if_triton_unavailable": lambda device=None: None,
        "synchronize": lambda device=None: None,
        "memory_allocated": lambda device=None: 0,
    }
    for name, answer in answers.items():
        patch(interface, name, staticmethod(answer))
    for name in ("get_device_properties", "current_device"):
        patch(interface.Worker, name, staticmethod(answers[name]))
    folder = joint_graph.UniformValueConstantFolder
    patch(folder, "_deduce_value", _on_host(folder._deduce_value))
    if hasattr(pad_mm, "_should_pad"):
        patch(pad_mm, "_should_pad", partial(pads, properties.name))
    target = types.SimpleNamespace(backend="cuda", arch=capability, warp_size=32)
    backend = types.SimpleNamespace(target=target, hash=lambda: "0")
    patch(_triton, "triton_hash_with_backend", lambda: "0" * 64)
    patch(_triton, "triton_backend", lambda: backend)
    # Dynamo asks Triton's own compiler what a kernel of a library writes.
    nvidia = types.SimpleNamespace(get_current_target=lambda: GPUTarget("cuda", capability, 32))
    patch(runtime.driver, "_active", nvidia)
    for module in (_triton, *_with_own_answer()):
        patch(module, "has_triton", lambda **which: True)
    patch(codecache.CacheBase, "get_system", staticmethod(lambda: {"hash": "0"}))
    patch(FakeTensorMode, "avoid_device_init", property(lambda mode: True))
    patch(fake_tensor, "init_gpu_context", lambda device: None)
    # ``torch.tensor(data, device="meta")`` returns a plain meta tensor under a fake mode, on a GPU a fake one.
    always = property(lambda mode: True, lambda mode, value: None, lambda mode: None)
    patch(FakeTensorMode, "allow_non_fake_inputs", always)
    _install_guard(stack)
    patch(torch._utils_internal, "max_clock_rate", _no_clock)
    patch(torch._C, "_cuda_cudaCachingAllocator_is_enabled", lambda: True)
    patch(torch._C, "_conv_determine_backend_memory_format", _convolution_format)
    for module in (utils, _triton):
        _forget(stack, module)


def _with_own_answer() -> list[types.ModuleType]:
    """Return Inductor's modules that were imported before, by torchao for example, and hold ``has_triton``."""
    loaded = [module for name, module in sys.modules.items() if name.startswith("torch._inductor.")]
    return [module for module in loaded if "has_triton" in vars(module)]


def _convolution_format(data: torch.Tensor, weight: torch.Tensor, backend: object) -> torch.memory_format:
    """Return the layout of a convolution's result: cuDNN's, where a build without CUDA has another kernel."""
    return memory_format(data, weight)


def _no_clock() -> float:
    """Refuse to ask nvidia-smi for the clock: without it, every product counts as bound by computation.

    So it does with it, on GPUs that PyTorch has no data sheet of: the clock is in MHz where kHz are expected.
    Source: torch 2.11-2.13, torch/_inductor/utils.py (``get_device_tflops``), triton/testing.py.
    """
    raise RuntimeError("there is no nvidia-smi for a simulated GPU")


def _install_guard(stack: contextlib.ExitStack) -> None:
    """Give a build without CUDA a guard of CUDA devices: that of the meta device, which does nothing.

    PyTorch does so itself for builds with CUDA on machines without a GPU.  Source: torch 2.9-2.13,
    c10/core/impl/DeviceGuardImplInterface.h (``ensureCUDADeviceGuardSet``, ``device_guard_impl_registry``, indexed by
    ``DeviceType``).
    """
    torch._C._ensureCUDADeviceGuardSet()
    if torch.backends.cuda.is_built():
        return
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    table = (ctypes.c_void_p * 22).in_dll(library, "_ZN3c104impl26device_guard_impl_registryE")
    before, table[_CUDA] = table[_CUDA], table[_META]
    stack.callback(table.__setitem__, _CUDA, before)


def _forget(stack: contextlib.ExitStack, module: types.ModuleType) -> None:
    """Clear what functions of a module remember about the device, before and after."""

    def clear() -> None:
        for function in list(vars(module).values()):
            forget = getattr(function, "cache_clear", None)
            if callable(forget):
                forget()

    clear()
    stack.callback(clear)


def _on_host(deduce: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Return Inductor's folding of constants, which executes their factories, on the CPU."""

    def host(value: Any) -> Any:
        return torch.device("cpu") if isinstance(value, torch.device) else value

    def deduced(folder: Any, node: Any) -> Any:
        args, kwargs = node.args, node.kwargs
        node.args, node.kwargs = map_aggregate(args, host), map_aggregate(kwargs, host)
        try:
            return deduce(folder, node)
        finally:
            node.args, node.kwargs = args, kwargs

    return deduced
