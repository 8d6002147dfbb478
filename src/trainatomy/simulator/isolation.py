"""Keep a simulation from disturbing the process that runs it.

A simulation patches modules of PyTorch and runs libraries that write to the process: the Trainer seeds all random
number generators, accelerate keeps its state in class attributes and sets environment variables, loops choose the
precision of matrix products.  ``isolated`` gives a simulation the process for itself and restores that state when it
ends, also after an exception or Ctrl-C.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import random
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, TypeVar

import torch
from torch.utils import _device

from trainatomy.errors import SimulationError
from trainatomy.processes import ENDING

_lock = threading.RLock()  # which only the thread that holds it can release
_owner: int | None = None
"""Identifier of the thread that holds ``_lock``."""

_others_freeze = False
"""True once the process was found to have frozen objects of its own."""

_PRECISIONS = [
    (backend, operation)
    for backend in ("generic", "cuda", "mkldnn")
    for operation in ("all", "matmul", "conv", "rnn")
    if backend != "generic" or operation == "all"
]
"""Settings of ``torch.backends.*.fp32_precision``; the setting of a whole backend comes before those below it."""

_FLAGS = {
    "_get_cublas_allow_bf16_reduced_precision_reduction": "_set_cublas_allow_bf16_reduced_precision_reduction",
    "_get_cublas_allow_fp16_accumulation": "_set_cublas_allow_fp16_accumulation",
    "_get_cublas_allow_fp16_reduced_precision_reduction": "_set_cublas_allow_fp16_reduced_precision_reduction",
    "_get_cudnn_benchmark": "_set_cudnn_benchmark",
    "_get_cudnn_deterministic": "_set_cudnn_deterministic",
    "_get_cudnn_enabled": "_set_cudnn_enabled",
    "_get_cudnn_sdp_enabled": "_set_sdp_use_cudnn",
    "_get_flash_sdp_enabled": "_set_sdp_use_flash",
    "_get_math_sdp_enabled": "_set_sdp_use_math",
    "_get_mem_efficient_sdp_enabled": "_set_sdp_use_mem_efficient",
    "_get_deterministic_fill_uninitialized_memory": "_set_deterministic_fill_uninitialized_memory",
    "_get_nnpack_enabled": "_set_nnpack_enabled",
    "get_num_threads": "set_num_threads",
}
"""Getters and setters of process-wide flags in ``torch._C``."""


def isolated() -> contextlib.AbstractContextManager[None]:
    """Run one simulation: alone in the process, from PyTorch's default state, restoring the caller's state after it.

    Other threads that want to simulate wait.  Threads that use ``torch.cuda`` for something else meanwhile see the
    simulated GPU: PyTorch's modules belong to the process.

    Raises:
        SimulationError: This thread is running a simulation already.
    """

    def enter(stack: contextlib.ExitStack) -> None:
        _preserve_state(stack)
        _use_defaults(stack)
        _stop_collections(stack)

    return patched(enter, None, _wait_for_others)


def _wait_for_others(stack: contextlib.ExitStack) -> None:
    """Take the lock of the process, which the stack releases."""
    global _owner
    if _owner == threading.get_ident():
        raise SimulationError(
            "a simulation is already running in this thread: predict() was called by code that is itself being "
            "simulated, such as a model's forward or a factory.\nCall it before or after, or in another process"
        )
    stack.callback(_release)  # first: Ctrl-C may arrive as soon as the lock is taken
    _lock.acquire()
    _owner = threading.get_ident()


def _release() -> None:
    """Release the lock if this thread holds it."""
    global _owner
    if _owner == threading.get_ident():
        _owner = None
    with contextlib.suppress(RuntimeError):  # Ctrl-C arrived before it was taken
        _lock.release()


@contextlib.contextmanager
def interrupts_deferred() -> Iterator[None]:
    """Deliver Ctrl-C and the like after the block instead of inside it, so that patches are applied or removed whole.

    Does nothing outside the main thread, which is the only one that Python interrupts.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers = {number: handler for number in ENDING if callable(handler := signal.getsignal(number))}
    pending: list[tuple[int, FrameType | None]] = []
    for number in handlers:
        signal.signal(number, lambda number, frame: pending.append((number, frame)))
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        if pending:
            handlers[pending[0][0]](*pending[0])


Given = TypeVar("Given")


@contextlib.contextmanager
def patched(
    enter: Callable[[contextlib.ExitStack], None],
    given: Given,
    wait: Callable[[contextlib.ExitStack], None] = lambda stack: None,
) -> Iterator[Given]:
    """Let ``enter`` apply patches to a stack, and undo all of them when the block ends, also after Ctrl-C at any line.

    Ctrl-C is deferred while patches are applied and while they are removed.  Where it arrives just before it is
    deferred, the outer of the two ``finally`` removes them; closing twice does nothing.  A caller must return this
    context manager instead of opening it in a generator of its own: Ctrl-C at the end of that one's block would leave
    this one open.

    Args:
        enter: Called with the stack.
        given: What the block is given.
        wait: Called with the stack before ``enter``; Ctrl-C ends it.
    """
    stack = contextlib.ExitStack()
    try:
        try:
            wait(stack)
            with interrupts_deferred():
                enter(stack)
            yield given
        finally:
            with interrupts_deferred():
                stack.close()
    finally:
        stack.close()


