"""DeepSpeed without a GPU: its accelerator, its compiled optimizers, and its tensors in host memory.

The engine is DeepSpeed's own.  Replaced are what it asks of a GPU, and what it would compile when a training starts:
FusedAdam, which updates weights and two fp32 states in place by one kernel (csrc/adam/multi_tensor_adam.cu), and the
optimizers of the CPU, which take no GPU memory (csrc/adam/cpu_adam_impl.cpp).  Source: DeepSpeed 0.16-0.19.

DeepSpeed's offloading to NVMe drives without a drive: files that have sizes, and buffers in locked memory.

The swappers are DeepSpeed's own: which buffers they make (``buffer_count``, ``buffer_size``), when they read and write.
Replaced are the handle in C++ that does it, and folders, which are not made.  Every transfer takes the CPU's time until
it waits for it; that the drive works beside the CPU and the GPU is not counted.
Source: DeepSpeed 0.16-0.19, runtime/swap_tensor/ and csrc/aio/py_lib.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NoReturn
from unittest import mock

import torch

from trainatomy.errors import SimulationError, WorkloadError
from trainatomy.operators.allocation.above_autograd import one_operation
from trainatomy.simulator.adapters.adapter import Adapter
from trainatomy.training.parallel.deepspeed import import_deepspeed
from trainatomy.units import human_bytes

if TYPE_CHECKING:
    from trainatomy.simulator.process import SimulatedProcess


_MODULES = ("swap_tensor.partitioned_param_swapper", "swap_tensor.optimizer_utils", "zero.stage3")
"""Modules below ``deepspeed.runtime`` that make folders, or remove them."""


class Drive:
    """The drive of a process: an extension of DeepSpeed's (``AsyncIOBuilder``).

    Attributes:
        files: Sizes of the files by their paths.
    """

    def __init__(self, process: SimulatedProcess) -> None:
        self.process = process
        self.files: dict[str, int] = {}

    def aio_handle(self, *_: Any, **__: Any) -> Handle:
        """Return a handle; how it divides transfers changes nothing here."""
        return Handle(self)

    def pin_handle(self) -> NoReturn:
        """Refuse to pin all memory by DeepSpeed's own allocator."""
        raise SimulationError("DS_PIN_MEMORY_BACKEND=native is not simulated: PyTorch's pinned memory is")

    @contextlib.contextmanager
    def without_folders(self) -> Iterator[None]:
        """Let DeepSpeed make and remove no folders on this machine; afterwards, count what lies on the drive."""
        paths = SimpleNamespace(path=os.path, makedirs=lambda *_, **__: None)
        trees = SimpleNamespace(rmtree=lambda *_, **__: None)
        with contextlib.ExitStack() as stack:
            for name in _MODULES:
                module = import_module(f"deepspeed.runtime.{name}")
                for attribute, stand_in in (("os", paths), ("shutil", trees)):
                    if hasattr(module, attribute):
                        stack.enter_context(mock.patch.object(module, attribute, stand_in))
            yield
        if self.files:
            size = sum(self.files.values())
            self.process.storages.host_memory.on_drive = size
            self.process.notes.append(
                f"{human_bytes(size)} of each process lie on the NVMe drive; it is assumed to move 3 GB/s for each "
                "process while nothing else goes on, so that the step is rather too long"
            )


