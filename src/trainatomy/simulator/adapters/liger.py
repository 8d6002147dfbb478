"""Liger's layers on meta tensors: its own Python runs as it is, the installed version's, around simulated kernels.

Source: liger-kernel 0.8, transformers/monkey_patch.py.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterator
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING
from unittest import mock

import torch

from trainatomy.libraries import import_library
from trainatomy.simulator.adapters.adapter import Adapter
from trainatomy.simulator.adapters.triton import simulated_triton
from trainatomy.training.model import unwrap

if TYPE_CHECKING:
    from torch import nn

    from trainatomy.workload.schema import Workload

_EXTRA = "'trainatomy[liger]'"
_PURPOSE = "train.use_liger_kernel"
_PATCHED = "transformers.models."
"""Modules whose classes and functions Liger replaces, for the whole process."""


def uses_liger(workload: Workload) -> bool:
    """Return whether a training replaces a model's layers by Liger's."""
    return workload.mode == "training" and workload.train.use_liger_kernel


def import_liger() -> ModuleType:
    """Import Liger as on a machine with a GPU, and return the module that patches models.

    It asks for the device when it is imported, and chooses its kernels and autocast by the answer.

    Raises:
        MissingLibrary: Liger or Triton is not installed.
    """
    with contextlib.suppress(ImportError):
        import_module("peft")  # Liger imports it, and with it bitsandbytes, which must not see the GPU
    logging.getLogger("liger_kernel").setLevel(logging.ERROR)  # it lists implementations that are not installed
    import_library("triton", _PURPOSE, install=_EXTRA)
    with mock.patch.object(torch.cuda, "is_available", lambda: True):
        import_library("liger_kernel", _PURPOSE, install=_EXTRA)
        import_module("liger_kernel.ops")
        return import_module("liger_kernel.transformers.monkey_patch")


def has_liger_kernels(model_type: str) -> bool:
    """Return whether Liger replaces anything in models of that type."""
    return model_type in import_liger().MODEL_TYPE_TO_APPLY_LIGER_FN


@contextlib.contextmanager
def simulated_liger() -> Iterator[None]:
    """Let the Trainer patch a model with Liger's layers, and undo what that changes outside the model."""
    import_liger()
    utilities = import_module("liger_kernel.utils")
    forget = getattr(getattr(utilities, "infer_device_arch", None), "cache_clear", lambda: None)
    forget()  # it may remember another simulated GPU
    modules = [module for name, module in [*sys.modules.items()] if name.startswith(_PATCHED) and module is not None]
    kept = [(module, dict(vars(module))) for module in (*modules, torch.nn.functional)]
    try:
        with simulated_triton():
            yield
    finally:
        forget()
        for module, values in kept:
            for name, value in values.items():
                if vars(module).get(name) is not value:
                    setattr(module, name, value)


def _notes(workload: Workload, model: nn.Module) -> Iterator[str]:
    """Yield a note on what a prediction with Liger's layers leaves out."""
    kind = getattr(getattr(unwrap(model), "config", None), "model_type", "")
    if has_liger_kernels(kind):
        yield (
            "train.use_liger_kernel: memory is what Liger's own Python allocates around its Triton kernels; the time "
            "of these is that of moving each of their tensors once, and has not been compared with a GPU yet"
        )
    else:
        yield f"train.use_liger_kernel: Liger has no kernels for models of type {kind or type(unwrap(model)).__name__}"


ADAPTER = Adapter(
    is_used=lambda workload, _: uses_liger(workload),
    simulated=lambda process, workload: simulated_liger(),
    load=lambda _: import_liger(),
    notes=_notes,
)
