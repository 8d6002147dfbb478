"""Without a GPU there is nothing to watch: said once, and the training goes on as if nobody had asked."""

from __future__ import annotations

import warnings

import torch

_said = False


def has_gpu() -> bool:
    """Whether PyTorch has a GPU; warns the first time that there is none."""
    global _said
    if torch.cuda.is_available():
        return True
    if not _said:
        _said = True
        warnings.warn(
            "trainatomy finds no GPU on this machine: the training is not watched. `trainatomy.predict` needs no GPU.",
            RuntimeWarning,
            stacklevel=3,
        )
    return False
