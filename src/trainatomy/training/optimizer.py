"""Create the optimizer that ``train.optim`` names, as the Trainer does: its classes, its groups, its defaults.

The Trainer passes ``optim_args`` to some optimizers only, and AdamW is not among them.  Here every argument that a
class of ``torch.optim`` has is passed on, so that ``optim: adamw_torch`` with ``optim_args: "foreach=False"`` is AdamW
as a loop over parameters.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from trainatomy.errors import MissingLibrary, WorkloadError
from trainatomy.training.custom import create_custom
from trainatomy.workload.arguments import arguments as known_arguments
from trainatomy.workload.arguments import is_class_path
from trainatomy.workload.nearest import suggestion

if TYPE_CHECKING:
    from transformers import TrainingArguments

    from trainatomy.workload.train import TrainSpec

Choice = tuple[Any, dict[str, Any]]
"""A class (or a factory of the Trainer's) and its keyword arguments."""


def choose_optimizer(train: TrainSpec, arguments: TrainingArguments, model: nn.Module) -> Choice:
    """Return the class and its arguments; raise ``MissingLibrary`` or ``WorkloadError``."""
    from transformers import Trainer

    try:
        chosen, keywords = Trainer.get_optimizer_cls_and_kwargs(arguments, model)
    except ImportError as error:
        raise _missing(train.optim, error) from error
    except ValueError as error:
        package = known_arguments().optimizers.get(train.optim)
        if package is not None and ("install" in str(error) or "import" in str(error)):
            raise _missing(train.optim, error) from error
        raise WorkloadError(f"train.optim: {train.optim}: {error}", key="train.optim") from error
    return chosen, {**keywords, **_more(train, chosen, keywords)}


def _missing(name: str, error: Exception) -> MissingLibrary:
    package = known_arguments().optimizers.get(name)
    command = f"pip install {package}" if package else str(error)
    return MissingLibrary(f"train.optim: {name} needs a library that is not installed: {command}")


def _more(train: TrainSpec, chosen: Any, keywords: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments in ``optim_args`` that the Trainer ignores and the class has."""
    if not (isinstance(chosen, type) and chosen.__module__.startswith("torch.optim")):
        return {}
    accepted = set(inspect.signature(chosen).parameters) - {"params"}
    given = train.optimizer_arguments()
    for name in given:
        if name not in accepted:
            raise WorkloadError(
                f"train.optim_args: {chosen.__name__} has no {name!r}{suggestion(name, accepted)}",
                key="train.optim_args",
            )
    more = {name: value for name, value in given.items() if name not in keywords or name in {"foreach", "fused"}}
    if more.get("foreach") and keywords.get("fused") and "fused" not in more:
        message = f"train.optim_args: foreach=True cannot be combined with {train.optim}: use adamw_torch"
        raise WorkloadError(message, key="train.optim_args")
    return more


def create_optimizer(train: TrainSpec, arguments: TrainingArguments, model: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer over the trainable parameters of ``model``, by its class or by ``Trainer.create_optimizer``.

    There is no Trainer around it: only what that method reads is set.
    """
    from transformers import Trainer

    if is_class_path(train.optim):
        return create_custom(train, model)
    maker = Trainer.__new__(Trainer)
    maker.model = model
    maker.args = arguments
    maker.optimizer = None
    maker.optimizer_cls_and_kwargs = choose_optimizer(train, arguments, model)
    return checked(train, maker.create_optimizer)


def checked(train: TrainSpec, create: Any) -> torch.optim.Optimizer:
    """Call ``create`` and turn what an optimizer's constructor refuses into a ``WorkloadError``."""
    try:
        optimizer = create()
    except (ValueError, TypeError) as error:
        raise WorkloadError(f"train.optim: {train.optim}: {error}", key="train.optim") from error
    assert isinstance(optimizer, torch.optim.Optimizer)
    return optimizer
