"""Values of options that are more than a number or a name."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import typer

from trainatomy.errors import WorkloadError
from trainatomy.workload.nearest import suggestion

EVERY_GPU = "all"


def several_gpus(flags: Mapping[str, Any], price: Sequence[str] | None) -> list[str] | None:
    """Return the names in ``--gpu`` if several are asked for (an empty list: all), else ``None``."""
    text = flags.get("gpu")
    listed = [name.strip() for name in str(text).split(",") if name.strip()] if text is not None else []
    if listed == [EVERY_GPU]:
        return []
    if len(listed) > 1:
        return listed
    return (listed or list(prices(price))) if price else None


def prices(texts: Sequence[str] | None) -> dict[str, float]:
    """Return the prices in ``--price``."""
    found: dict[str, float] = {}
    for text in (part for each in texts or () for part in each.split(",")):
        name, _, number = text.partition("=")
        try:
            found[name.strip()] = float(number)
        except ValueError:
            raise typer.BadParameter(f"--price must look like h100=2.9 (a price per hour), found {text!r}") from None
        if found[name.strip()] <= 0:
            raise typer.BadParameter(f"--price {text}: a price must be above 0")
    return found


def share(text: str) -> float:
    """Return ``5%``, ``5 %`` or ``0.05`` as a share.

    Raises:
        WorkloadError: It is none, or not between 0 and 100 %.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?|\.\d+)\s*(%?)\s*", text)
    value = float(match[1]) / (100 if match[2] else 1) if match else -1.0
    if not 0 <= value < 1:
        raise WorkloadError(f"--headroom {text}: must be a share of the GPU's memory such as 5% or 0.05, below 100%")
    return value


def whole_numbers(option: str, text: str | None) -> tuple[int, ...]:
    """Return the numbers in ``1,7``.

    Raises:
        WorkloadError: One of them is no whole number.
    """
    parts = [part.strip() for part in (text or "").split(",") if part.strip()]
    if wrong := [part for part in parts if not part.isdigit()]:
        raise WorkloadError(f"{option} {text}: {wrong[0]!r} is not a whole number")
    return tuple(map(int, parts))


def names(texts: Sequence[str] | None) -> tuple[str, ...]:
    """Return the names in a repeatable option, each of which may hold several with commas."""
    return tuple(dict.fromkeys(name.strip().replace("_", "-") for text in texts or () for name in text.split(",")))


def keys(texts: Sequence[str] | None) -> tuple[str, ...]:
    """Return the settings in a repeatable option, spelt as in a workload."""
    return tuple(name.replace("-", "_") for name in names(texts))


def refuse_unknown(option: str, given: Sequence[str], known: Collection[str]) -> None:
    """Raise ``WorkloadError`` for a value of an option that is none of those it takes."""
    for value in given:
        if value not in known:
            hint = suggestion(value, known) or f"; known: {', '.join(known)}"
            raise WorkloadError(f"{option}: unknown value {value!r}{hint}")


def refuse_together(given: Mapping[str, bool]) -> None:
    """Raise ``BadParameter`` if more than one of several options is given that exclude each other."""
    both = [name for name, is_given in given.items() if is_given]
    if len(both) > 1:
        raise typer.BadParameter(f"{both[0]} and {both[1]} cannot be combined")


def refuse_others(context: typer.Context, used: Collection[str], where: str) -> None:
    """Raise ``BadParameter`` if an option is given that a mode of the command does not use.

    Args:
        context: The command that runs.
        used: Parameters that the mode uses.
        where: The mode, as the message ends.
    """
    for parameter in context.command.params:
        name = parameter.name or ""
        source = context.get_parameter_source(name)
        if name not in used and source is not None and source.name == "COMMANDLINE":
            option = parameter.opts[0] if parameter.opts[0].startswith("-") else name.upper()
            raise typer.BadParameter(f"{option} cannot be used {where}")
