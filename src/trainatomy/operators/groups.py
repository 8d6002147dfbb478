"""Which group an operator belongs to, and its rule for FLOP and bytes: ``groups.yaml``, and a rule for the rest."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, Literal

import yaml

from trainatomy.results.operations import Call

Group = Literal["contraction", "normalisation", "elementwise"]
GROUPS: tuple[Group, ...] = ("contraction", "normalisation", "elementwise")
Reads = Literal["all", "none", "rows"]


@dataclass(frozen=True, slots=True)
class Rule:
    """What is known of an operator: group, FLOP per element (``None``: no formula), which of its inputs it reads,
    ``activation`` (forward, backward or ''), why; ``general``: no entry of its own, decided by its form."""

    group: Group
    flop: int | None
    why: str
    reads: Reads = "all"
    activation: str = ""
    general: bool = False


def rule_of(call: Call) -> Rule | None:
    """The rule that serves a call; ``None`` for what launches no kernel (views, memory that is only taken)."""
    name = plain_name(call.name)
    if call.is_view or name in _table()[1]:
        return None
    known = _table()[0].get(name)
    return known if known is not None else _general(call)


def group_of(name: str) -> Group | None:
    """The group of an operator by its name (``aten::addmm``, also with the name of a scratch buffer behind it),
    ``None`` where it has no entry."""
    name = name.partition(" ")[0]
    rule = _table()[0].get(plain_name(name)) if "::" in name else None
    return rule.group if rule is not None else None


def plain_name(name: str) -> str:
    """``aten::_foreach_mul_`` as ``mul``: without namespace, list and in-place forms."""
    name = name.rpartition("::")[2]
    if not name.startswith("__"):
        name = name.removesuffix("_")
    known = _table()[0]
    return name if name in known else name.removeprefix("_foreach_")


def _general(call: Call) -> Rule:
    """By form: element by element (PyTorch's tag), a reduction (less comes out than goes in), or a move without a
    formula."""
    if call.pointwise:
        return Rule("elementwise", 1, "PyTorch tags it as element by element", general=True)
    largest = max((array.elements for array in call.inputs), default=0)
    if call.outputs and max(array.elements for array in call.outputs) < largest:
        return Rule("normalisation", None, "less comes out than goes in: a reduction", general=True)
    return Rule("elementwise", None, "not known: taken for an operation that moves data", general=True)


@cache
def _table() -> tuple[dict[str, Rule], frozenset[str]]:
    data: dict[str, Any] = yaml.safe_load(files(__package__).joinpath("groups.yaml").read_text(encoding="utf-8"))
    nothing = frozenset(data.pop("nothing"))
    rules: dict[str, Rule] = {}
    for group in GROUPS:
        for entry in data[group]:
            names = entry.pop("names")
            rule = Rule(group, **{"flop": None, **entry})
            for name in names.split() if isinstance(names, str) else names:
                if name in rules:
                    raise ValueError(f"groups.yaml names {name} twice")
                rules[name] = rule
    return rules, nothing
