"""Children of a process that has imported the libraries: each measures as a fresh process would, without the wait.

Importing PyTorch and transformers takes seconds.  A fork saves them and changes no figure, because CUDA is initialised
in the child only, and because what would make a difference is kept out of forks: other allocator options (PyTorch reads
them when it is loaded) and bitsandbytes (which asks CUDA about the card when it is imported).
"""

from __future__ import annotations

import os
import sys
from contextlib import contextmanager
from importlib import import_module
from typing import TYPE_CHECKING

from trainatomy.measurement.process.job import Job, set_environment

if TYPE_CHECKING:
    from collections.abc import Iterator

NVML_CHECK = "PYTORCH_NVML_BASED_CUDA_CHECK"
"""With it, PyTorch asks NVML for GPUs, not CUDA, which no fork could use afterwards (torch/cuda/__init__.py)."""


def can_fork(job: Job) -> bool:
    """Whether a fork of a process that ``preload`` prepared measures what a fresh process would."""
    optimizer = job.workload.get("train", {}).get("optim", "")
    needs_bitsandbytes = any(word in optimizer for word in ("bnb", "8bit", "lion", "ademamix", "paged"))
    return hasattr(os, "fork") and not job.workload.get("allocator") and not needs_bitsandbytes


def preload() -> bool:
    """Import what every training needs; False where that initialised CUDA, after which no fork could use the GPU."""
    os.environ[NVML_CHECK] = "1"
    set_environment(os.environ, "")
    with _hidden("bitsandbytes"):
        import torch

        from trainatomy.measurement.step import on_card  # noqa: F401
        from trainatomy.workload.loops import LOOPS

        for loop in LOOPS.values():
            for module in (*loop.imports, loop.module):
                import_module(module)
    return not torch.cuda.is_initialized()


@contextmanager
def _hidden(module: str) -> Iterator[None]:
    """Make ``module`` look as if it were not installed; one that is loaded comes back as it was."""
    loaded = sys.modules.get(module)
    sys.modules[module] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        if loaded is None:
            del sys.modules[module]
        else:
            sys.modules[module] = loaded
