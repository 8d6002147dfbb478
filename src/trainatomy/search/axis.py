"""Something that a search varies, and what it can be."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from trainatomy.results.fit import Change, Permission


@dataclass(frozen=True, slots=True)
class Option:
    """A value of an axis: its name, and the keys of the workload that it sets."""

    name: str
    settings: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Axis:
    """Something that can be varied.

    Attributes:
        name: Name in results.
        options: What it can be; names are unique.
        given: Name of the option that the workload has.
        permission: What the user has to allow before the search varies it; empty if the same is trained either way.
        leanest: Name of the option that should take the least memory; empty for the given one.
    """

    name: str
    options: tuple[Option, ...]
    given: str
    permission: Permission = ""
    leanest: str = ""

    def option(self, name: str) -> Option:
        """Return the option of that name."""
        return next(option for option in self.options if option.name == name)

    def change(self, name: str) -> Change:
        """Return the change from the workload as given to an option."""
        return Change(self.name, name, self.option(name).settings, self.permission)


def axis_of(name: str, options: list[Option], given: str, permission: Permission = "", *, leanest: str = "") -> Axis:
    """Return an axis whose option ``given`` changes nothing; it is added if it is not among ``options``.

    ``leanest`` counts only if it is an option.
    """
    named = {option.name: option for option in options} | {given: Option(given)}
    return Axis(name, tuple(named.values()), given, permission, leanest if leanest in named else "")
