"""Options of the command line, written as the fields that they set.

``jobs: int | None = option(None, "Processes that predict in parallel.")`` is a field of a request like any other;
``offered`` finds its option, ``--jobs``, from which the parser, its help and its completion are made.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from functools import partial
from typing import Any, NamedTuple, get_args, get_origin, get_type_hints

from trainatomy.errors import WorkloadError


@dataclass(frozen=True, slots=True)
class Option:
    """An option of a command, or an argument if its name is empty.

    Attributes:
        help: What it means, as a sentence.
        name: Its spelling (default: the name of its field, with ``--no-…`` as its other side where that is True by
            default).
        panel: The panel of help.
        metavar: What stands for its value in help.
        min, max: Limits of a number.
        exists: Whether the value is a file that must be there.
        hidden: Whether help leaves it out.
        writes: Whether the value is a file to write, which is checked before the work begins.
        words: The type that the command line parses, where it is not that of the field.
        read: Makes the field's value of a parsed one.
    """

    help: str
    name: str | None = None
    panel: str = "Run"
    metavar: str | None = None
    min: float | None = None
    max: float | None = None
    exists: bool = False
    hidden: bool = False
    writes: bool = False
    words: Any = None
    read: Callable[[Any], Any] | None = None

    def spelt(self, name: str, default: Any) -> str:
        """Return how the option of a field is spelt; an argument is not."""
        if self.name is not None:
            return self.name
        words = name.replace("_", "-")
        return f"--{words}/--no-{words}" if default is True else f"--{words}"


def option(default: Any, what: str | Option, **more: Any) -> Any:
    """Return a field of a dataclass with an option: a whole one, or its help with further attributes of it."""
    made = Option(what, **more) if isinstance(what, str) else what
    given: dict[str, Any] = {"default_factory": dict} if default == {} else {"default": default}
    return field(metadata={"option": made}, **given)


required = partial(option, MISSING)
"""A field with an option, or an argument, that must be given."""
in_output = partial(option, panel="Output")
"""A field whose option says what is shown, and where it goes."""
output_file = partial(in_output, writes=True)


def as_it_is(value: Any) -> Any:
    """Return a value that needs no reading."""
    return value


class Offered(NamedTuple):
    """An option of a request.

    Attributes:
        option: The option.
        name: Its spelling.
        kind: The type that the command line parses.
        default: The default there; ``MISSING`` if there is none.
        read: Makes the field's value of a parsed one.
    """

    option: Option
    name: str
    kind: Any
    default: Any
    read: Callable[[Any], Any]


def offered(request: type[Any]) -> dict[str, Offered]:
    """Return the options of a request by the fields that they set: those in ``FIRST`` first, the others as defined."""
    kinds = get_type_hints(request)
    found = {each.name: _offered(each, kinds[each.name]) for each in fields(request) if "option" in each.metadata}
    first: Sequence[str] = getattr(request, "FIRST", ())
    return {name: found[name] for name in (*first, *(name for name in found if name not in first))}


def _offered(field: Field[Any], kind: Any) -> Offered:
    """Return an option with what it parses: for several values a list, whose default is to be left out."""
    option, is_tuple = field.metadata["option"], get_origin(kind) is tuple
    spelt, read = option.spelt(field.name, field.default), option.read or (tuple if is_tuple else as_it_is)
    if option.words is not None:
        return Offered(option, spelt, option.words, None, read)
    if is_tuple:
        several: Any = list[get_args(kind)[0]]  # type: ignore[misc]
        return Offered(option, spelt, several, MISSING if field.default is MISSING else None, read)
    return Offered(option, spelt, kind, field.default, read)


def shared_fields(request: type[Any], given: Any) -> dict[str, Any]:
    """Return the fields of a request that another value has too, to make one of them."""
    return {each.name: getattr(given, each.name) for each in fields(request) if hasattr(given, each.name)}


def share(option: str, text: str | float) -> float:
    """Return ``5%``, ``5 %`` or ``0.05`` as a share; a number is one.

    Raises:
        WorkloadError: It is none, or not between 0 and 100 %.
    """
    if not isinstance(text, str):
        return text
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?|\.\d+)\s*(%?)\s*", text)
    value = float(match[1]) / (100 if match[2] else 1) if match else -1.0
    if not 0 <= value < 1:
        raise WorkloadError(f"{option} {text}: must be a share of the GPU's memory such as 5% or 0.05, below 100%")
    return value


def whole_numbers(option: str, text: str | Iterable[int]) -> tuple[int, ...]:
    """Return the numbers in ``1,7``, or those of a sequence.

    Raises:
        WorkloadError: One of them is no whole number.
    """
    if not isinstance(text, str):
        return tuple(text)
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if wrong := [part for part in parts if not part.isdigit()]:
        raise WorkloadError(f"{option} {text}: {wrong[0]!r} is not a whole number")
    return tuple(map(int, parts))


def names(texts: str | Iterable[str]) -> tuple[str, ...]:
    """Return the names in a repeatable option, each of which may hold several with commas."""
    several = [texts] if isinstance(texts, str) else texts
    return tuple(dict.fromkeys(name.strip().replace("_", "-") for text in several for name in text.split(",")))


def keys(texts: str | Iterable[str]) -> tuple[str, ...]:
    """Return the settings in a repeatable option, spelt as in a workload."""
    return tuple(name.replace("-", "_") for name in names(texts))
