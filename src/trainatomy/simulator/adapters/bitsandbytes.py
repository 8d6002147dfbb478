"""bitsandbytes on meta tensors: its optimizers, and its layers with quantised weights.

The Python code of the optimizers makes their states, and its custom operators have kernels for meta tensors that change
nothing, so that 8-bit optimizers run unmodified: a parameter of n >= 4096 elements has two uint8 states of n elements
and two fp32 scales of ceil(n / 256); a smaller one has two fp32 states; all share two tables of 256 fp32.  Only paged
states need help: a library call allocates them with ``cudaMallocManaged``, outside PyTorch's caching allocator.
Source: bitsandbytes 0.45-0.50, optim/optimizer.py and functional.py.

The CUDA implementations of the layers' operators (``torch.ops.bitsandbytes.*``) are Python around calls of a C library.
Here that Python runs as it is, the installed version's, with the C library replaced: each of its kernels writes an
operation and computes nothing.  What the Python around them allocates is seen as it happens: dequantised weights,
absolute maxima, casts.  Whether a weight is dequantised for cuBLAS or multiplied by a kernel of the library's own is
also its decision, by the compute capability and multiprocessors of the simulated GPU.

Source: bitsandbytes 0.46-0.50, backends/cuda/ops.py and backends/default/ops.py.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from math import ceil
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode

from trainatomy.alike import alike
from trainatomy.errors import MissingLibrary, WorkloadError
from trainatomy.libraries import import_library, version_of
from trainatomy.operators.allocation.above_autograd import one_operation
from trainatomy.simulator.adapters.adapter import Adapter
from trainatomy.simulator.live import HostTensors
from trainatomy.training.quantization import quantising_libraries
from trainatomy.units import human_bytes
from trainatomy.workload.arguments import arguments, is_factory
from trainatomy.workload.quantization import outlier_columns

if TYPE_CHECKING:
    from trainatomy.simulator.process import SimulatedProcess
    from trainatomy.workload.schema import Workload


@contextlib.contextmanager
def simulated_bitsandbytes(
    host_memory: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> Iterator[list[torch.Tensor]]:
    """Let bitsandbytes' optimizers step on meta tensors; yields the paged states, as a list that grows.

    Enter it before the simulated process, as the library looks for a GPU when it is imported.

    Args:
        host_memory: Context in which tensors are made that do not lie on the GPU.

    Raises:
        MissingLibrary: bitsandbytes is not installed.
    """
    functional, optimizer = _library()
    pages = optimizer.F.GlobalPageManager.get_instance()
    overrides = optimizer.GlobalOptimManager.get_instance()
    paged: list[torch.Tensor] = []

    def get_paged(*shape: int, dtype: torch.dtype = torch.float32, device: torch.device | None = None) -> torch.Tensor:
        with host_memory():
            state = torch.empty(shape, dtype=dtype, device="meta")
        state.is_paged, state.page_deviceid = True, 0  # type: ignore[attr-defined]
        paged.append(state)
        return state

    with contextlib.ExitStack() as stack:
        for name, replacement in _replacements(get_paged).items():
            stack.enter_context(mock.patch.object(functional, name, replacement))
        stack.enter_context(mock.patch.object(pages, "paged_tensors", []))
        for name in ("pid2config", "index2config"):
            stack.enter_context(mock.patch.dict(getattr(overrides, name)))
        triples = list(overrides.module_weight_config_triple)
        stack.enter_context(mock.patch.object(overrides, "module_weight_config_triple", triples))
        yield paged


_WITHOUT_BFLOAT16 = ("momentum", "rmsprop", "adagrad", "lars")
"""Optimizers without a 32-bit kernel for bfloat16 (backends/cuda/ops.py, ``str2optimizer32bit``, bitsandbytes 0.50)."""
_MANAGED_UNIT = 128 * 2**20
"""Multiple that the GPU's used memory grew by for managed memory: 128 MiB for 168 paged states of together 21 MiB, and
256 MiB for 192 of together 168 MiB (two trainings on an H200, driver 580.159; lab/everyday)."""


def paged_notes(paged: Sequence[torch.Tensor]) -> Iterator[str]:
    """Yield a note on paged states, which are outside of PyTorch's allocator and of the process's figure.

    Before a parameter is updated, ``prefetch_state`` asks the driver to move its states to the GPU
    (``cudaMemPrefetchAsync``),
    where they stay until the driver needs the room (bitsandbytes 0.50, optim/optimizer.py).
    """
    size = sum(state.nbytes for state in paged)
    if size:
        most = human_bytes(-(-size // _MANAGED_UNIT) * _MANAGED_UNIT)
        yield (
            f"{human_bytes(size)} of paged optimizer states move to the GPU in each step and stay there while it has "
            f"room, outside of the process's memory: the GPU may show up to {most} more than is predicted"
        )


def _replacements(get_paged: Callable[..., torch.Tensor]) -> dict[str, Callable[..., Any]]:
    """Return replacements by their names in bitsandbytes.functional.

    The updates write in place and allocate nothing but the norm that LAMB and LARS need.
    """

    def update_32bit(optimizer_name: str, g: torch.Tensor, p: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        if optimizer_name in _WITHOUT_BFLOAT16 and g.dtype == torch.bfloat16:
            raise WorkloadError(
                f"train.optim: bitsandbytes has no 32-bit kernel of {optimizer_name} for bfloat16 gradients: its step "
                "fails on a GPU; parameters of less than 4096 numbers use it with 8 bits, too. Use weights in float32 "
                "(model.dtype: float32), or another optimizer",
                key="train.optim",
            )
        if kwargs.get("max_unorm", 0.0) > 0.0:
            torch.norm(p.data.float())
        _update("optimizer_update_32bit", (g, p, *args), kwargs)

    def update_8bit(optimizer_name: str, g: torch.Tensor, p: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        _update("optimizer_update_8bit_blockwise", (g, p, *args), kwargs)

    return {
        "get_paged": get_paged,
        "fill": _no_op,
        "prefetch_tensor": _no_op,
        "optimizer_update_32bit": update_32bit,
        "optimizer_update_8bit_blockwise": update_8bit,
    }


def _update(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Write one kernel that updates its parameter and states; the gradient is its first tensor."""
    tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
    with one_operation(f"bitsandbytes::{name}", *tensors, written=tuple(range(1, len(tensors)))):
        pass


