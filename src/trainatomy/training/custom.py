"""Build an optimizer that the workload names by its class (``bitsandbytes.optim.Adam8bit``, ``mine.optimizers.Slow``).

It is built as in a script that passes its optimizer to the Trainer, ``optimizers=(optimizer, None)``: over the model as
it was built, before the Trainer moves it.  A parameter stays the same object when it is moved, and states are made in
the first step, so they are on the device of the parameters at that time.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from trainatomy.errors import MissingLibrary, TrainatomyError, WorkloadError
from trainatomy.training import factory
from trainatomy.workload.arguments import arguments
from trainatomy.workload.nearest import suggestion

if TYPE_CHECKING:
    from trainatomy.workload.train import TrainSpec

OptimizerClass = type[torch.optim.Optimizer]


def optimizer_class(path: str) -> OptimizerClass:
    """Return the class at ``path``.

    Raises:
        MissingLibrary: It belongs to a library of optimizers that is not installed.
        WorkloadError: There is no such module or class, or it is not an optimizer.
        FactoryError: Importing the user's module failed.
    """
    place, _, name = path.rpartition(".")
    package = place.partition(".")[0]
    if package in arguments().optimizers.values() and not _is_installed(package):
        message = f"train.optim: {path} needs {package}, which is not installed: pip install {package}"
        raise MissingLibrary(message, library=package)
    found: Any = factory.load(f"{place}:{name}", "train.optim")
    if not (isinstance(found, type) and issubclass(found, torch.optim.Optimizer)):
        raise WorkloadError(
            f"train.optim: {path} is not a class that derives from torch.optim.Optimizer", key="train.optim"
        )
    return found


def _is_installed(package: str) -> bool:
    from importlib.util import find_spec

    return find_spec(package) is not None


def create_custom(train: TrainSpec, model: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer of ``train`` over the trainable parameters of ``model``.

    Raises:
        WorkloadError: The constructor refuses the arguments; the message gives its reason.
        MissingLibrary, FactoryError: See ``optimizer_class``.
    """
    chosen = optimizer_class(train.optim)
    accepted = inspect.signature(chosen).parameters
    keywords = _keywords(train, chosen, accepted)
    groups: Any = _groups(model, keywords["weight_decay"]) if "weight_decay" in keywords else _trainable(model)
    try:
        return chosen(groups, **keywords)
    except (TrainatomyError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        reason = str(error) or type(error).__name__
        raise WorkloadError(f"train.optim: {train.optim} refuses: {reason}", key="train.optim") from error


def _keywords(train: TrainSpec, chosen: OptimizerClass, accepted: Any) -> dict[str, Any]:
    """Return the Trainer's settings that the constructor has by name, overridden by ``optim_args``."""
    settings = {
        "lr": train.learning_rate,
        "betas": (train.adam_beta1, train.adam_beta2),
        "eps": train.adam_epsilon,
        "weight_decay": train.weight_decay,
    }
    known = {name: value for name, value in settings.items() if name in accepted and _takes(accepted[name], value)}
    given = train.optimizer_arguments()
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in accepted.values()):
        for name in given.keys() - accepted.keys():
            hint = suggestion(name, set(accepted) - {"params"})
            raise WorkloadError(f"train.optim_args: {chosen.__name__} has no {name!r}{hint}", key="train.optim_args")
    return known | given


def _takes(parameter: inspect.Parameter, value: Any) -> bool:
    """Return whether a default has the form of ``value``: Adafactor's ``eps`` is a pair, Adam's a number."""
    default = parameter.default
    return default in (None, parameter.empty) or isinstance(default, tuple) == isinstance(value, tuple)


def _trainable(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def _groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Return the groups of ``Trainer.create_optimizer``: with weight decay, and without (biases and norms)."""
    from transformers import Trainer

    decaying = set(Trainer.get_decay_parameter_names(Trainer.__new__(Trainer), model))
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    return [
        {"params": [p for name, p in named if name in decaying], "weight_decay": weight_decay},
        {"params": [p for name, p in named if name not in decaying], "weight_decay": 0.0},
    ]
