"""Changed settings in the dialect of the configuration that a workload was read from.

``answer_in`` says what to change, and ``rewritten`` is the configuration with these keys changed and all else as it
was.  ``settings_in`` is what the framework makes of settings, for a search to try nothing else.
"""

from __future__ import annotations

import contextlib
import json
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml
from yaml.nodes import MappingNode, ScalarNode

from trainatomy.errors import WorkloadError
from trainatomy.workload.dialects.recognise import read_again
from trainatomy.workload.dialects.translation import Dialect, Origin, dialect
from trainatomy.workload.model import LoraSpec
from trainatomy.workload.schema import Workload
from trainatomy.workload.train import OWN_KEYS

_OUTSIDE = {
    "allocator": "PYTORCH_ALLOC_CONF={} in the environment",
    "parallel.gpus": "started on {} GPUs of each machine",
    "parallel.nodes": "started on {} machines",
    "gpu": "",
}
"""Keys of a workload that a launcher or the environment says, and how."""
_LORA_DEFAULTS = {f"model.lora.{name}": value for name, value in LoraSpec().model_dump(mode="json").items()}
_SECTIONS = ("model.lora", "model.quantization")
"""Sections that a dialect switches on and off by a key of their own."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What to change in a configuration.

    Attributes:
        keys: The new value of each key; None for one to take out.
        outside: What a launcher or the environment has to say, as phrases.
        unsaid: Changed keys of the workload for which the framework has no key, with their values.
    """

    keys: Mapping[str, Any]
    outside: tuple[str, ...] = ()
    unsaid: Mapping[str, Any] = field(default_factory=dict)

    def lines(self) -> list[str]:
        """Return the keys as lines of a configuration file."""
        return [
            f"# {key}: not given" if value is None else f"{key}: {_flow(value)}" for key, value in self.keys.items()
        ]


def answer_in(origin: Origin, before: Mapping[str, Any], after: Mapping[str, Any]) -> Answer:
    """Return what to change in a configuration, for a workload to become another.

    Args:
        origin: The configuration.
        before: The workload that it says, as a mapping.
        after: The other one.
    """
    table = dialect(origin.dialect)
    keys, outside, unsaid = dict[str, Any](), list[str](), dict[str, Any]()
    old, new = _leaves(before), _leaves(after)
    for path, value in new.items():
        if old.get(path) == value or path in table.implied:
            continue
        said = _said(table, path, value)
        if path in _OUTSIDE:
            outside += [_OUTSIDE[path].format(value)] if _OUTSIDE[path] else []
        elif said is not None:
            keys |= said
        elif path in old or value != _LORA_DEFAULTS.get(path):
            unsaid[path] = value
    return Answer(_needed(origin, keys), tuple(outside), unsaid)


def _needed(origin: Origin, keys: dict[str, Any]) -> dict[str, Any]:
    """Return the keys without those that the framework has anyway beside the others."""

    def meaning(some: dict[str, Any]) -> dict[str, Any]:
        said = _flat(read_again(origin, rewritten(origin, Answer(some))).mapping)
        return {path: value for path, value in said if path not in _LORA_DEFAULTS or value != _LORA_DEFAULTS[path]}

    wanted = meaning(keys)
    for key in list(keys):
        rest = {name: value for name, value in keys.items() if name != key}
        with contextlib.suppress(WorkloadError):  # the others need it
            keys = rest if meaning(rest) == wanted else keys
    return keys


def settings_in(origin: Origin, settings: Mapping[str, object]) -> dict[str, object] | None:
    """Return what a framework makes of settings of a workload that was read from its configuration.

    The keys that say them are written into the configuration, which is read again: what else follows from them, such as
    the dtype in which quantised layers compute, is among the settings.

    Args:
        origin: The configuration.
        settings: Keys of a workload with their values.

    Returns:
        Keys of the workload with their values; None if the framework has no key for one of them, or refuses or does
        with it what is not simulated.
    """
    table = dialect(origin.dialect)
    keys, outside = dict[str, Any](), dict[str, object]()
    for path, value in _asked(settings):
        said = {} if path in table.implied else _said(table, path, value)
        if path in _OUTSIDE:
            outside[path] = value
        elif said is None:
            return None
        else:
            keys |= said
    if not keys:
        return outside
    before = dict(_flat(read_again(origin, origin.text).mapping))
    try:
        after = dict(_flat(read_again(origin, rewritten(origin, Answer(keys))).mapping))
    except WorkloadError:
        return None
    changed = {path: value for path, value in after.items() if before.get(path) != value}
    return {**outside, **changed, **dict.fromkeys(before.keys() - after.keys())}


