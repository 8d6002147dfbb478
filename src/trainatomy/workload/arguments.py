"""Names of ``TrainingArguments`` and optimizers, and how trainatomy handles each (``arguments.yaml``).

Values of arguments that change neither memory nor time, and that transformers refuses nevertheless.

A training with a schedule that does not exist does not start, so its prediction would be of nothing.

Keys of ``train.gradient_checkpointing_kwargs``: those of PyTorch's checkpoints, and those that the Trainer takes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any

import yaml

from trainatomy.catalog.files import parse_yaml
from trainatomy.errors import WorkloadError
from trainatomy.workload.document import suggestion
from trainatomy.workload.section import Problem, refuse

if TYPE_CHECKING:
    from trainatomy.workload.train import TrainSpec


@dataclass(frozen=True)
class Accepted:
    """Values of an argument that change nothing; every other is refused for ``reason``.

    Attributes:
        values: The values.
        keys: The values of each key, or ``any``, if the argument is a mapping.
    """

    reason: str
    values: tuple[Any, ...] = ()
    keys: Mapping[str, Any] | None = None

    def accepts(self, value: Any) -> bool:
        """Return whether the value changes nothing."""
        if value is None:
            return True
        if self.keys is None:
            return _plain(value) in self.values
        return isinstance(value, Mapping) and all(self._accepts_key(key, each) for key, each in value.items())

    def _accepts_key(self, key: str, value: Any) -> bool:
        allowed = (self.keys or {}).get(key, ())
        return allowed == "any" or value is None or value in allowed


@dataclass(frozen=True)
class Arguments:
    """The content of ``arguments.yaml``; every mapping goes from a name to a reason or a replacement."""

    ignored: Mapping[str, str]
    not_simulated: Mapping[str, str]
    refused: Mapping[str, str]
    accepted_values: Mapping[str, Accepted]
    renamed: Mapping[str, str]
    synonyms: Mapping[str, str]
    ignored_values: Mapping[str, tuple[str, ...]]
    schedules: Mapping[str, tuple[str, ...] | None]
    optimizers: Mapping[str, str | None]
    optimizer_synonyms: Mapping[str, str]
    refused_optimizers: Mapping[str, str]

    def is_unapplied(self, name: str, value: Any) -> bool:
        """Return whether ``name`` is accepted without being applied: ignored, not simulated, or without effect."""
        if name in self.accepted_values:
            return self.accepted_values[name].accepts(value)
        return name in self.ignored or name in self.not_simulated or (name in self.refused and is_off(value))

    def refusal_of(self, name: str) -> str | None:
        """Return why a value of ``name`` that changes something is refused, or None if ``name`` is never refused."""
        accepted = self.accepted_values.get(name)
        return self.refused.get(name) if accepted is None else accepted.reason

    def is_missed(self, name: str, value: Any) -> bool:
        """Return whether ``name: value`` would change the memory or the time of a training, and is not simulated."""
        return name in self.not_simulated and not is_off(value)

    def package_of(self, optim: str) -> str | None:
        """Return the package beside PyTorch that an optimizer needs, from its name or from the path of its class."""
        if is_class_path(optim):
            root = optim.partition(".")[0]
            return None if root == "torch" else root
        return self.optimizers.get(optim)

    def names(self) -> tuple[str, ...]:
        """Return names that are known without being keys of ``train``."""
        return (*self.ignored, *self.not_simulated, *self.refused, *self.accepted_values, *self.renamed)


def module_of(package: str) -> str:
    """Return the module of a package of optimizers, which is mostly called like the package."""
    return {"torch_optimi": "optimi"}.get(package, package)


def is_class_path(optim: str) -> bool:
    """Return whether ``optim`` is the path of a class (``package.module.Class``), not a name that the Trainer has."""
    parts = optim.split(".")
    return len(parts) > 1 and all(part.isidentifier() for part in parts)


def is_factory(optim: str) -> bool:
    """Return whether ``optim`` is a function that makes optimizers: ``package.module:make``, ``file.py:make``."""
    place, colon, name = optim.rpartition(":")
    return bool(colon and place) and name.isidentifier()


def path_of(optimizer: Callable[..., Any]) -> str:
    """Return the path of a class or of a function that makes optimizers, as ``train.optim`` has it."""
    between = "." if isinstance(optimizer, type) else ":"
    return f"{optimizer.__module__}{between}{optimizer.__qualname__}"


def check_keywords(batch: Any, optimizer: Any) -> None:
    """Raise WorkloadError if a batch or an optimizer has the wrong type."""
    torch: Any = sys.modules.get("torch")  # who has not imported it has no instance
    if torch is not None and isinstance(optimizer, torch.optim.Optimizer):
        name = type(optimizer).__name__
        raise WorkloadError(
            f"optimizer: got an instance of {name}, which belongs to the parameters it was made with.\n"
            f"Pass its class (optimizer=torch.optim.{name}) or a name ('adamw_torch'), and its settings by their names "
            "in TrainingArguments (learning_rate=1e-4)",
            key="train.optim",
        )
    if optimizer is not None and not isinstance(optimizer, str) and not callable(optimizer):
        kinds = "a name, a class of torch.optim.Optimizer, or a function of the model that returns optimizers"
        kind = type(optimizer).__name__
        raise WorkloadError(f"optimizer: got an object of type {kind}; it takes {kinds}", key="train.optim")
    if not "".join(getattr(optimizer, "__qualname__", "x").split(".")).isidentifier():
        raise WorkloadError(
            f"optimizer: {optimizer.__qualname__} cannot be imported by its name: define it at the top of a module",
            key="train.optim",
        )
    if batch is not None and not isinstance(batch, Mapping) and not callable(batch):
        raise WorkloadError(
            f"batch: takes a mapping of names to tensors, or a function of the batch size, not a {type(batch).__name__}"
        )


def is_own(optim: str) -> bool:
    """Return whether ``optim`` is the user's own class or function, not a name that the Trainer has."""
    return is_class_path(optim) or is_factory(optim)


