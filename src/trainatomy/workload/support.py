"""What a workload's settings and features exclude and need: the table ``support.yaml``, and its evaluation."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from trainatomy.catalog.files import parse_yaml
from trainatomy.workload.features import FACTS, FEATURES
from trainatomy.workload.section import Problem, Section, key_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from trainatomy.workload.schema import Workload


@dataclass(frozen=True, slots=True)
class Rule:
    """One row of the table for one setting: what is refused, with or without what, why, and what to do instead.

    Attributes:
        refuse: The setting or feature that is refused.
        key: The setting where the problem is reported.
        with_: What it is refused with; empty where it is refused with anything.
        without: What it is refused without; empty for nothing.
        message: The message, with facts of the workload in braces.
    """

    refuse: str
    key: str
    with_: str
    without: str
    message: str

    def is_broken(self, has: Features) -> bool:
        """Return whether a workload breaks the rule that has what is refused."""
        return (not self.with_ or has[self.with_]) and not (self.without and has[self.without])


@dataclass(frozen=True, slots=True)
class Subject:
    """Rules about one subject, which apply where a workload has a feature: ``when``, empty for all workloads."""

    title: str
    when: str
    rules: tuple[Rule, ...]

    def problems(self, has: Features) -> Iterator[Problem]:
        """Yield the problems of a workload that has the feature of the subject.

        What lacks something that it needs has no further problems.
        """
        lacking = set[str]()
        for rule in self.rules:
            if has[rule.refuse] and rule.refuse not in lacking and rule.is_broken(has):
                facts = _Facts(has.workload, name=rule.key.rpartition(".")[-1])
                yield Problem(tuple(rule.key.split(".")), rule.message.format_map(facts))
                if rule.without and not rule.with_:
                    lacking.add(rule.refuse)


class Features(dict[str, bool]):
    """Whether a workload has a feature, by its name or by a combination of names; each is looked at once."""

    def __init__(self, workload: Workload) -> None:
        super().__init__()
        self.workload = workload
        self.settings = frozenset(_changed(workload))

    def __missing__(self, name: str) -> bool:
        self[name] = found = _condition(name)(self)
        return found


@cache
def _condition(name: str) -> Callable[[Features], bool]:
    """Return what decides whether a workload has a feature: a function, its parts, or the value of a setting."""
    if name in FEATURES:
        feature = FEATURES[name]
        return lambda has: feature(has.workload)
    for word, combined in ((" or ", any), (" and ", all)):
        if word in name:
            parts = name.split(word)
            return lambda has: combined(has[part] for part in parts)
    if name.startswith("not "):
        other = name.removeprefix("not ")
        return lambda has: not has[other]
    key, _, values = name.partition(": ")
    if not values:
        return lambda has: key in has.settings
    wanted, value_of = values.lower().split(", "), attrgetter(key)
    return lambda has: str(value_of(has.workload)).lower() in wanted


def _changed(section: Section, prefix: str = "") -> Iterator[str]:
    """Yield the keys of settings that differ from their defaults, and those of TRL that are on."""
    for key, attribute, default in _defaults(type(section)):
        value = getattr(section, attribute)
        if isinstance(value, Section) and not prefix:
            inner = tuple(_changed(value, f"{key}."))
            yield from (key, *inner) if inner else ()
        elif value != default:
            yield prefix + key
            yield from (f"trl.{name}" for name in value if value[name]) if key == "trl" else ()


@cache
def _defaults(section: type[Section]) -> tuple[tuple[str, str, Any], ...]:
    """Return the keys of a section, with their attributes and defaults."""
    fields = section.model_fields.items()
    return tuple((key_of(name, field), name, field.get_default(call_default_factory=True)) for name, field in fields)


class _Facts(dict[str, Any]):
    """Facts of a workload by their names in messages."""

    def __init__(self, workload: Workload, **known: Any) -> None:
        super().__init__(known)
        self._workload = workload

    def __missing__(self, name: str) -> Any:
        return FACTS[name](self._workload)


WITHIN_SECTIONS, BETWEEN_SECTIONS = "within sections", "between sections"


@cache
def table() -> Mapping[str, Mapping[str, Subject]]:
    """Read ``support.yaml`` once: its subjects by their titles, in two parts of which one is looked at first."""
    raw = parse_yaml(files(__package__).joinpath("support.yaml").read_text(encoding="utf-8"))
    return {
        part: {
            title: Subject(title, found.get("when", ""), tuple(rule for row in found["rules"] for rule in _rules(row)))
            for title, found in subjects.items()
        }
        for part, subjects in raw.items()
    }


def _rules(row: Mapping[str, Any]) -> Iterator[Rule]:
    """Yield the rules of a row of the table."""
    without, instead = row.get("without", ""), row.get("instead")
    for refuse in _listed(row["refuse"]):
        for other in _listed(row.get("with", "")):
            why = row.get("why") or (f"is not simulated with {other}" if other else f"needs {without}")
            key = row.get("at") or refuse.partition(": ")[0]
            yield Rule(refuse, key, other, without, f"{why}: {instead}" if instead else why)


def _listed(value: str | list[str]) -> list[str]:
    return [value] if isinstance(value, str) else value


def unsupported(has: Features, part: str) -> list[Problem]:
    """Return the problems of a workload with the rules of one part of the table."""
    subjects = (subject for subject in table()[part].values() if not subject.when or has[subject.when])
    return [problem for subject in subjects for problem in subject.problems(has)]


def belongs_to(option: str, strategy: str) -> bool:
    """Return whether a strategy has an option of ``parallel``; options of no strategy in particular belong to all."""
    rules = table()[WITHIN_SECTIONS]["Options of strategies"].rules
    having = (rule.with_.partition(": ")[2].split(", ") for rule in rules if rule.key == f"parallel.{option}")
    return all(strategy in strategies for strategies in having)
