"""Find the loss in the output of a model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from trainatomy.errors import FactoryError


def loss_of(outputs: Any, *, several: bool = False) -> Tensor:
    """Return the loss: the output itself, its ``"loss"``, its ``.loss`` or its first element.

    Args:
        outputs: What the model's forward returned.
        several: The outputs of several GPUs were gathered, so that there is a loss of each.

    Raises:
        FactoryError: There is no loss, or it is not a single number.
    """
    loss = _find(outputs)
    if not isinstance(loss, Tensor) or (loss.numel() != 1 and not several):
        found = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
        raise FactoryError(
            f"the model's forward returned {found} as its loss: it must return the loss (one number), a dict with "
            '"loss", or an object with .loss'
        )
    return loss


def _find(outputs: Any) -> Any:
    if isinstance(outputs, Tensor):
        return outputs
    if isinstance(outputs, Mapping):
        return outputs.get("loss")
    if hasattr(outputs, "loss"):
        return outputs.loss
    return outputs[0] if isinstance(outputs, tuple | list) and outputs else outputs


@contextmanager
def returning_loss(model: nn.Module) -> Iterator[None]:
    """Make ``model`` return ``{"loss": …}``, as the Trainer expects; a dict with a loss is returned unchanged."""

    def rewrap(module: nn.Module, arguments: Any, outputs: Any) -> Any:
        return outputs if isinstance(outputs, dict) and "loss" in outputs else {"loss": loss_of(outputs)}

    handle = model.register_forward_hook(rewrap)
    try:
        yield
    finally:
        handle.remove()