def _no_op(*args: Any, **kwargs: Any) -> None:
    """Do nothing: a kernel or prefetch without data."""


def _library() -> tuple[ModuleType, ModuleType]:
    """Import bitsandbytes.functional and its optimizers without the advice about kernels for the CPU."""
    logger = logging.getLogger("bitsandbytes")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        return importlib.import_module("bitsandbytes.functional"), importlib.import_module(
            "bitsandbytes.optim.optimizer"
        )
    except ImportError as error:
        raise MissingLibrary(
            "this optimizer needs bitsandbytes, which is not installed: pip install bitsandbytes",
            library="bitsandbytes",
        ) from error
    finally:
        logger.setLevel(level)


Function = Callable[..., Any]
Context = Callable[[], contextlib.AbstractContextManager[None]]
_PACKAGE = "bitsandbytes.backends"


class _Kernel(NamedTuple):
    """A kernel of the C library: the operation that it is written as, and its pointer arguments.

    Attributes:
        name: Start of its name in the library; what follows is the type of its numbers, and that of 4-bit ones.
        operation: Operation that it is written as.
        reads: Positions of the tensors that it reads.
        writes: Positions of the tensors that it writes.
    """

    name: str
    operation: str
    reads: tuple[int, ...]
    writes: tuple[int, ...]


_KERNELS = (
    _Kernel("cquantize_blockwise_", "quantize_blockwise", (1, 0), (2, 3)),
    _Kernel("cdequantize_blockwise_", "dequantize_blockwise", (1, 0, 2), (3,)),
    _Kernel("cgemm_4bit_inference_naive_", "gemv_4bit", (3, 4, 5, 6), (7,)),
    _Kernel("cgemm_4bit_", "gemm_4bit", (0, 1, 2, 3, 4, 5, 7), (6,)),
    _Kernel("cigemmlt_32", "int8_linear_matmul", (5, 4), (6,)),
    _Kernel("cdequant_mm_int32_fp16", "int8_mm_dequant", (0, 1, 2, 4), (3,)),
    _Kernel("cint8_vector_quant", "int8_vectorwise_quant", (0,), (1, 2)),
)
"""Kernels by the order in which their names are tried; csrc/pythonInterface.cpp declares them."""
_FOUR_BITS = ("_nf4", "_fp4")