def is_off(value: Any) -> bool:
    """Return whether a value switches a setting off: empty, false, or a word for it."""
    return not value or (isinstance(value, str) and value.lower() in {"false", "no", "none", "null", "off"})


def _plain(value: Any) -> Any:
    """Return a value as YAML would read it, if it was typed in a shell."""
    return yaml.safe_load(value) if isinstance(value, str) and value else value


def _by_name(by_reason: Mapping[str, list[str]]) -> dict[str, str]:
    return {name: reason for reason, names in by_reason.items() for name in names}


@cache
def arguments() -> Arguments:
    """Read ``arguments.yaml`` once."""
    raw = parse_yaml(files(__package__).joinpath("arguments.yaml").read_text(encoding="utf-8"))
    return Arguments(
        ignored=_by_name(raw["ignored"]),
        not_simulated=_by_name(raw["not_simulated"]),
        refused=raw["refused"],
        accepted_values={
            name: Accepted(rule["reason"].strip(), tuple(rule.get("values", ())), rule.get("keys"))
            for name, rule in raw["accepted_values"].items()
        },
        renamed=raw["renamed"],
        synonyms=raw["synonyms"],
        ignored_values={name: tuple(values) for name, values in raw["ignored_values"].items()},
        schedules={name: None if keys is None else tuple(keys) for name, keys in raw["schedules"].items()},
        optimizers=raw["optimizers"],
        optimizer_synonyms=raw["optimizer_synonyms"],
        refused_optimizers=raw["refused_optimizers"],
    )


_NUMBERS = ("warmup_steps", "warmup_ratio")
CHECKED = frozenset((*arguments().ignored_values, "lr_scheduler_type", "lr_scheduler_kwargs", *_NUMBERS))
"""Ignored arguments whose values are checked."""


def ignored_problems(raw: Mapping[str, Any]) -> list[Problem]:
    """Return what transformers refuses among the ignored arguments of a ``train`` section."""
    return [*_unknown_values(raw), *_schedule_problems(raw), *_number_problems(raw)]


def _unknown_values(raw: Mapping[str, Any]) -> Iterator[Problem]:
    for name, known in arguments().ignored_values.items():
        given = raw.get(name)
        for value in given if isinstance(given, list | tuple) else [given]:
            if value is not None and not isinstance(value, int) and _text(value) not in known:
                yield Problem((name,), f"has no value {_text(value)!r}{_hint(_text(value), known)}")


def _schedule_problems(raw: Mapping[str, Any]) -> Iterator[Problem]:
    known = arguments().schedules
    schedule = _text(raw.get("lr_scheduler_type") or "linear")
    if schedule not in known:
        yield Problem(("lr_scheduler_type",), f"there is no schedule {schedule!r}{_hint(schedule, known)}")
        return
    if schedule == "reduce_lr_on_plateau" and _text(raw.get("eval_strategy") or "no") == "no":
        yield Problem(("lr_scheduler_type",), "reduce_lr_on_plateau needs an eval_strategy: steps or epoch")
    given, allowed = _mapping(raw.get("lr_scheduler_kwargs")), known[schedule]
    if allowed is None:
        return
    takes = f"{schedule} takes {', '.join(allowed) or 'no arguments'}"
    for key in given:
        if key not in allowed:
            yield Problem(("lr_scheduler_kwargs",), f"there is no argument {key!r}: {takes}")


