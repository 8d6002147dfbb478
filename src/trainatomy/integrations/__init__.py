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

from trainatomy.lazy import lazy

NAMES = {
    "integrations.batch_size": "fit_training_arguments, predicted_batch_size",
    "training.checkpointing": "checkpoint_every",
    "training.loops.trainer": "CheckpointEvery",
}
__getattr__, __dir__, __all__ = lazy(__name__, NAMES)
