"""Weights that stay in 16 or 32 bits although quantised ones were asked for, such as the experts of a mixture."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

from trainatomy.results.notes import LeadingNote
from trainatomy.training.packed_weights import is_packed, parts
from trainatomy.units import human_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import torch

_LARGE_SHARE = 0.2
"""Share of the bytes of all weights from which those that are not quantised are worth a note."""


@dataclass(frozen=True)
class UnquantisedWeights:
    """Parameters of one class of modules that are not quantised, and are a large share of a model.

    Attributes:
        module: Name of the class.
        parameters: The parameters.
        bytes: Bytes that they hold when the model is loaded.
        of_bytes: Bytes of all weights of the model at that time.
    """

    module: str
    parameters: Sequence[torch.Tensor]
    bytes: int
    of_bytes: int


def is_quantised_layer(module: nn.Module) -> bool:
    """Return whether a layer is one of bitsandbytes', or has a weight that torchao packed."""
    return type(module).__module__.startswith("bitsandbytes.") or is_packed(module._parameters.get("weight"))


def unquantised_weights(model: Any) -> tuple[UnquantisedWeights, ...]:
    """Return the weights of a loaded model that are not quantised, where they are a large share of it.

    Embeddings and output layers are left out: no library quantises them.
    """
    whole = {id(model.get_input_embeddings()), id(model.get_output_embeddings())}
    by_module: dict[str, list[torch.Tensor]] = {}
    for module in model.modules():
        if not (is_quantised_layer(module) or isinstance(module, nn.Embedding) or id(module) in whole):
            by_module.setdefault(type(module).__name__, []).extend(module.parameters(recurse=False))
    total = _bytes(model.parameters())
    found = (UnquantisedWeights(name, group, _bytes(group), total) for name, group in by_module.items())
    return tuple(each for each in found if each.bytes > _LARGE_SHARE * total)


def unquantised_notes(model: Any, found: Iterable[UnquantisedWeights]) -> Iterator[str]:
    """Yield a note on each class of modules whose weights were left as they were, once the model is prepared."""
    method = model.config.quantization_config.quant_method
    for each in found:
        held, kind = _bytes(each.parameters), str(each.parameters[0].dtype).removeprefix("torch.")
        note = (
            f"{human_bytes(each.bytes)} of the {human_bytes(each.of_bytes)} of weights are not quantised: they are "
            f"parameters of {each.module}, and {getattr(method, 'value', method)} quantises the weights of linear "
            "layers only (transformers 5 keeps all experts of a layer in one parameter)"
        )
        if held > each.bytes:
            note += (
                f". peft's prepare_model_for_kbit_training casts them to {kind} ({human_bytes(held)}); "
                "model.quantization.prepare_model_for_kbit_training: false leaves them"
            )
        yield LeadingNote(note)


def _bytes(parameters: Iterable[torch.Tensor]) -> int:
    return sum(part.nbytes for parameter in parameters for part in parts(parameter))
