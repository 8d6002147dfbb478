"""Names of ``TrainingArguments`` and optimizers, and how trainatomy handles each (``arguments.yaml``)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

import yaml

from trainatomy.catalog.files import parse_yaml


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
        return name in self.ignored or name in self.not_simulated or (name in self.refused and _is_off(value))

    def refusal_of(self, name: str) -> str | None:
        """Return why a value of ``name`` that changes something is refused, or None if ``name`` is never refused."""
        accepted = self.accepted_values.get(name)
        return self.refused.get(name) if accepted is None else accepted.reason

    def is_missed(self, name: str, value: Any) -> bool:
        """Return whether ``name: value`` would change the memory or the time of a training, and is not simulated."""
        return name in self.not_simulated and not _is_off(value)

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


def is_own(optim: str) -> bool:
    """Return whether ``optim`` is the user's own class or function, not a name that the Trainer has."""
    return is_class_path(optim) or is_factory(optim)


def _is_off(value: Any) -> bool:
    return not value or (isinstance(value, str) and value.lower() in {"false", "no", "none", "null"})


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
