"""Search over a script's own flags for values that fit and train fastest: each combination is run without a GPU."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product

from trainatomy.bisection import largest, multiples
from trainatomy.errors import WorkloadError
from trainatomy.requests.fitting import Wanted
from trainatomy.results.fit import ScriptCandidate, ScriptFit
from trainatomy.scripts.command import Command
from trainatomy.scripts.job import Outcome

MOST_CANDIDATES = 60
"""Combinations that a search runs; each takes seconds."""
_GOES_ON = ("…", "...")
_NO_EFFECT = (
    "{} has the same memory and time as the value before it, so no larger one was tried: the script does not use it, "
    "or its data set is too small."
)


@dataclass(frozen=True, slots=True)
class Flag:
    """A flag with the values to try; with ``goes_on``, further ones are tried as long as the script fits."""

    name: str
    values: tuple[str, ...]
    goes_on: bool = False

    def further(self) -> Iterator[str]:
        """Yield the values after the listed ones, in their ratio (or their distance, if that is not whole)."""
        before, last = (int(value) for value in self.values[-2:])
        ratio = last // before if before and last % before == 0 else 0
        while True:
            before, last = last, last * ratio if ratio > 1 else 2 * last - before
            yield str(last)


def read_flags(texts: Sequence[str]) -> tuple[Flag, ...]:
    """Read ``batch_size=1,2,4,…``.

    Raises:
        WorkloadError: One is none, or several go on.
    """
    flags = tuple(map(_flag, texts))
    if not flags:
        raise WorkloadError("--flag: name a flag of the script with values to try, such as --flag batch_size=1,2,4,8,…")
    if sum(flag.goes_on for flag in flags) > 1:
        raise WorkloadError("--flag: only one flag can go on (…); list the values of the others")
    return flags


def _flag(text: str) -> Flag:
    name, _, listed = text.partition("=")
    values = [value.strip() for value in listed.split(",") if value.strip()]
    goes_on = bool(values) and values[-1] in _GOES_ON
    values = values[:-1] if goes_on else values
    if not re.fullmatch(r"-{0,2}[\w.-]+", name) or not values:
        raise WorkloadError(f"--flag {text}: must look like batch_size=1,2,4")
    whole = len(values) >= 2 and all(value.isdigit() for value in values[-2:])
    if goes_on and not (whole and int(values[-2]) < int(values[-1])):
        raise WorkloadError(f"--flag {text}: two rising whole numbers must come before …")
    return Flag(name if name.startswith("-") else f"--{name}", tuple(values), goes_on)


def with_flags(command: Command, flags: Mapping[str, str]) -> Command:
    """Return a command with flags set: in their place where the script has them already, else at the end."""
    words = list(command.arguments)
    for name, value in flags.items():
        place = next((at for at, word in enumerate(words) if word == name or word.startswith(f"{name}=")), None)
        if place is None:
            words += [name, value]
        elif "=" in words[place]:
            words[place] = f"{name}={value}"
        else:
            words[place + 1 : place + 2] = [value]
    begin = command.typed[: len(command.typed) - len(command.arguments)]
    return replace(command, arguments=tuple(words), typed=(*begin, *words))


def search_flags(
    command: Command,
    flags: Sequence[Flag],
    gpu: str,
    run: Callable[[Command], Outcome],
    tell: Callable[[str], None] = lambda message: None,
) -> ScriptFit:
    """Run a script with each combination of its flags' values."""
    found: list[ScriptCandidate] = []
    rising = next((flag for flag in flags if flag.goes_on), None)
    others = [flag for flag in flags if flag is not rising]
    for chosen in product(*(flag.values for flag in others)):
        fixed = {flag.name: value for flag, value in zip(others, chosen, strict=True)}
        for setting in _settings(rising):
            if len(found) >= MOST_CANDIDATES:
                break
            wanted = fixed | setting
            tell(" ".join(f"{name} {value}" for name, value in wanted.items()))
            one = with_flags(command, wanted)
            outcome = run(one)
            found.append(ScriptCandidate(wanted, one.typed, outcome.prediction, outcome.message, outcome.exit_code))
            if rising is not None and not found[-1].fits:
                break
            if rising is not None and setting[rising.name] not in rising.values and _is_same(*found[-2:]):
                found[-1] = replace(found[-1], message=_NO_EFFECT.format(f"{rising.name} {setting[rising.name]}"))
                break
    return ScriptFit(command.name, gpu, tuple(found))


def largest_flag(
    command: Command,
    wanted: Wanted,
    gpu: str,
    run: Callable[[Command], Outcome],
    tell: Callable[[str], None] = lambda message: None,
) -> ScriptFit:
    """Run a script with values of one flag until the largest that fits is known; values that fail are passed over.

    Raises:
        WorkloadError: The command does not give the flag a whole number to begin with.
    """
    name = wanted.name if wanted.name.startswith("-") else f"--{wanted.name}"
    start = _value_of(command, name)
    found: dict[int, ScriptCandidate] = {}

    def holds(value: int) -> bool | None:
        return None if found[value].failed else found[value].fits

    def guess() -> int:
        fitting = [value for value in found if holds(value)]
        beyond = [value for value in found if holds(value) is False]
        low = max(fitting, default=0)
        return (low + min(beyond)) // 2 if beyond else 2 * low

    for value in largest(multiples(start, wanted.step), start, holds, guess):
        tell(f"{name} {value}")
        one = with_flags(command, {name: str(value)})
        outcome = run(one)
        flags = {name: str(value)}
        found[value] = ScriptCandidate(flags, one.typed, outcome.prediction, outcome.message, outcome.exit_code)
        if value == start and found[value].failed:
            break
    return ScriptFit(command.name, gpu, tuple(found[value] for value in sorted(found)), maximized=name)


def _value_of(command: Command, name: str) -> int:
    """Return the whole number that a command gives a flag."""
    words = command.arguments
    given = [word.partition("=")[2] for word in words if word.startswith(f"{name}=")]
    given += [after for word, after in pairwise(words) if word == name]
    if not given or not given[0].isdigit() or int(given[0]) < 1:
        raise WorkloadError(
            f"--maximize {name}: the command gives it {given[0] if given else 'no value'}; give a whole number to "
            f"begin with: --script '{' '.join(command.typed)} {name} 8'"
        )
    return int(given[0])


def _is_same(one: ScriptCandidate, other: ScriptCandidate) -> bool:
    """Return whether two candidates take the same memory and train equally fast."""
    if one.prediction is None or other.prediction is None:
        return False
    is_as_fast = one.samples_per_second == other.samples_per_second
    return is_as_fast and one.prediction.memory.device_bytes == other.prediction.memory.device_bytes


def _settings(rising: Flag | None) -> Iterator[dict[str, str]]:
    """Yield the values of a flag that goes on; nothing to set without one."""
    if rising is None:
        yield {}
        return
    for value in rising.values:
        yield {rising.name: value}
    for value in rising.further():
        yield {rising.name: value}