def _preserve_state(stack: contextlib.ExitStack) -> None:
    """Let the stack restore the state of the process that training code is known to change."""
    keepers = (keep_random_numbers, _keep_environment, _keep_log_levels, _keep_torch_settings, _keep_accelerate_state)
    for keep in keepers:
        stack.callback(keep())
    stack.enter_context(warnings.catch_warnings())
    warnings.simplefilter("ignore")  # about a GPU that does not exist


def keep_random_numbers() -> Callable[[], None]:
    """Keep the states of the random number generators of Python, PyTorch and, where it is imported, NumPy."""
    python, cpu = random.getstate(), torch.get_rng_state()
    numpy: Any = sys.modules.get("numpy")
    array = None if numpy is None else numpy.random.get_state()

    def restore() -> None:
        random.setstate(python)
        torch.set_rng_state(cpu)
        if numpy is not None:
            numpy.random.set_state(array)

    return restore


def _keep_environment() -> Callable[[], None]:
    """Keep the environment variables."""
    before = dict(os.environ)

    def restore() -> None:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        for name, value in before.items():
            if os.environ.get(name) != value:
                os.environ[name] = value

    return restore


def _keep_log_levels() -> Callable[[], None]:
    """Keep the levels of all loggers; one that did not exist gets the default level."""
    manager = logging.root.manager
    disabled, root = manager.disable, logging.root.level
    levels = {name: one.level for name, one in manager.loggerDict.items() if isinstance(one, logging.Logger)}

    def restore() -> None:
        manager.disable = disabled
        logging.root.setLevel(root)
        for name, level in levels.items():
            logger = manager.loggerDict.get(name)
            if isinstance(logger, logging.Logger) and logger.level != level:
                logger.setLevel(level)

    return restore


def _keep_torch_settings() -> Callable[[], None]:
    """Keep precision, determinism, the choice of kernels, default dtype and autocast.

    ``torch._C`` is queried directly: the public getters raise once the old and the new settings of TF32 were
    both used.
    """
    c: Any = torch._C
    flags = {
        setter: getattr(c, getter)() for getter, setter in _FLAGS.items() if hasattr(c, getter) and hasattr(c, setter)
    }
    precisions = _precisions()
    deterministic = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    dtype, anomaly = torch.get_default_dtype(), (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled())
    autocast = {device: (torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in _DEVICES}
    cache = torch.is_autocast_cache_enabled()
    cudnn: Any = torch.backends.cudnn
    plans_timed = cudnn.benchmark_limit

    def restore() -> None:
        if cudnn.benchmark_limit != plans_timed:
            cudnn.benchmark_limit = plans_timed
        for setter, value in flags.items():
            getattr(c, setter)(*(value if isinstance(value, tuple) else (value,)))
        for key, value in precisions.items():
            if c._get_fp32_precision_getter(*key) != value:
                c._set_fp32_precision_setter(*key, value)
        torch.use_deterministic_algorithms(deterministic[0], warn_only=deterministic[1])
        torch.set_default_dtype(dtype)
        torch.autograd.set_detect_anomaly(*anomaly)
        for device, (enabled, lower) in autocast.items():
            torch.set_autocast_enabled(device, enabled)
            torch.set_autocast_dtype(device, lower)
        torch.set_autocast_cache_enabled(cache)

    return restore


_DEVICES = ("cuda", "cpu")
"""Devices whose autocast state is kept."""


def _precisions() -> dict[tuple[str, str], str]:
    """Return the settings of fp32 precision by backend and operation, as far as this version of PyTorch has them."""
    getter = getattr(torch._C, "_get_fp32_precision_getter", None)
    return {} if getter is None else {key: getter(*key) for key in _PRECISIONS}


def _keep_accelerate_state() -> Callable[[], None]:
    """Keep the state that accelerate shares between all its objects, where it is imported: a script may have one."""
    state: Any = sys.modules.get("accelerate.state")
    if state is None:
        return lambda: None
    classes = (state.PartialState, state.AcceleratorState, state.GradientState)
    before = [(one._shared_state, dict(one._shared_state)) for one in classes]

    def restore() -> None:
        for shared, content in before:
            shared.clear()
            shared.update(content)

    return restore


def _use_defaults(stack: contextlib.ExitStack) -> None:
    """Start from PyTorch's defaults: the caller's autocast, ``no_grad`` or default device are not the training's.

    What ``_preserve_state`` keeps is restored there.
    """
    device = _device.CURRENT_DEVICE

    def restore() -> None:
        if device != _device.CURRENT_DEVICE:
            torch.set_default_device(device)

    stack.callback(restore)
    if device is not None:
        torch.set_default_device(None)
    for kind in _DEVICES:
        torch.set_autocast_enabled(kind, False)
    torch.set_default_dtype(torch.float32)
    torch.set_num_threads(1)  # little runs on the host, such as joining a batch, and threads make that slower
    stack.enter_context(torch.inference_mode(False))
    stack.enter_context(torch.enable_grad())


def _stop_collections(stack: contextlib.ExitStack) -> None:
    """Keep Python from collecting cycles at moments that depend on this machine.

    What exists already is frozen, so that a collection that the training itself asks for (accelerate does) takes no
    time; where the process has frozen some itself, they stay so. A process whose collections are off chooses the
    moments itself.
    """
    global _others_freeze
    if not gc.isenabled():
        return
    # To count frozen objects is to visit each: a million of them take longer than a small simulation.
    _others_freeze = _others_freeze or gc.get_freeze_count() > 0
    stack.callback(gc.enable)
    gc.disable()
    if not _others_freeze:
        stack.callback(gc.unfreeze)
        gc.freeze()