class Handle:
    """A handle for transfers between buffers and files, which are done when they are waited for."""

    def __init__(self, drive: Drive) -> None:
        self._drive = drive
        self._pending: list[int] = []
        self._locked: set[int] = set()

    def new_cpu_locked_tensor(self, numel: int, like: torch.Tensor) -> torch.Tensor:
        """Return a buffer in locked memory, which is none of PyTorch's pinned blocks (deepspeed_pin_tensor.cpp)."""
        with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
            made = torch.empty(int(numel), dtype=like.dtype, device="meta")
        self._drive.process.placement.keep_on_host(made)
        self._locked.add(made.untyped_storage()._cdata)
        return made

    def free_cpu_locked_tensor(self, tensor: torch.Tensor) -> bool:
        """Free a buffer, whose storage dies by itself."""
        return True

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor lies in locked or pinned memory."""
        with torch._C.DisableTorchFunction():
            is_locked = tensor.untyped_storage()._cdata in self._locked
            return is_locked or (tensor.is_meta and self._drive.process.storages.is_pinned(tensor))

    def async_pread(self, buffer: torch.Tensor, path: Any, offset: int = 0) -> int:
        """Begin to read a file."""
        self._pending.append(int(buffer.nbytes))
        return 0

    def async_pwrite(self, buffer: torch.Tensor, path: Any, offset: int = 0) -> int:
        """Begin to write a file."""
        files, end = self._drive.files, offset + int(buffer.nbytes)
        files[str(path)] = max(files.get(str(path), 0), end)
        self._pending.append(int(buffer.nbytes))
        return 0

    def wait(self) -> int:
        """End all transfers; return how many there were."""
        moved, count = sum(self._pending), len(self._pending)
        self._pending.clear()
        if moved:
            with one_operation("deepspeed::aio", bytes=moved):
                pass
        return count

    def __getattr__(self, name: str) -> NoReturn:
        raise SimulationError(f"DeepSpeed's aio_handle.{name} is not simulated")


_KEPT = (
    "deepspeed.comm.",
    "deepspeed.utils.groups",
    "deepspeed.accelerator.real_accelerator",
    "deepspeed.runtime.zero.partition_parameters",
    "transformers.integrations.deepspeed",
)
"""Modules whose variables an engine or the Trainer changes; transformers' says whether models are built for ZeRO-3."""
_COMPILED = ("FusedAdamBuilder", "CPUAdamBuilder")
"""Extensions with optimizers that are stood for."""
_DRIVE, _PINNING = "AsyncIOBuilder", "PinMemoryBuilder"
_LOADED_ONCE = "_deepspeed_pin_memory_op_module"
"""Attribute of ``sys`` by which DeepSpeed finds an extension again (ops/op_builder/pin_memory_load.py, 0.19)."""


@contextlib.contextmanager
def simulated_deepspeed(process: SimulatedProcess, *, in_script: bool = False) -> Iterator[None]:
    """Let DeepSpeed's engine run in a simulated process, and leave the library as it was found.

    Args:
        process: The simulated process.
        in_script: A script makes tensors on the CPU, too, which have data.
    """
    process.processor.need_cuda("DeepSpeed")
    import_deepspeed()
    from deepspeed.accelerator import real_accelerator
    from deepspeed.ops.op_builder import builder

    class Accelerator(_cuda_accelerator()):  # type: ignore[misc]
        """CUDA's accelerator with the memory of the simulated GPU."""

        def available_memory(self, device_index: int | None = None) -> int:
            return process.total_memory - held_bytes(process)

    logger = logging.getLogger("DeepSpeed")
    with contextlib.ExitStack() as stack:
        stack.enter_context(_restored_state())
        before = logger.level
        stack.callback(logger.setLevel, before)
        logger.setLevel(logging.ERROR)
        real_accelerator.ds_accelerator = Accelerator()
        drive = Drive(process)
        stack.enter_context(mock.patch.object(builder.OpBuilder, "load", _loader(drive)))
        stack.enter_context(drive.without_folders())
        stack.callback(vars(sys).pop, _LOADED_ONCE, None)
        stack.enter_context(_without_cpuinfo())
        stack.enter_context(_labelled_weights(process))
        for context in _counted_gradients(process):
            stack.enter_context(context)
        stack.enter_context(_host_tensors(process, in_script=in_script))
        yield


@contextlib.contextmanager
def _without_cpuinfo() -> Iterator[None]:
    """Replace one module; ``mock.patch.dict`` would also drop those that a script imports meanwhile."""
    before = sys.modules.get("cpuinfo")
    sys.modules["cpuinfo"] = _NoCPU  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules["cpuinfo"]
        if before is not None:
            sys.modules["cpuinfo"] = before


@contextlib.contextmanager
def _host_tensors(process: SimulatedProcess, *, in_script: bool) -> Iterator[None]:
    """Give no memory to tensors that DeepSpeed makes on the CPU: they can be as large as the model.

    The engine also makes tensors on the meta device, to remember shapes; while it begins, it names no device for some.
    """
    import deepspeed

    functions, initialize = process.functions, deepspeed.initialize

    def initialize_on_host(*args: Any, **kwargs: Any) -> Any:
        before = functions.host_factories
        functions.host_factories |= {None, "cpu"}
        try:
            with contextlib.redirect_stdout(io.StringIO()):  # it prints how much memory it holds
                return initialize(*args, **kwargs)
        except (AssertionError, ValueError) as error:
            if in_script:
                raise
            raise WorkloadError(f"train.deepspeed: DeepSpeed refuses: {error}", key="train.deepspeed") from error
        finally:
            functions.host_factories = before

    functions.host_factories |= {"meta"} if in_script else {"cpu", "meta"}
    with mock.patch.object(deepspeed, "initialize", initialize_on_host):
        yield