def _asked(settings: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    """Yield settings by single keys, and that a section is there."""
    for path, value in settings.items():
        if path in _SECTIONS:
            yield path, value is not None
        if isinstance(value, Mapping) and path in _SECTIONS:
            yield from ((f"{path}.{name}", each) for name, each in value.items())
        elif path not in _SECTIONS:
            yield path, value


def _leaves(mapping: Mapping[str, Any]) -> dict[str, Any]:
    """Return every key of a workload with its value, defaults too, and whether it has the sections that it may lack."""
    whole = Workload.from_mapping(mapping).model_dump(mode="json", by_alias=True)
    found = dict(_flat(whole))
    for section in _SECTIONS:
        parent, _, name = section.rpartition(".")
        found[section] = whole[parent][name] is not None
    return found


def _flat(mapping: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in mapping.items():
        path = f"{prefix}{name}"
        if isinstance(value, Mapping) and value and (not prefix or path in _SECTIONS):
            yield from _flat(value, f"{path}.")
        else:
            yield path, value


def _said(table: Dialect, path: str, value: Any) -> Mapping[str, Any] | None:
    """Return the keys that say one of a workload; None where the framework has none."""
    rule = table.says.get(path)
    if isinstance(rule, str):
        return {rule: value}
    if rule is not None:
        return rule.get(value) if isinstance(value, bool | str) else None
    section, _, name = path.partition(".")
    has_it = section in table.sections and "." not in name and name not in OWN_KEYS
    return {name: value} if has_it else None


def rewritten(origin: Origin, change: Answer) -> str:
    """Return the text of a configuration with some keys changed, and comments and order as they were."""
    if origin.is_command:
        return _in_command(origin, change)
    text, is_flat = origin.text, dialect(origin.dialect).flat
    for key, value in change.keys.items():
        text = _in_file(text, key.split(".") if is_flat else [key], value)
    return text


def _in_file(text: str, path: list[str], value: Any) -> str:
    """Return the text of a file with one key changed, taken out where ``value`` is None, or added to its section."""
    root = yaml.compose(text, yaml.SafeLoader)
    assert isinstance(root, MappingNode)
    section, rest = root, path
    while True:
        found = next(
            (pair for pair in section.value if isinstance(pair[0], ScalarNode) and pair[0].value == rest[0]), None
        )
        if found is None or len(rest) == 1 or not isinstance(found[1], MappingNode) or not found[1].value:
            break
        section, rest = found[1], rest[1:]
    if found is None:
        return text if value is None else _added(text, section, rest, value)
    name, content = found
    start, end = content.start_mark.index, content.end_mark.index
    if value is None and len(rest) > 1:  # a section without the key
        return text
    if value is None:
        return _without(text, name, end, flow=bool(section.flow_style))
    if len(rest) > 1:  # the section is there, and empty
        inner = _nested(rest[1:], value)
        written = json.dumps(inner) if section.flow_style else _flow(inner)
        return f"{text[:start]}{'' if end > start else ' '}{written}{_between(text, start, end)}{text[end:]}"
    written = json.dumps(value) if section.flow_style else _flow(value)
    blank = "" if end > start or text[start - 1 : start].isspace() else " "  # `key:` alone
    return f"{text[:start]}{blank}{written}{_between(text, start, end)}{text[end:]}"


def _without(text: str, name: ScalarNode, end: int, *, flow: bool) -> str:
    """Return a text without a key whose value ends at ``end``: its lines, or of a list in braces the key alone."""
    start = name.start_mark.index
    begin = text.rfind("\n", 0, start) + 1
    if not flow or not text[begin:start].strip():
        return text[:begin] + text[text.find("\n", end) + 1 :]
    after = re.match(r"\s*,\s*", text[end:])
    before = re.search(r"\s*,\s*$", text[:start])
    return (
        text[:start] + text[end + after.end() :] if after else text[: before.start() if before else start] + text[end:]
    )


def _added(text: str, section: MappingNode, path: list[str], value: Any) -> str:
    """Return a text with a new key at the end of a section, indented as the section is."""
    if section.flow_style:  # JSON
        opening = section.start_mark.index + 1
        written = json.dumps(_nested(path[1:], value))
        return f'{text[:opening]}"{path[0]}": {written}, {text[opening:].lstrip()}'
    column = section.start_mark.column
    lines = []
    for depth, name in enumerate(path):
        indent = " " * (column + 2 * depth)
        lines.append(f"{indent}{name}: {_flow(value)}" if depth == len(path) - 1 else f"{indent}{name}:")
    written = "\n".join(lines)
    if column == 0:
        return f"{text.rstrip()}\n{written}\n"
    body = text[: section.end_mark.index]
    body = body[: len(_content(body))]
    rest = text[len(body) :]
    return f"{body}\n{written}{rest or chr(10)}"


def _content(text: str) -> str:
    """Return a text without empty lines and lines of comments at its end; a comment beside its last value stays."""
    lines = text.split("\n")
    while lines and (not lines[-1].strip() or lines[-1].lstrip().startswith("#")):
        lines.pop()
    return "\n".join(lines)


def _nested(path: list[str], value: Any) -> Any:
    """Return a value in mappings of the names that lead to it."""
    for name in reversed(path):
        value = {name: value}
    return value


def _between(text: str, start: int, end: int) -> str:
    """Return the line breaks that end a value of several lines, which its node includes."""
    return "\n" if text[start:end].endswith("\n") else ""


def _flow(value: Any) -> str:
    """Return a value as it is written on one line."""
    if isinstance(value, str) and re.fullmatch(r"[A-Za-z_][\w./-]*", value):
        return value
    return yaml.safe_dump(value, default_flow_style=True, width=10_000).removesuffix("\n...\n").strip()


def _in_command(origin: Origin, change: Answer) -> str:
    """Return a command with the values of its options replaced, and others added at its end."""
    text = origin.text.rstrip()
    plain = dialect(origin.dialect).options == "key=value"
    added = []
    for key, value in change.keys.items():
        option = key if plain else f"--{key}"
        pattern = re.compile(rf"(?<!\S){re.escape(option)}(=|\s+)(\"[^\"]*\"|'[^']*'|(?!-)\S+)")
        written = shlex.quote(_flow(value)) if value is not None else ""
        if pattern.search(text):
            text = pattern.sub(f"{option}\\g<1>{written}" if written else "", text, count=1)
        elif value is not None:
            added.append(f"{option}={written}" if plain else f"{option} {written}")
    separator = " \\\n    " if "\n" in text else " "
    return separator.join([text, *added]) + "\n"
