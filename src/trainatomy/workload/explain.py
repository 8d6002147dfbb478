"""Pydantic's validation errors as problems, each with its key and a message in our words."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from trainatomy.errors import WorkloadError
from trainatomy.workload.arguments import arguments
from trainatomy.workload.document import nearest, suggestion
from trainatomy.workload.loops import other_loop
from trainatomy.workload.section import Path, Problem, Section, keys, section_at

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

_KINDS = {
    "bool": "true or false",
    "int": "a whole number",
    "float": "a number",
    "string": "a string",
    "dict": "a mapping of names to values",
    "model": "a mapping of names to values",
    "tuple": "a list",
    "list": "a list",
    "number": "a number",
}
_BOUNDS = {"greater_than_equal": ("at least", "ge"), "less_than_equal": ("at most", "le"), "less_than": ("below", "lt")}


def workload_error(messages: Iterable[str], problems: Sequence[Problem] = ()) -> WorkloadError:
    """Return an error with one line a message, and with the key of the problem where there is only one."""
    key = ".".join(map(str, problems[0].path)) if len(problems) == 1 else ""
    return WorkloadError("\n".join(messages), key=key or None)


def explain(error: ValidationError, mapping: Any, root: type[Section]) -> list[Problem]:
    """Return every problem in ``mapping`` once; paths are keys of ``mapping``.

    Contradictions are looked for between valid keys only, so invalid keys are removed and the rest is checked again.
    """
    found: dict[Path, list[str]] = {}
    while True:
        problems = _problems(error, mapping, root)
        known = list(found)
        for path, message in problems:
            if not any(path[: len(other)] == other or other[: len(path)] == path for other in known):
                found.setdefault(path, []).append(message)
        rest = without(mapping, [path for path, _ in problems])
        if rest == mapping:
            break
        mapping = rest
        try:
            root.model_validate(mapping)
            break
        except ValidationError as next_error:
            error = next_error
    return [Problem(path, _either(messages)) for path, messages in found.items()]


def without(mapping: Any, paths: list[Path]) -> Any:
    """Return ``mapping`` without the keys at ``paths``."""
    if not isinstance(mapping, Mapping):
        return mapping
    below = {key: [path[1:] for path in paths if path and path[0] == key and len(path) > 1] for key in mapping}
    return {key: without(value, below[key]) for key, value in mapping.items() if (key,) not in paths}


def _problems(error: ValidationError, mapping: Any, root: type[Section]) -> list[Problem]:
    problems = []
    for detail in error.errors(include_url=False):
        path = _keys_in(detail, mapping)
        if detail["type"] == "contradiction":
            problems += [Problem((*path, *inner), message) for inner, message in detail["ctx"]["problems"]]
        else:
            problems.append(Problem(path, _message(detail, path, root)))
    return problems


def _keys_in(detail: ErrorDetails, mapping: Any) -> Path:
    """Return the parts of pydantic's location that are keys of ``mapping``; it also names the members of unions."""
    path: list[str | int] = []
    *inner, last = detail["loc"] or ("",)
    for part in (*inner, last):
        held = mapping.get(part, ...) if isinstance(mapping, Mapping) else ...
        if isinstance(mapping, list | tuple) and isinstance(part, int) and part < len(mapping):
            held = mapping[part]
        if held is not ... or (part is last and detail["type"] == "missing"):
            path.append(part)
            mapping = held
    return tuple(path)


def _message(detail: ErrorDetails, path: Path, root: type[Section]) -> str:
    kind, found, context = detail["type"], detail["input"], detail.get("ctx", {})
    if kind == "extra_forbidden":
        return _unknown(str(path[-1]), path[:-1], root)
    if kind == "missing":
        hint = ": a workload names a model, such as `model: {id: gpt2}`"
        return f"is missing{hint if path == ('model',) else ''}"
    if kind == "model_type" and path == ("model",) and isinstance(found, str):
        return f"must be a mapping; write `model: {{id: {found}}}`"
    if kind == "literal_error" and path == ("loop",) and (reason := other_loop(found)):
        return f"must be {context['expected']}: {reason}"
    if kind == "literal_error":
        return f"must be {context['expected']}, {_found(found)}{_meant(found, context['expected'])}"
    if kind in _BOUNDS:
        words, bound = _BOUNDS[kind]
        return f"must be {words} {context[bound]:g}, {_found(found)}"
    if kind in ("string_too_short", "too_short"):
        return "is empty"
    if kind == "finite_number":
        return f"must be a finite number, {_found(found)}"
    expected = _KINDS.get(kind.partition("_")[0])
    if expected is not None and kind != "optim_args":
        return f"must be {expected}, {_found(found)}"
    return detail["msg"].removeprefix("Value error, ")


def _unknown(name: str, section: Path, root: type[Section]) -> str:
    """Return the message for an unknown key: the reason, the right section, or the nearest names."""
    known = arguments()
    if section == ("train",) and (reason := known.refusal_of(name)):
        return f"not supported: {reason}"
    if section == ("train",) and (replacement := known.renamed.get(name)):
        return f"is called {replacement} today"
    if section == ("train",) and (meant := known.synonyms.get(name)):
        return f"unknown key; did you mean {meant}?"
    here = section_at(root, section)
    names = list(keys(here)) if here else []
    if not nearest(name, names) and (place := _elsewhere(name, section, root)):
        return f"unknown key here; it belongs under {place}"
    return f"unknown key{suggestion(name, names)}"


def _elsewhere(name: str, section: Path, root: type[Section]) -> str | None:
    """Return the section that has this key."""
    if section != ("train",) and name in arguments().names():
        return "`train`"
    places: list[Path] = [
        *(("train",), ("model",), ("data",), ("parallel",), ("model", "lora"), ("model", "quantization")),
        *(("generation",), ("software",), ()),
    ]
    for place in places:
        there = section_at(root, place)
        if place != section and there is not None and name in keys(there):
            return f"`{'.'.join(map(str, place))}`" if place else "no section: write it at the start of a line"
    return None


def _meant(found: Any, expected: str) -> str:
    """Return a suggestion from ``'a', 'b' or 'c'``, or an empty string."""
    choices = [choice.strip("'\" ") for choice in expected.replace(" or ", ",").split(",")]
    close = nearest(found, choices, limit=1) if isinstance(found, str) and len(choices) > 2 else []
    return f"; did you mean {close[0]}?" if close else ""


def _found(value: Any) -> str:
    if value is None:
        return "found nothing"
    if isinstance(value, Mapping):
        return "found a mapping"
    if isinstance(value, list | tuple):
        return "found a list"
    if isinstance(value, bool):
        return f"found {str(value).lower()}"
    text = repr(value)
    return f"found {text if len(text) <= 60 else text[:57] + '...'}"


def _either(messages: list[str]) -> str:
    """Join the messages of a union's members: ``must be a string or a list, found 3``."""
    unique = list(dict.fromkeys(messages))
    parts = [message.removeprefix("must be ").rpartition(", found ") for message in unique]
    if len(unique) > 1 and all(m.startswith("must be ") and ", found " in m for m in unique):
        return f"must be {' or '.join(part[0] for part in parts)}, found {parts[0][2]}"
    return "; ".join(unique)
