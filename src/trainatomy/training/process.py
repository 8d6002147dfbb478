"""Process-wide state of PyTorch, transformers and accelerate: import what a run needs, isolate what it changes.

The libraries cache what they find out about the device.  A run on a simulated GPU must neither see answers that an
earlier run cached nor leave its own to a later one.

Random numbers of the host: they decide which layers are left out, what is masked, and how samples are ordered.

Precision of a step: autocast, TF32, and the dtype of inference.
"""

from __future__ import annotations

import logging
import random
import sys
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
import torch.utils.checkpoint

from trainatomy.catalog.versions import transformers_has, transformers_since, version_text
from trainatomy.errors import MissingLibrary
from trainatomy.libraries import import_library, version_of
from trainatomy.training import factory
from trainatomy.training.optimizer import optimizer_class
from trainatomy.training.parallel.deepspeed import import_deepspeed
from trainatomy.workload.arguments import arguments, is_class_path, is_factory, module_of
from trainatomy.workload.loops import loop_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from trainatomy.workload.schema import Workload
    from trainatomy.workload.train import TrainSpec


OF_FRESH_PROCESS = 67280421310721
"""Seed of PyTorch's generators before anyone sets one (c10/core/GeneratorImpl.h, ``default_rng_seed_val``)."""


def seed_host(seed: int) -> None:
    """Seed the generators of Python, NumPy and PyTorch on the host; those of GPUs decide no size."""
    random.seed(seed)
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)


def host_states() -> dict[str, Any]:
    """Return the states of the same generators by name, to be compared."""
    numpy: Any = sys.modules.get("numpy")
    with torch._C._DisableFuncTorch(), torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
        drawn = torch.default_generator.get_state().numpy().tobytes()
    states: dict[str, Any] = {"torch": drawn, "random": random.getstate()}
    if numpy is not None:
        _, keys, position, *rest = numpy.random.get_state()
        states["numpy"] = (keys.tobytes(), position, *rest)
    return states


def set_tf32(train: TrainSpec) -> None:
    """Allow or forbid TF32 in float32 operations, as ``TrainingArguments`` does, if the workload says which.

    The setting holds for the process until ``process.isolated_process_settings`` restores it.
    """
    if train.tf32 is not None:
        backends: Any = torch.backends
        backends.fp32_precision = "tf32" if train.tf32 else "ieee"


def autocast(train: TrainSpec, device_type: str) -> AbstractContextManager[object]:
    """Return autocast in the precision of ``train``, or a context manager that does nothing."""
    if train.fp16:
        return torch.autocast(device_type, dtype=torch.float16)
    if train.bf16:
        return torch.autocast(device_type, dtype=torch.bfloat16)
    return nullcontext()


def full_precision_of_inference(train: TrainSpec) -> torch.dtype | None:
    """Return the dtype to which inference casts the whole model, or ``None``."""
    if train.fp16_full_eval:
        return torch.float16
    return torch.bfloat16 if train.bf16_full_eval else None


_backends: Any = torch.backends
_CACHING_MODULES = ("transformers.utils.import_utils", "accelerate.utils.imports", "accelerate.utils.environment")


def forget_device() -> None:
    """Clear cached answers about the device (``is_torch_cuda_available``, …) and accelerate's shared state.

    PyTorch's checkpointing remembers on which kind of device it restores random numbers.

    Touches only modules that are already imported.
    """
    for name in _CACHING_MODULES:
        module = sys.modules.get(name)
        for function in list(vars(module).values()) if module is not None else []:
            clear = getattr(function, "cache_clear", None)
            if callable(clear):
                clear()
    checkpoint: Any = torch.utils.checkpoint
    checkpoint.DefaultDeviceType._default_device_type = None
    state: Any = sys.modules.get("accelerate.state")
    if state is not None:
        state.AcceleratorState._reset_state(reset_partial_state=True)
        state.GradientState._reset_state()


def _levels_of_precision() -> tuple[Any, ...]:
    """Return what has a precision of fp32 operations of its own, the most general first.

    ``torch.backends.cudnn.flags``, which losses of CTC use, writes the more special ones.
    """
    cudnn = _backends.cudnn
    return (_backends, cudnn, _backends.cuda.matmul, cudnn.conv, cudnn.rnn)


@contextmanager
def isolated_process_settings() -> Iterator[None]:
    """Clear device caches before and after, silence transformers' warnings, and restore TF32 and the log level."""
    precisions = [each.fp32_precision for each in _levels_of_precision()]
    forget_device()
    log: Any = sys.modules.get("transformers.utils.logging")
    verbosity = None if log is None else log.get_verbosity()
    if log is not None:
        log.set_verbosity_error()
    try:
        yield
    finally:
        for level, precision in zip(_levels_of_precision(), precisions, strict=True):
            if level.fp32_precision != precision:
                level.fp32_precision = precision
        if log is not None:
            log.set_verbosity(verbosity)
        forget_device()


def check_transformers() -> None:
    """Refuse a transformers whose models do not say which weights stay in float32.

    Raises:
        MissingLibrary: It is older than 5.1.
    """
    found = version_of("transformers")
    if found is not None and not transformers_has("dtype_plans"):
        oldest = version_text(transformers_since("dtype_plans"))
        raise MissingLibrary(
            f"trainatomy needs transformers {oldest} or later, found {found}: pip install --upgrade transformers",
            library="transformers",
        )


def preload(workload: Workload) -> None:
    """Import everything that ``run`` will need.

    Call it before a simulated GPU appears: while they are imported, PyTorch's compiler and bitsandbytes look for
    functions that only a CUDA build has.

    Raises:
        MissingLibrary: A library that the loop, peft or the optimizer needs is not installed or does not work here, or
            transformers is older than 5.1.
        WorkloadError, FactoryError: See ``optimizer_class``.
    """
    check_transformers()
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # it logs what it cannot do on a CPU
    import_module("torch._dynamo")
    if workload.model.has_adapters:
        import_library("peft", "model.lora")
    loop = loop_of(workload)
    for library, purpose in loop.libraries.items():
        import_library(library, purpose, install=loop.extra)
    for module in loop.imports:
        import_library(module, f"loop: {workload.loop}")
    import_module(loop.module)
    if not loop.trains:
        return
    if workload.train.deepspeed is not None:
        import_deepspeed()
    if is_class_path(workload.train.optim):
        optimizer_class(workload.train.optim)
        return
    if is_factory(workload.train.optim):
        factory.load(workload.train.optim, "train.optim")
        return
    package = arguments().optimizers.get(workload.train.optim)
    if package is not None:
        import_library(module_of(package), f"train.optim: {workload.train.optim}", install=package)
