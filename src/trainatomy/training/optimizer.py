"""Create the optimizer that ``train.optim`` names.

A name of the Trainer's gives the Trainer's own optimizer: its classes, its groups, its defaults.  The Trainer passes
``optim_args`` to some optimizers only, and AdamW is not among them.  Here every argument that a class of
``torch.optim`` has is passed on, so that ``optim: adamw_torch`` with ``optim_args: "foreach=False"`` is AdamW as a loop
over parameters.

The path of a class (``bitsandbytes.optim.Adam8bit``, ``mine.optimizers.Slow``) is built as in a script that passes its
optimizer to the Trainer, ``optimizers=(optimizer, None)``: over the model as it was built, before the Trainer moves it.
A parameter stays the same object when it is moved, and states are made in the first step, so they are on the device of
the parameters at that time.

A function (``mine.optimizers:make``) gets the model and returns its optimizer, or several, which a plain loop steps one
after the other.

Optimizers that a user's function makes: one, or several, such as Muon for matrices and AdamW for the rest.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from trainatomy.errors import MissingLibrary, SimulationError, TrainatomyError, WorkloadError
from trainatomy.training import factory
from trainatomy.training.stored_weights import parts
from trainatomy.workload.arguments import arguments as known_arguments
from trainatomy.workload.arguments import is_class_path, is_factory, is_own
from trainatomy.workload.document import suggestion

if TYPE_CHECKING:
    from transformers import TrainingArguments

    from trainatomy.workload.schema import Workload
    from trainatomy.workload.train import TrainSpec


_KEY = "train.optim"


class SeveralOptimizers(torch.optim.Optimizer):
    """Several optimizers in the place of one: a call goes to all of them in their order, as in a loop."""

    def __init__(self, parts: Sequence[torch.optim.Optimizer]) -> None:
        self.parts = tuple(parts)
        groups = [group for part in parts for group in part.param_groups]
        super().__init__([{"params": group["params"]} for group in groups], {})
        self.param_groups = groups

    @property  # type: ignore[override]
    def state(self) -> dict[Any, Any]:
        """The states of all of them, by the number of the optimizer and the parameter."""
        return {(number, key): value for number, part in enumerate(self.parts) for key, value in part.state.items()}

    @state.setter
    def state(self, value: Any) -> None:
        """Keep nothing: the states are those of the parts."""

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Take a step with each."""
        for part in self.parts:
            part.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of each."""
        for part in self.parts:
            part.zero_grad(set_to_none=set_to_none)


def each_of(optimizer: torch.optim.Optimizer) -> tuple[torch.optim.Optimizer, ...]:
    """Return the optimizers that a gradient scaler is given one after the other."""
    return optimizer.parts if isinstance(optimizer, SeveralOptimizers) else (optimizer,)


def optimizers_of(path: str, model: nn.Module) -> torch.optim.Optimizer:
    """Call a user's function and return its optimizer.

    Args:
        path: ``package.module:make`` or ``path/to/file.py:make``.
        model: The model, which the function gets.

    Raises:
        WorkloadError: There is no such function, it returned no optimizers, or one of them needs a closure.
        FactoryError: Importing or calling it failed.
    """
    make = factory.load(path, _KEY)
    if isinstance(make, type) and issubclass(make, torch.optim.Optimizer):
        message = f"{_KEY}: {path} is a class of optimizers: write optim: {path.replace(':', '.')}"
        raise WorkloadError(message, key=_KEY)
    made = factory.call(make, _KEY, (model,))
    parts = list(made) if isinstance(made, (list, tuple)) else [made]
    if not parts or not all(isinstance(part, torch.optim.Optimizer) for part in parts):
        kind = ", ".join(type(part).__name__ for part in parts) or "an empty list"
        raise WorkloadError(f"{_KEY}: {path} must return an optimizer or a list of them, not {kind}", key=_KEY)
    for part in parts:
        closure = inspect.signature(part.step).parameters.get("closure")
        if closure is not None and closure.default is closure.empty:
            name = f"{type(part).__module__}.{type(part).__qualname__}"
            message = f"{_KEY}: {path} returned {name}, whose step needs a closure: give the class, optim: {name}"
            raise WorkloadError(message, key=_KEY)
    return parts[0] if len(parts) == 1 else SeveralOptimizers(parts)


Choice = tuple[Any, dict[str, Any]]
"""A class (or a factory of the Trainer's) and its keyword arguments."""

OptimizerClass = type[torch.optim.Optimizer]


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
    extra = train.optimizer_arguments()
    for name in extra:
        if name not in accepted:
            raise WorkloadError(
                f"train.optim_args: {chosen.__name__} has no {name!r}{suggestion(name, accepted)}",
                key="train.optim_args",
            )
    more = {name: value for name, value in extra.items() if name not in keywords or name in {"foreach", "fused"}}
    if more.get("foreach") and keywords.get("fused") and "fused" not in more:
        message = f"train.optim_args: foreach=True cannot be combined with {train.optim}: use adamw_torch"
        raise WorkloadError(message, key="train.optim_args")
    return more


def create_optimizer(train: TrainSpec, arguments: TrainingArguments, model: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer over the trainable parameters of ``model``, by its class or by ``Trainer.create_optimizer``.

    There is no Trainer around it: only the attributes that the method reads are set.
    """
    from transformers import Trainer

    if is_own(train.optim):
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


def optimizer_class(path: str) -> OptimizerClass:
    """Return the class at ``path``.

    Raises:
        MissingLibrary: It belongs to a library of optimizers that is not installed.
        WorkloadError: There is no such module or class, or it is not an optimizer.
        FactoryError: Importing the user's module failed.
    """
    place, _, name = path.rpartition(".")
    package = place.partition(".")[0]
    if package in known_arguments().optimizers.values() and not _is_installed(package):
        message = f"train.optim: {path} needs {package}, which is not installed: pip install {package}"
        raise MissingLibrary(message, library=package)
    found: Any = factory.load(f"{place}:{name}", "train.optim")
    if not (isinstance(found, type) and issubclass(found, torch.optim.Optimizer)):
        raise WorkloadError(
            f"train.optim: {path} is not a class that derives from torch.optim.Optimizer", key="train.optim"
        )
    return found


def needs_closure(train: TrainSpec) -> bool:
    """Return whether the optimizer's ``step`` must be given a closure, as that of LBFGS."""
    if not is_class_path(train.optim):
        return False
    closure = inspect.signature(optimizer_class(train.optim).step).parameters.get("closure")
    return closure is not None and closure.default is closure.empty


def refuse_closures(workload: Workload) -> None:
    """Raise ``SimulationError`` for an optimizer with a closure that the loop cannot run or whose steps are unknown."""
    train = workload.train
    if not needs_closure(train):
        return
    reason = None
    if workload.loop != "pytorch":
        reason = "the Trainer calls optimizer.step() without one: use loop: pytorch"
    elif workload.parallel.world_size > 1 or workload.parallel.devices > 1:
        reason = "that is simulated on one GPU"
    elif train.fp16:
        reason = "PyTorch's gradient scaling takes none: use bf16"
    elif not issubclass(optimizer_class(train.optim), torch.optim.LBFGS):
        reason = "how often depends on values; only torch.optim.LBFGS is simulated"
    elif train.optimizer_arguments().get("line_search_fn") is not None:
        reason = "how often its line search does depends on values: leave line_search_fn out"
    if reason is not None:
        message = f"train.optim: {train.optim} needs a closure that evaluates the model several times in a step; "
        raise SimulationError(f"{message}{reason}, or choose another optimizer")


def steps_with_closure(train: TrainSpec) -> int:
    """Return after how many steps LBFGS holds as much as it ever will: its history is full, and one more step runs.

    The first iteration of a training adds nothing to the history.
    """
    settings = {name: each.default for name, each in inspect.signature(optimizer_class(train.optim)).parameters.items()}
    settings |= train.optimizer_arguments()
    return -(-(settings["history_size"] + 1) // settings["max_iter"]) + 1


def without_tolerance(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Let LBFGS make all its iterations: none of its changes is below a tolerance."""
    for group in optimizer.param_groups:
        group["tolerance_grad"] = group["tolerance_change"] = -math.inf
        group["max_eval"] = max(group["max_eval"], group["max_iter"])
    return optimizer


def _is_installed(package: str) -> bool:
    return find_spec(package) is not None


def create_single(workload: Workload, model: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer of a user for a Trainer, which takes one; the errors are those of ``create_custom``."""
    optimizer = create_custom(workload.train, model)
    if isinstance(optimizer, SeveralOptimizers):
        found = f"{workload.train.optim} returned {len(optimizer.parts)} optimizers"
        raise WorkloadError(
            f"train.optim: {found}, and loop: {workload.loop} steps one: use loop: pytorch", key="train.optim"
        )
    if any(state.numel() > 1 for state in states_of(optimizer)):
        raise WorkloadError(
            f"train.optim: {workload.train.optim} makes its states when it is made. They stay on the CPU when the "
            "Trainer moves the model, so that its first step fails: use loop: pytorch, or a name of the Trainer's "
            "such as adagrad",
            key="train.optim",
        )
    return optimizer


def create_custom(train: TrainSpec, model: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer of ``train`` over the trainable parameters of ``model``; several are one object.

    Raises:
        WorkloadError: The constructor refuses the arguments, with its reason; a function returned something else.
        MissingLibrary, FactoryError: See ``optimizer_class``.
    """
    if is_factory(train.optim):
        return optimizers_of(train.optim, model)
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
        message = f"train.optim: {train.optim} refuses: {reason}{_FOR_MATRICES if chosen is _MUON else ''}"
        raise WorkloadError(message, key="train.optim") from error


_MUON = getattr(torch.optim, "Muon", None)
_FOR_MATRICES = (
    ".\nNorms, biases and embeddings need another optimizer: with `loop: pytorch`, name a function of the model that "
    "returns both, `train.optim: file.py:make`"
)


def sharded_optimizer(train: TrainSpec, arguments: TrainingArguments, model: nn.Module) -> Choice:
    """Return the class of an optimizer of sharded parameters or states, and its arguments.

    ``ZeroRedundancyOptimizer`` takes them, and the Trainer with FSDP.  Raises as ``create_custom`` does.
    """
    if is_factory(train.optim):
        message = f"{train.optim} makes its optimizers itself, and ZeroRedundancyOptimizer makes them of a class"
        raise WorkloadError(f"train.optim: {message}: give the class, or another strategy", key="train.optim")
    if not is_class_path(train.optim):
        return choose_optimizer(train, arguments, model)
    chosen = optimizer_class(train.optim)
    return chosen, _keywords(train, chosen, inspect.signature(chosen).parameters)


def _keywords(train: TrainSpec, chosen: OptimizerClass, accepted: Any) -> dict[str, Any]:
    """Return the Trainer's settings that the constructor has by name, overridden by ``optim_args``."""
    settings = {
        "lr": train.learning_rate,
        "betas": (train.adam_beta1, train.adam_beta2),
        "eps": train.adam_epsilon,
        "weight_decay": train.weight_decay,
    }
    known = {name: value for name, value in settings.items() if name in accepted and _takes(accepted[name], value)}
    extra = train.optimizer_arguments()
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in accepted.values()):
        for name in extra.keys() - accepted.keys():
            hint = suggestion(name, set(accepted) - {"params"})
            raise WorkloadError(f"train.optim_args: {chosen.__name__} has no {name!r}{hint}", key="train.optim_args")
    return known | extra


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


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield all tensors in nested mappings and sequences; the keys of a mapping (parameters) do not count.

    A packed tensor is the tensors inside it; an object that an optimizer keeps, such as GaLore's projector, is its
    attributes.
    """
    if isinstance(value, torch.Tensor):
        yield from parts(value)
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)
    elif hasattr(value, "__dict__") and not isinstance(value, (type, nn.Module)) and not callable(value):
        yield from tensors_in([each for each in vars(value).values() if isinstance(each, (torch.Tensor, list, tuple))])


def states_of(optimizer: Any) -> Iterator[torch.Tensor]:
    """Yield the states of an optimizer, and those of the optimizers that it stands for.

    These are of single layers (transformers' GaLore: ``optimizer_dict``), or of single parameters on the host, with one
    for those that stay on the GPU (torchao's ``CPUOffloadOptimizer``: ``optim_dict``, ``d_opt``).
    """
    plain = getattr(optimizer, "optimizer", optimizer)  # accelerate's has the real one inside
    of_parts = [each for name in ("optimizer_dict", "optim_dict") for each in getattr(plain, name, {}).values()]
    for each in (optimizer, *of_parts, getattr(plain, "d_opt", None)):
        yield from tensors_in(list(getattr(each, "state", {}).values()))
