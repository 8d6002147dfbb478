"""The help of a command, for the terminal and (docs/cli.md) as Markdown, from the parser itself.

Typer's own help truncates long option names at 80 columns (``--gradient-accumulati…``), and gives no entries for the
reference page.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from trainatomy.reporters.document import section

PANELS = (
    *("Arguments", "Filters", "Run", "Output", "Model", "TrainingArguments", "Data", "LoRA", "Quantization"),
    *("Parallel", "Training loop", "GPU and software", "Generation"),
)
"""The panels, in the order of a command's whole help."""
BRIEF = PANELS[:4]
"""The panels of ``--help``; ``--help-all`` shows the others too."""
MOST_USED = (
    *("model", "gpu", "gpus", "sequence-length", "per-device-train-batch-size", "gradient-accumulation-steps"),
    *("gradient-checkpointing", "bf16", "fp16", "dtype", "optim", "lora-r", "load-in-4bit", "loop"),
)
"""Options of other panels that ``--help`` shows nevertheless, without their dashes."""
_NAME_WIDTH = 30


class Entry(NamedTuple):
    """An argument or option as it is written (``--[no-]fp16``, ``--optim TEXT``), and its help."""

    usage: str
    help: str


def panels(command: Any) -> dict[str, list[Entry]]:
    """Return the arguments and options of a command by panel, in the order of its help."""
    found: dict[str, list[Entry]] = {name: [] for name in PANELS}
    for parameter in command.params:
        if not getattr(parameter, "hidden", False):
            panel = parameter.rich_help_panel or ("Arguments" if parameter.param_type_name == "argument" else "Output")
            found.setdefault(panel, []).append(Entry(_usage(parameter), parameter.help or ""))
    found["Output"].append(Entry("-h, --help", "Show this message and exit."))
    return {name: entries for name, entries in found.items() if entries}


def most_used(command: Any) -> list[Entry]:
    """Return the options in ``MOST_USED`` that a command has."""
    by_name = {name: parameter for parameter in command.params for name in parameter.opts}
    found = (by_name.get(f"--{name}") for name in MOST_USED)
    return [
        Entry(_usage(parameter), parameter.help or "")
        for parameter in found
        if parameter is not None and parameter.rich_help_panel not in BRIEF
    ]


def usage(command: Any, path: str) -> str:
    """Return the usage line; options stand first where what follows a command belongs to that command."""
    arguments = [_usage(parameter) for parameter in command.params if parameter.param_type_name == "argument"]
    options_first = getattr(command, "options_first", False) or any("-- " in word for word in arguments)
    return " ".join([path, "[OPTIONS]", *arguments] if options_first else [path, *arguments, "[OPTIONS]"])


def paragraphs(command: Any) -> Iterator[str]:
    """Yield the paragraphs of a command's docstring, without line breaks."""
    for paragraph in inspect.cleandoc(command.help or "").split("\n\n"):
        yield re.sub(r"\s+", " ", paragraph).strip()


def command_help(command: Any, path: str, *, is_whole: bool = False) -> Group:
    """Return the help for the terminal; a long name gets its own line, so that none is truncated.

    Args:
        command: The command.
        path: How it is called.
        is_whole: Show all panels, instead of the brief ones and the options that are used most.
    """
    about = [Text(f"\n{paragraph}") for paragraph in paragraphs(command)]
    shown = panels(command)
    others = [name for name in shown if name not in BRIEF]
    if others and not is_whole:
        first = {name: shown[name] for name in BRIEF if name in shown}
        shown = {"Arguments": first.pop("Arguments", []), "Most used": most_used(command), **first}
        shown = {name: entries for name, entries in shown.items() if entries}
    body: list[RenderableType] = [section(name, *map(_render, entries)) for name, entries in shown.items()]
    if others and not is_whole:
        body.append(Text(f"\nAll options ({', '.join(others)}): {path} --help-all"))
    return Group(Text(f"Usage: {usage(command, path)}"), *about, *body)


def overview(group: Any, path: str, commands: Mapping[str, Sequence[Entry]]) -> Group:
    """Return the help of the program itself: its commands by panel, and its options."""
    about = [Text(f"\n{paragraph}") for paragraph in paragraphs(group)]
    listed = [section(panel, *map(_render, entries)) for panel, entries in commands.items()]
    options = section("Options", *map(_render, panels(group)["Output"]))
    more = Text(f"\nFor a command's options: {path} COMMAND --help")
    return Group(Text(f"Usage: {path} [OPTIONS] COMMAND …"), *about, *listed, options, more)


def _render(entry: Entry) -> RenderableType:
    name = Text(entry.usage, style="cyan")
    if len(entry.usage) > _NAME_WIDTH:
        return Group(name, Padding(Text(entry.help), (0, 0, 0, _NAME_WIDTH + 2)))
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True, width=_NAME_WIDTH)
    table.add_row(name, Text(entry.help))
    return table


def _usage(parameter: Any) -> str:
    """Return a parameter as it is written; a switch with its negation as ``--[no-]fp16``."""
    if parameter.param_type_name == "argument":
        name = parameter.metavar or parameter.name.upper()
        return name if parameter.required else f"[{name}]"
    if parameter.secondary_opts:
        return f"--[no-]{parameter.opts[0].removeprefix('--')}"
    names = ", ".join(sorted(parameter.opts, key=len))
    return names if parameter.is_flag else f"{names} {parameter.metavar or 'TEXT'}"
