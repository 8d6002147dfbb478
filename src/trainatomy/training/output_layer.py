"""The layers of a model that make its logits: a score for each token of the vocabulary."""

from __future__ import annotations

from contextlib import suppress

import torch
from torch import nn
from torch.nn.parameter import is_lazy


def output_layers(model: nn.Module) -> list[str]:
    """Return the names of a model's layers that make logits.

    They are the output embeddings that transformers names, or else the last layer whose weight has the shape of the
    largest table of embeddings, which is that of the tokens.
    """
    named = dict(model.named_modules())
    known = {id(_named_by_transformers(module)) for module in named.values()}
    if found := [name for name, module in named.items() if id(module) in known]:
        return found
    shapes = {name: _shape(module) for name, module in named.items()}
    tables = [shapes[name] for name, module in named.items() if isinstance(module, nn.Embedding)]
    tokens = max(tables, key=lambda shape: shape[0], default=())
    return [name for name, module in named.items() if isinstance(module, nn.Linear) and shapes[name] == tokens][-1:]


def _shape(module: nn.Module) -> tuple[int, ...]:
    """Return the shape of a module's weight, () if it has none yet."""
    weight = getattr(module, "weight", None)
    return tuple(weight.shape) if isinstance(weight, torch.Tensor) and not is_lazy(weight) else ()


def _named_by_transformers(module: nn.Module) -> object:
    with suppress(NotImplementedError, AttributeError):  # models without text, and what is not yet built
        return module.get_output_embeddings()  # type: ignore[operator]
    return None


def around(name: str) -> list[str]:
    """Return the names of the modules that a layer lies in: "" for the model itself, and so on."""
    parts = name.split(".")
    return [".".join(parts[:count]) for count in range(len(parts))]
