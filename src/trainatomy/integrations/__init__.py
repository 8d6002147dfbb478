"""Integrations with a user's own training, in a script or a notebook.

watch.py              ``trainatomy.watch`` around any loop
callback.py           ``AnatomyCallback`` for the Hugging Face Trainer
printing.py           ``print_gpu_utilization`` and ``print_summary``, as in the guides
live_measurement.py   one watched training: hooks, recorder, PyTorch's memory history and the result
live_prediction.py    the prediction of a watched training
batch_size.py         ``fit_training_arguments`` and ``predicted_batch_size``: settings that fit, before the first step

``checkpoint_every`` and ``CheckpointEvery`` do in a user's script what ``train.gradient_checkpointing_every`` does in a
workload.  These functions are imported when they are first used, because they import torch and transformers.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainatomy.integrations.batch_size import fit_training_arguments, predicted_batch_size
    from trainatomy.training.checkpointing import checkpoint_every
    from trainatomy.training.loops.trainer import CheckpointEvery

__all__ = ["CheckpointEvery", "checkpoint_every", "fit_training_arguments", "predicted_batch_size"]

_MODULES = {
    "CheckpointEvery": "trainatomy.training.loops.trainer",
    "checkpoint_every": "trainatomy.training.checkpointing",
    "fit_training_arguments": "trainatomy.integrations.batch_size",
    "predicted_batch_size": "trainatomy.integrations.batch_size",
}


def __getattr__(name: str) -> object:
    """Import the module that defines ``name``; raises ``AttributeError`` for other names."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)
