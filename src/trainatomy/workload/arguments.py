"""Names of ``TrainingArguments`` and optimizers, and how trainatomy handles each (``arguments.yaml``)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any

import yaml

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True)
class Arguments:
    """The content of ``arguments.yaml``; every mapping goes from a name to a reason or a replacement."""

    ignored: Mapping[str, str]
    not_simulated: Mapping[str, str]
    refused: Mapping[str, str]
    renamed: Mapping[str, str]
    synonyms: Mapping[str, str]
    optimizers: Mapping[str, str | None]
    refused_optimizers: Mapping[str, str]

    def is_unapplied(self, name: str, value: Any) -> bool:
        """Return whether ``name`` is accepted without being applied: ignored, not simulated, or refused but off."""
        return name in self.ignored or name in self.not_simulated or (name in self.refused and _is_off(value))

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
        return (*self.ignored, *self.not_simulated, *self.refused, *self.renamed)


def is_class_path(optim: str) -> bool:
    """Return whether ``optim`` is the path of a class (``package.module.Class``), not a name that the Trainer has."""
    parts = optim.split(".")
    return len(parts) > 1 and all(part.isidentifier() for part in parts)


def _is_off(value: Any) -> bool:
    return not value or (isinstance(value, str) and value.lower() in {"false", "no", "none", "null"})


def _by_name(by_reason: Mapping[str, list[str]]) -> dict[str, str]:
    return {name: reason for reason, names in by_reason.items() for name in names}


@cache
def arguments() -> Arguments:
    """Read ``arguments.yaml`` once."""
    raw = yaml.safe_load(files(__package__).joinpath("arguments.yaml").read_text(encoding="utf-8"))
    return Arguments(
        ignored=_by_name(raw["ignored"]),
        not_simulated=_by_name(raw["not_simulated"]),
        refused=raw["refused"],
        renamed=raw["renamed"],
        synonyms=raw["synonyms"],
        optimizers=raw["optimizers"],
        refused_optimizers=raw["refused_optimizers"],
    )
