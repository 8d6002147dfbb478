"""The stages of a pipeline: a causal language model of transformers, divided by its layers.

Every stage runs the model's own forward pass.  Where a layer belongs to another stage, a module that returns its input
takes its place; the model's plan (``base_model_pp_plan``) says which modules come before the layers and which after
them.  The first stage takes token ids, the others the hidden states of the stage before; the last one has the head.
"""

from __future__ import annotations

import copy
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from trainatomy.errors import WorkloadError

if TYPE_CHECKING:
    from collections.abc import Sequence

_KEY = "parallel.pp_size"


class Elsewhere(nn.Module):
    """Takes the place of a module that belongs to another stage: returns the hidden states unchanged."""

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return the first argument."""
        return hidden_states


class Stage(nn.Module):
    """A stage: some layers of a model, with the embeddings in the first and the head in the last one.

    Attributes:
        base: The base model, in which modules of other stages are replaced.
        head: The output layer; None in all stages but the last.
    """

    def __init__(self, base: nn.Module, head: nn.Module | None, *, is_first: bool) -> None:
        """Take the parts of a model."""
        super().__init__()
        self.base = base
        self.head = head
        self._argument = "input_ids" if is_first else "inputs_embeds"

    def forward(self, given: torch.Tensor, **options: torch.Tensor) -> torch.Tensor:
        """Return hidden states; the last stage returns logits."""
        output = self.base(**{self._argument: given}, use_cache=False, **options)
        hidden: torch.Tensor = output.last_hidden_state
        return hidden if self.head is None else self.head(hidden)


def stages_of(model: Any, indices: Sequence[int], count: int) -> list[Stage]:
    """Return the stages with these indices of a model that is divided into ``count``.

    The stages hold the model's own modules.  The model loses all others: its parameters are then those of the stages.

    Raises:
        WorkloadError: The model cannot be divided, or has fewer layers than stages.
    """
    base, plan = model.base_model, _plan_of(model)
    layers = layers_in(model)
    if count > len(layers):
        raise WorkloadError(
            f"{type(model).__name__} has {len(layers)} layers, too few for {count} stages: each has at least one",
            key=_KEY,
        )
    names = list(plan)
    position = names.index(_name_of(base, layers))
    bounds = [0, *accumulate(layers_by_stage(len(layers), count))]
    stages = []
    for index in indices:
        is_first, is_last = index == 0, index == count - 1
        part = _without_modules(base)
        for place, name in enumerate(names):
            is_here = is_first if place < position else is_last
            part.register_module(name, getattr(base, name) if is_here else Elsewhere())
        here = range(bounds[index], bounds[index + 1])
        kept = [layer if number in here else Elsewhere() for number, layer in enumerate(layers)]
        part.register_module(names[position], nn.ModuleList(kept))
        stages.append(Stage(part, model.get_output_embeddings() if is_last else None, is_first=is_first))
    _drop_others(model, stages)
    return stages


def layers_by_stage(layers: int, stages: int) -> list[int]:
    """Return the number of layers of each stage: equal, with one more in the first ones if they cannot be."""
    return [layers // stages + (index < layers % stages) for index in range(stages)]


def _drop_others(model: nn.Module, stages: Sequence[Stage]) -> None:
    """Replace the modules of a model with parameters that are in none of the stages."""
    kept = {id(module) for stage in stages for module in stage.modules()}
    for name, module in list(model.named_modules()):
        if id(module) not in kept and any(True for _ in module.parameters(recurse=False)):
            parent, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(parent), attribute, Elsewhere())


def _without_modules(base: nn.Module) -> nn.Module:
    """Return a copy of a model that shares all its modules, so that some can be replaced."""
    part = copy.copy(base)
    part._modules = dict(base._modules)
    return part


def _plan_of(model: Any) -> dict[str, Any]:
    """Return the model's plan for pipelines.

    Raises:
        WorkloadError: It has none, or weights that two stages would share.
    """
    name, config = type(model).__name__, getattr(model, "config", None)
    if getattr(config, "is_encoder_decoder", False):
        raise WorkloadError(
            f"{name} has an encoder and a decoder; pipelines of decoder models alone are simulated", key=_KEY
        )
    plan = getattr(config, "base_model_pp_plan", None) or {}
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    if not plan or head is None or not hasattr(model, "base_model"):
        raise WorkloadError(
            f"{name} cannot be divided into stages: it has no output layer, or its configuration has no plan "
            "(base_model_pp_plan); causal language models such as Llama, Qwen, Mistral and Gemma have both",
            key=_KEY,
        )
    if model.get_input_embeddings().weight is head.weight:
        raise WorkloadError(
            f"{name} shares the weights of its embeddings and its output layer (tie_word_embeddings), which belong to "
            "the first and the last stage: set model.config: {tie_word_embeddings: false}",
            key=_KEY,
        )
    return dict(plan)


def layers_in(model: Any) -> list[nn.Module]:
    """Return the layers of a model that a pipeline divides.

    Raises:
        WorkloadError: It cannot be divided.
    """
    plan, base = _plan_of(model), model.base_model
    lists = [module for name in plan if isinstance(module := getattr(base, name, None), nn.ModuleList)]
    missing = [name for name in plan if not isinstance(getattr(base, name, None), nn.Module)]
    if len(lists) != 1 or missing:
        raise WorkloadError(
            f"the plan of {type(base).__name__} names {', '.join(missing) or 'several lists of layers'}, which cannot "
            "be divided into stages",
            key=_KEY,
        )
    return list(lists[0])


def _name_of(base: nn.Module, layers: list[nn.Module]) -> str:
    return next(
        name for name, module in base.named_children() if isinstance(module, nn.ModuleList) and list(module) == layers
    )
