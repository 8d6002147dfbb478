"""The reference of all keys, ``docs/workload.md`` and the pages in ``docs/workload``, generated from the schema."""

from __future__ import annotations

import json
import types
from importlib.resources import files
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union, get_args, get_origin

from pydantic_core import PydanticUndefined

from trainatomy.workload.arguments import arguments
from trainatomy.workload.overrides import FLAGS
from trainatomy.workload.schema import Workload
from trainatomy.workload.section import Path, Section, keys, section_of

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo


_TYPES = {bool: "boolean", int: "integer", float: "number", str: "string", dict: "mapping", tuple: "list"}

_CLASSES = (
    "Or the path of a class, such as `torch.optim.RMSprop`, `bitsandbytes.optim.Adam8bit` or your own (modules in the",
    "working directory are found). It is built over the model's parameters as in a script that passes",
    "`optimizers=(optimizer, None)` to the Trainer: with the Trainer's two parameter groups, with and without weight",
    "decay. `learning_rate`, `weight_decay`, `adam_beta1`, `adam_beta2` and `adam_epsilon` are passed on if the",
    "constructor has `lr`, `weight_decay`, `betas` and `eps`; `optim_args` is applied last, and may hold tuples and",
    "lists. The Trainer's own name may differ: `adamw_bnb_8bit` keeps the states of embeddings in 32 bits,",
    "`bitsandbytes.optim.Adam8bit` does not.",
    "",
    "Or a function, `mine.optimizers:make` or `file.py:make`, which gets the model and returns its optimizer or, with",
    "`loop: pytorch`, a list of several, such as Muon for matrices and AdamW for the rest. They are stepped one after",
    "the other. Settings of `train` are not passed to it.",
)


def reference() -> dict[str, str]:
    """Return the pages as Markdown by their paths below docs/: one of the top of the file, and one for each section."""
    head = files(__package__).joinpath("reference.md").read_text(encoding="utf-8")
    by_section: dict[str, list[str]] = {}
    for path, section in _sections(Workload, ()):
        by_section.setdefault(str(path[0]) if path else "", []).append(_table(path, section))
    top = "\n".join(by_section.pop(""))
    pages = {f"workload/{name}.md": "\n".join([f"# `{name}`\n", *tables]) for name, tables in by_section.items()}
    pages["workload/train.md"] += f"\n{_aside()}"
    links = [f"- [`{name}`](workload/{name}.md)" for name in by_section]
    return {"workload.md": "\n".join([head.rstrip(), "", top, "Keys of the sections:", "", *links, ""]), **pages}


def _sections(section: type[Section], path: Path) -> list[tuple[Path, type[Section]]]:
    found = [(path, section)]
    for key, field in keys(section).items():
        if inner := section_of(field.annotation):
            found += _sections(inner, (*path, key))
    return found


def _table(path: Path, section: type[Section]) -> str:
    options = {flag.path: flag.option for flag in FLAGS}
    title = "" if len(path) == 1 else f"## `{'.'.join(map(str, path))}`" if path else "## The top of the file"
    lines = [
        *([title, ""] if title else []),
        "| key | type (default) | meaning | flag |",
        "| --- | --- | --- | --- |",
    ]
    for key, field in keys(section).items():
        option = options.get((*path, key))
        kind = f"{_type(field.annotation)}{_default(field)}"
        cells = [f"`{key}`", kind, field.description or "", _code(option)]
        lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
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
    if field.default in (None, (), ""):
        return ""
    return f" (`{str(field.default).lower() if isinstance(field.default, bool) else field.default}`)"


def _code(option: str | None) -> str:
    return f"`{option}`" if option else ""


def _aside() -> str:
    """List the ``TrainingArguments`` that are not keys: accepted, refused, and the optimizers."""
    known = arguments()
    lines = [
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
    lines += ["", "## `TrainingArguments` that are refused", "", "Accepted only if empty or false.", ""]
    lines += [f"- `{name}`: {reason}." for name, reason in known.refused.items()]
    lines += ["", "Accepted only with the values given, or null.", ""]
    for name, accepted in known.accepted_values.items():
        values = ", ".join(f"`{json.dumps(value)}`" for value in accepted.values)
        lines.append(f"- `{name}`{f' ({values})' if values else ''}: {accepted.reason}.")
    lines += ["", "## Optimizers", "", "Names of `optim` by the package that each needs beside PyTorch.", ""]
    for package in dict.fromkeys(known.optimizers.values()):
        names = ", ".join(f"`{name}`" for name, needs in known.optimizers.items() if needs == package)
        lines.append(f"- {f'`{package}`' if package else 'none'}: {names}.")
    lines += ["", *_CLASSES]
    return "\n".join(lines) + "\n"
