"""Recurrent networks of ``trainings.yaml`` by their names: ``lstm_320_800_3`` has three layers of 800 on inputs of 320.

A name that ends with ``_both`` has two directions.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from torch import nn

sys.path.append(str(Path(__file__).resolve().parent))

from text_networks import Sequences

_ENTRIES = 4000
"""Tokens of the vocabulary of ``fresh_networks.py:sentences``."""


def __getattr__(name: str) -> Callable[[], nn.Module]:
    if not (form := re.fullmatch(r"(lstm|gru|rnn)_(\d+)_(\d+)_(\d+)(_both)?", name)):
        raise AttributeError(name)
    kind, inputs, hidden, layers, both = form.groups()
    sizes = int(inputs), int(hidden), _ENTRIES
    return partial(Sequences, getattr(nn, kind.upper()), *sizes, num_layers=int(layers), bidirectional=bool(both))