def _number_problems(raw: Mapping[str, Any]) -> Iterator[Problem]:
    for name in _NUMBERS:
        value = raw.get(name)
        try:
            number = 0 if value is None else float(value)
        except (TypeError, ValueError):
            yield Problem((name,), f"must be a number, found {value!r}")
        else:
            if number < 0:
                yield Problem((name,), f"must be at least 0, found {value}")


def _hint(value: str, known: Any) -> str:
    return suggestion(value, known) or f"; known: {', '.join(known)}"


def _text(value: Any) -> str:
    """Return a name as transformers reads it: members of enumerations by their value; YAML reads ``no`` as false."""
    return "no" if value is False else str(getattr(value, "value", value))


def _mapping(value: Any) -> Mapping[str, Any]:
    """Return ``lr_scheduler_kwargs``, which may be text in the form of JSON."""
    read = yaml.safe_load(value) if isinstance(value, str) else value
    return read if isinstance(read, Mapping) else {}


EVERY, OFFLOAD = "every_n_layers", "offload"
"""Keys that the Trainer of transformers 5.16 and later takes for itself."""
NEW_NAMES = {
    "activation_checkpointing": "gradient_checkpointing",
    "activation_checkpointing_kwargs": "gradient_checkpointing_kwargs",
}
"""Names of ``TrainingArguments`` of transformers 5.24, and the older ones, which still hold."""
_KINDS = {"use_reentrant": bool, "preserve_rng_state": bool, "determinism_check": str, OFFLOAD: bool}


def move_every(raw: dict[str, Any]) -> dict[str, Any]:
    """Write ``gradient_checkpointing_kwargs: {every_n_layers: 2}`` as ``gradient_checkpointing_every: 2``.

    The loops then need no release of transformers that knows the former.  Where the value is not valid or both are set
    to different values, nothing is moved, and ``problems`` says so.
    """
    given = raw.get("gradient_checkpointing_kwargs")
    if not isinstance(given, Mapping):
        return raw
    rest = {name: value for name, value in given.items() if (name, value) != (OFFLOAD, False)}
    every = rest.get(EVERY)
    if _is_count(every) and raw.get("gradient_checkpointing_every", every) == every:
        del rest[EVERY]
        raw = {**raw, "gradient_checkpointing_every": every}
    return raw if rest == given else {**raw, "gradient_checkpointing_kwargs": rest or None}


def with_old_names(raw: dict[str, Any]) -> dict[str, Any]:
    """Write ``activation_checkpointing: true`` as ``gradient_checkpointing: true``; refuse two values for the two.

    None, the default of transformers 5.24, leaves a setting unsaid.
    """
    unsaid = {*NEW_NAMES, "gradient_checkpointing"}
    raw = {name: value for name, value in raw.items() if not (value is None and name in unsaid)}
    if found := [
        Problem((new,), f"is {raw[new]!r}, but {old} is {raw[old]!r}: set one of the two")
        for new, old in NEW_NAMES.items()
        if new in raw and raw.get(old, raw[new]) != raw[new]
    ]:
        refuse(found)
    return {NEW_NAMES.get(name, name): value for name, value in raw.items()}


def offloads(keys: Mapping[str, Any] | None) -> bool:
    """Return whether these arguments keep checkpoints in host memory."""
    return bool((keys or {}).get(OFFLOAD))


def problems(train: TrainSpec) -> list[Problem]:
    """Refuse arguments that PyTorch's checkpoints do not have, and values of other types."""
    here = "gradient_checkpointing_kwargs"
    found = []
    for name, value in (train.gradient_checkpointing_kwargs or {}).items():
        if name == EVERY:
            found.append(Problem((here, name), _problem_of_every(value, train.gradient_checkpointing_every)))
        elif name not in _KINDS:
            found.append(Problem((here, name), f"unknown key{suggestion(name, _KINDS)}"))
        elif not isinstance(value, _KINDS[name]):
            wanted = "true or false" if _KINDS[name] is bool else "a string"
            found.append(Problem((here, name), f"must be {wanted}, found {value!r}"))
    return found


def _problem_of_every(value: Any, every: int) -> str:
    """Return what is wrong with ``every_n_layers``, which ``move_every`` left where it was."""
    if _is_count(value):
        return f"is {value}, but gradient_checkpointing_every is {every}: set one of the two"
    return f"must be a whole number of at least 1, found {value!r}"


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