class _Symbol:
    """A function of the C library, called with tensors where the library gets pointers.

    It has the attributes of a function of ``ctypes``, by which Unsloth tells whether the library was loaded.
    """

    restype = argtypes = None

    def __init__(self, name: str) -> None:
        self._kernel = next((each for each in _KERNELS if name.startswith(each.name)), None)
        operation = "" if self._kernel is None else self._kernel.operation
        self._operation = operation.replace("blockwise", "4bit") if name.endswith(_FOUR_BITS) else operation

    def __call__(self, *arguments: Any) -> int:
        """Write the kernel as an operation; returns the library's code for success."""
        if self._kernel is not None:
            reads = [arguments[position] for position in self._kernel.reads]
            writes = [arguments[position] for position in self._kernel.writes]
            tensors = [each for each in (*reads, *writes) if isinstance(each, torch.Tensor)]
            written = tuple(range(len(tensors) - len(writes), len(tensors)))
            with one_operation(f"bitsandbytes::{self._operation}", *tensors, written=written):
                pass
        return 0


class _Library:
    """Stands for the C library: every name is a function."""

    def __getattr__(self, name: str) -> _Symbol:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Symbol(name)


class _NativeLibrary(_Library):
    """The library as others find it: ``bitsandbytes.functional.lib``; its functions for the CPU are its own."""

    compiled_with_cuda = True

    def __init__(self, own: Any) -> None:
        self._own = own

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name) if "_cpu" in name else super().__getattr__(name)

    __getitem__ = __getattr__


@contextlib.contextmanager
def native_library() -> Iterator[None]:
    """Let other libraries find the C library loaded, and call its kernels by themselves, as Unsloth does."""
    functional = importlib.import_module("bitsandbytes.functional")
    extension = importlib.import_module("bitsandbytes.cextension")
    library, get_ptr = _NativeLibrary(extension.lib), functional.get_ptr

    def pointer(tensor: torch.Tensor | None) -> Any:
        if tensor is None:
            return get_ptr(None)
        with torch._C.DisableTorchFunction():
            is_meta = tensor.is_meta
        return tensor if is_meta else get_ptr(tensor)

    with contextlib.ExitStack() as stack:
        for module, name, value in (
            (extension, "lib", library),
            (functional, "lib", library),
            (functional, "get_ptr", alike(get_ptr, pointer)),
        ):
            stack.enter_context(mock.patch.object(module, name, value, create=True))
        yield


class _Pointers(TorchFunctionMode):
    """Answers ``data_ptr`` with the tensor itself, so that kernels are called with tensors."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return args[0] if func is torch.Tensor.data_ptr else func(*args, **kwargs or {})


class _Backend(NamedTuple):
    """Implementations of the library's operators by name, and the modules that they live in."""

    implementations: dict[str, Function]
    modules: tuple[ModuleType, ...]


@cache
def _backend() -> _Backend:
    """Execute the library's backends once more, as modules of our own, with the C library replaced."""
    implementations: dict[str, Function] = {"bitsandbytes::int8_vectorwise_dequant": _dequantise_rows}

    def register_kernel(name: str, device: str) -> Callable[[Function], Function]:
        def register(function: Function) -> Function:
            implementations[name] = function
            return function

        return register

    functional = importlib.import_module("bitsandbytes.functional")
    with contextlib.ExitStack() as stack:
        for place, name, value in (
            (importlib.import_module("bitsandbytes._ops"), "register_kernel", register_kernel),
            (importlib.import_module("bitsandbytes.cextension"), "lib", _Library()),
            (torch, "compile", lambda function=None, **_: function),  # would load PyTorch's compiler
            (torch._C, "_cuda_getCurrentRawStream", lambda index: 0),
            (functional, "CUBLAS_Context", mock.MagicMock()),
            (functional, "get_ptr", lambda tensor: tensor),
            (functional, "_get_tensor_stream", lambda tensor: 0),
            (functional, "_cuda_device_of", lambda tensor: contextlib.nullcontext()),
        ):
            stack.enter_context(mock.patch.object(place, name, value, create=True))
        modules = tuple(_execute(f"{_PACKAGE}.{part}") for part in ("default", "cuda"))
    return _Backend(implementations, modules)