def held_bytes(process: SimulatedProcess) -> int:
    """Return the bytes that are allocated now."""
    sizes: dict[int, int] = {}
    for event in process.trace.events:
        if event.action == "alloc":
            sizes[event.allocation] = event.bytes
        elif event.action == "free":
            sizes.pop(event.allocation, None)
    return sum(sizes.values())


def _labelled_weights(process: SimulatedProcess) -> contextlib.AbstractContextManager[Any]:
    """Label the weights that ZeRO-3 gathers for a module."""
    from deepspeed.runtime.zero import partitioned_param_coordinator as module_of_coordinator

    coordinator_class: Any = module_of_coordinator.PartitionedParameterCoordinator
    fetch = coordinator_class.fetch_sub_module

    def fetch_sub_module(coordinator: Any, module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        process.recorder.operations.count("engine_modules")
        result = fetch(coordinator, module, *args, **kwargs)
        is_whole = module_of_coordinator.z3_leaf_module(module)
        for parameter in module_of_coordinator.iter_params(module, recurse=is_whole):
            if parameter.numel():
                process.recorder.label(parameter.data, "gathered_weight")
        return result

    return mock.patch.object(coordinator_class, "fetch_sub_module", fetch_sub_module)


def _counted_gradients(process: SimulatedProcess) -> Iterator[contextlib.AbstractContextManager[Any]]:
    """Yield patches that count the gradients that ZeRO's hooks take over, whose Python takes the CPU time."""
    from deepspeed.runtime.zero import stage3, stage_1_and_2

    name = "reduce_independent_p_g_buckets_and_remove_grads"
    for kind in (stage_1_and_2.DeepSpeedZeroOptimizer, stage3.DeepSpeedZeroOptimizer_Stage3):
        yield mock.patch.object(kind, name, _counting(getattr(kind, name), process))


def _counting(take: Callable[..., Any], process: SimulatedProcess) -> Callable[..., Any]:
    def counted(*args: Any, **kwargs: Any) -> Any:
        process.recorder.operations.count("engine_gradients")
        return take(*args, **kwargs)

    return counted


class _NoCPU:
    """``cpuinfo``, which starts programs to learn the name of the CPU."""

    @staticmethod
    def get_cpu_info() -> dict[str, str]:
        return {}


def _cuda_accelerator() -> Any:
    from deepspeed.accelerator.cuda_accelerator import CUDA_Accelerator

    return CUDA_Accelerator


def _loader(drive: Drive) -> Callable[..., Any]:
    """Return what finds stand-ins for compiled extensions, instead of compiling them."""

    def load(builder: Any, verbose: bool = True) -> Any:
        name = type(builder).__name__
        if name in (_DRIVE, _PINNING):
            return drive
        if name not in _COMPILED:
            raise SimulationError(f"DeepSpeed would compile {name.removesuffix('Builder')}, which is not simulated")
        return _Extension()

    return load


class _Extension:
    """The functions of DeepSpeed's compiled optimizers; others, such as those that make an optimizer, do nothing."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return {"multi_tensor_adam": _multi_tensor_adam, "adam_update": _adam_update}.get(name, _nothing)


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Do nothing."""


def _multi_tensor_adam(chunk: int, overflow: torch.Tensor, lists: list[list[torch.Tensor]], *numbers: Any) -> None:
    """Write FusedAdam's kernel: gradients are read, parameters and both states updated in place."""
    tensors = [tensor for each in lists for tensor in each]
    with one_operation("deepspeed::multi_tensor_adam", *tensors, written=tuple(range(len(lists[0]), len(tensors)))):
        pass


def _adam_update(*arguments: Any) -> None:
    """Write the update of one partition in host memory: parameter, gradient and two states."""
    tensors = [one for one in arguments if isinstance(one, torch.Tensor)]
    with one_operation("deepspeed::adam_update", *tensors, written=(0, 2, 3)):
        pass


@contextlib.contextmanager
def _restored_state() -> Iterator[None]:
    """Restore what an engine changes outside of itself."""
    linear = torch.nn.functional.linear
    modules = [module for name, module in sys.modules.items() if name.startswith(_KEPT)]
    saved = [(vars(module), dict(vars(module))) for module in modules]
    try:
        yield
    finally:
        torch.nn.functional.linear = linear
        for current, before in saved:
            current.clear()
            current.update(before)


ADAPTER = Adapter(
    is_used=lambda workload, _: workload.train.deepspeed is not None,
    simulated=lambda process, workload: simulated_deepspeed(process, in_script=workload is None),
    modules=("deepspeed",),
)
