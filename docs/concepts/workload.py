"""The reference of all keys, ``docs/workload.md`` and the pages in ``docs/workload``, generated from the schema."""

from __future__ import annotations

import json
import types
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union, get_args, get_origin

from pydantic_core import PydanticUndefined

from concepts.page import page
from trainatomy.workload.arguments import arguments
from trainatomy.workload.overrides import FLAGS
from trainatomy.workload.schema import Workload
from trainatomy.workload.section import Path, Section, keys, section_of

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo


_TYPES = {bool: "boolean", int: "integer", float: "number", str: "string", dict: "mapping", tuple: "list"}


def reference() -> dict[str, str]:
    """Return the pages as Markdown by their paths below docs/: one of the top of the file, and one for each section."""
    by_section: dict[str, list[str]] = {}
    for path, section in _sections(Workload, ()):
        by_section.setdefault(str(path[0]) if path else "", []).append(_list(path, section))
    top = "\n".join(by_section.pop("")).rstrip()
    pages = {f"workload/{name}.md": "\n".join([f"# `{name}`\n", *tables]) for name, tables in by_section.items()}
    pages["workload/train.md"] += f"\n{_aside()}"
    return {"workload.md": page("workload.md", {"top": top}), **pages}


def _sections(section: type[Section], path: Path) -> list[tuple[Path, type[Section]]]:
    found = [(path, section)]
    for key, field in keys(section).items():
        if inner := section_of(field.annotation):
            found += _sections(inner, (*path, key))
    return found


def _list(path: Path, section: type[Section]) -> str:
    options = {flag.path: flag.option for flag in FLAGS}
    title = "" if len(path) == 1 else f"## `{'.'.join(map(str, path))}`" if path else "## The top of the file"
    lines = [title, ""] if title else []
    for key, field in keys(section).items():
        name = f"[`{key}`](workload/{key}.md)" if not path and section_of(field.annotation) else f"`{key}`"
        kind = f"{_type(field.annotation)}{_default(field)}"
        option = _other_option(key, options.get((*path, key)))
        lines.append(f"- {name}{option} ({kind}): {field.description}")
    return "\n".join(lines) + "\n"


def _type(annotation: Any) -> str:
    """Return a type in words: ``boolean``, ``string or list``."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return "section"
    origin = get_origin(annotation)
    if origin is Literal:
        return ", ".join(f"`{choice}`" for choice in get_args(annotation))
    if origin is Annotated:
        return _type(get_args(annotation)[0])
    if origin in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(_type(each) for each in get_args(annotation) if each is not type(None)))
    return _TYPES[origin or annotation]


def _default(field: FieldInfo) -> str:
    if field.default is PydanticUndefined:
        return "" if field.default_factory else ", required"
    if field.default is False or field.default in (None, (), ""):
        return ""
    return f", default `{str(field.default).lower() if isinstance(field.default, bool) else field.default}`"


def _other_option(key: str, option: str | None) -> str:
    """Return the option of a key where it is not the key with hyphens, which the page says of the others."""
    return f", `{option}`" if option and option != f"--{key.replace('_', '-')}" else ""


def _aside() -> str:
    """List the ``TrainingArguments`` that are not keys: accepted, and refused."""
    known = arguments()
    lines = [
        "[Optimizers](../adapters-and-optimizers.md#optimizers) lists the names of `optim`.",
        "",
        "## `TrainingArguments` that change nothing here",
        "",
        "Those of logs, files, uploads, schedules and other hardware are accepted under `train`, so that arguments can",
        "be pasted ([list with reasons](../../src/trainatomy/workload/arguments.yaml)).",
    ]
    lines += ["", "## `TrainingArguments` that are not simulated", ""]
    lines += ["Accepted under `train`; a note on the prediction says that they are not counted.", ""]
    for reason in dict.fromkeys(known.not_simulated.values()):
        names = ", ".join(f"`{name}`" for name, why in known.not_simulated.items() if why == reason)
        lines.append(f"- {names}: {reason}.")
    refused = ", ".join(f"`{name}`" for name in known.refused)
    lines += ["", "## `TrainingArguments` that are refused", ""]
    lines += [f"Accepted only if empty or false, and otherwise refused with the reason: {refused}.", ""]
    lines += ["Accepted only with the values given, or null.", ""]
    for name, accepted in known.accepted_values.items():
        values = ", ".join(f"`{json.dumps(value)}`" for value in accepted.values)
        lines.append(f"- `{name}`{f' ({values})' if values else ''}: {accepted.reason}.")
    return "\n".join(lines) + "\n"