def _dequantise_rows(weights: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Dequantise 8-bit weights as ``bitsandbytes._ops`` does, which registers this implementation itself."""
    return weights * scales.view(-1, 1) * (1 / 127)


def _execute(package: str) -> ModuleType:
    """Execute the ``ops`` of a backend as a new module."""
    importlib.import_module(package)
    found = find_spec(f"{package}.ops")
    assert found is not None
    assert found.origin is not None
    spec = spec_from_file_location(f"{package}._simulated_ops", found.origin)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def has_layers() -> bool:
    """Return whether the release has operators for layers; one before 0.46 has optimizers only."""
    return find_spec("bitsandbytes.backends.cuda") is not None


def quantised_operators(answering: Context, on_host: Context, outlier_columns: float) -> dict[Any, Function]:
    """Return what runs in place of the library's operators, by the operator that Python calls.

    Args:
        answering: Context in which unknown bools are answered with True if any column has outliers, else with False:
            ``int8_vectorwise_quant`` asks whether an activation reaches the threshold.
        on_host: Context in which meta tensors that are made stand for tensors in host memory.
        outlier_columns: Share of the columns of activations that reach the threshold.
    """
    if not has_layers():
        raise MissingLibrary("model.quantization needs bitsandbytes 0.46 or newer: pip install -U bitsandbytes")
    backend = _backend()
    _forget_gpu(backend)
    found: dict[Any, Function] = {}
    for name, implementation in backend.implementations.items():
        short, _, overload = name.removeprefix("bitsandbytes::").partition(".")
        packet = getattr(torch.ops.bitsandbytes, short)
        run = partial(_run, implementation, answering, on_host, outlier_columns)
        found[getattr(packet, overload or "default")] = run
        if not overload:
            found[packet] = run
    return found


def _run(
    implementation: Function, answering: Context, on_host: Context, outlier_columns: float, *args: Any, **kwargs: Any
) -> Any:
    columns = mock.patch.object(torch, "argwhere", partial(_outliers, outlier_columns))
    with answering(), HostTensors(on_host), _Pointers(), columns:
        return implementation(*args, **kwargs)


def _outliers(share: float, is_outlier: torch.Tensor) -> torch.Tensor:
    """Return the columns with outliers in place of ``torch.argwhere``, whose number of rows depends on values."""
    return is_outlier.new_empty((ceil(share * is_outlier.numel()), 1), dtype=torch.int64)


def _forget_gpu(backend: _Backend) -> None:
    """Clear what the backend remembers of the GPU: the next simulation may have another."""
    for module in backend.modules:
        for value in vars(module).values():
            clear = getattr(value, "cache_clear", None)
            if callable(clear):
                clear()


@contextlib.contextmanager
def no_shared_code_books() -> Iterator[None]:
    """Let the library make its code books on this simulation's GPU, and drop them with it."""
    functional = importlib.import_module("bitsandbytes.functional")
    with mock.patch.dict(functional.name2qmap, clear=True):
        yield


@contextlib.contextmanager
def _simulated_optimizers(process: SimulatedProcess, workload: Workload | None) -> Iterator[None]:
    @contextlib.contextmanager
    def managed() -> Iterator[None]:
        with process.on_host(), process.storages.leaving():
            yield

    with simulated_bitsandbytes(managed) as paged:
        yield
        process.notes.extend(paged_notes(paged))
        process.storages.host_memory.paged = sum(state.nbytes for state in paged)


@contextlib.contextmanager
def _simulated_layers(process: SimulatedProcess, workload: Workload | None) -> Iterator[None]:
    """Let layers with quantised weights run; in a script, their activations have no outlier columns."""
    columns = 0.0 if workload is None else outlier_columns(workload)
    answering = partial(process.recorder.scalar_reads.true_at_most, 1 if columns else 0)
    with contextlib.ExitStack() as stack:
        stack.enter_context(no_shared_code_books())
        if workload is None:
            stack.enter_context(native_library())
        if workload is not None or has_layers():
            functions = quantised_operators(answering, process.on_host, columns)
            if process.processor.is_amd:
                refused = partial(process.processor.need_cuda, "bitsandbytes' quantisation")
                functions = dict.fromkeys(functions, lambda *args, **kwargs: refused())
            process.use_functions(functions)
        yield


def _runs_optimizer(workload: Workload) -> bool:
    """Return whether the library's optimizers run, or may be called by one that is given, or by GaLore's."""
    optim = workload.train.optim
    package = None if is_factory(optim) else arguments().package_of(optim)
    may_call = is_factory(optim) or package == "galore_torch"
    return package == "bitsandbytes" or (may_call and version_of("bitsandbytes") is not None)


OPTIMIZERS = Adapter(
    is_used=lambda workload, _: _runs_optimizer(workload),
    simulated=_simulated_optimizers,
    load=lambda _: _library(),
    modules=("bitsandbytes",),
)
LAYERS = Adapter(
    is_used=lambda workload, model: model is not None and "bitsandbytes" in quantising_libraries(workload, model),
    simulated=_simulated_layers,
    load=lambda _: (import_library("bitsandbytes", "model.quantization"), _backend()),
    modules=("bitsandbytes",),
)
