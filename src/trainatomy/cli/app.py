"""The commands as one typer application, and the spellings of options that it accepts.

``trainatomy --help`` must be instant, and the options of a command come from the schema of a workload, which takes a
fifth of a second to load. So the application starts with a name and a line of help for each command; a command itself
is imported when it is called or completed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from importlib import import_module
from itertools import pairwise
from typing import Annotated, Any, NamedTuple

import typer
from typer.core import TyperCommand, TyperGroup

from trainatomy import __version__
from trainatomy.cli import manual
from trainatomy.cli.exits import UsageError
from trainatomy.cli.output import show
from trainatomy.errors import WorkloadError

CONTEXT = {"help_option_names": ["-h", "--help"]}


class Entry(NamedTuple):
    """A command: its name (that of the function, and mostly of its module), its panel in ``--help``, its summary."""

    name: str
    panel: str
    summary: str


COMMANDS = (
    Entry("predict", "Training runs", "Predict the GPU memory and the time of a training step."),
    Entry("run", "Training runs", "Run your own training script without a GPU, and predict its memory and time."),
    Entry("check", "Training runs", "Say in one sentence whether what a launcher would start fits its GPUs."),
    Entry("fit", "Training runs", "Find the settings that fit a GPU and train fastest."),
    Entry("compare", "Training runs", "Compare several training runs, predicted or measured."),
    Entry("ops", "Training runs", "Break a training step down by operation group, phase and module."),
    Entry("measure", "Training runs", "Measure a training step on this machine's GPU, beside the prediction."),
    Entry("data", "Training runs", "Time a DataLoader, to find how many workers a training step needs."),
    Entry("app", "Training runs", "Predict in the browser: a form, the memory breakdown and settings that fit."),
    Entry("mcp", "Training runs", "Answer a coding agent by the Model Context Protocol: does it fit, and what helps."),
    Entry("gpus", "Built-in data", "List the known GPUs, with the source of every figure."),
    Entry("models", "Built-in data", "List the model architectures that need no network."),
    Entry("doctor", "This machine", "Check this machine: what is wrong, and how to fix it."),
    Entry("calibrate", "This machine", "Calibrate the timing model on this machine's GPU."),
    Entry("history", "Records of measured runs", "List measured runs."),
    Entry("show", "Records of measured runs", "Show a measured run."),
    Entry("diff", "Records of measured runs", "Compare two measured runs."),
)


_MODULES = {
    "app": "serve",
    "calibrate": "measure",
    "data": "doctor",
    "diff": "history",
    "models": "gpus",
    "ops": "predict",
}
"""Modules that are not called like their command."""


class Command(TyperCommand):
    """A command whose options may be spelt as in a training script, and whose help shows long names in full."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        switches = {name for option in self.params for name in option.opts if option.secondary_opts}
        ignored = {name for option in self.params for name in option.opts if getattr(option, "hidden", False)}
        ctx.meta[_AFTER_SWITCHES] = dict(_words_after(switches, args))
        try:
            valued = {name: option.metavar for option in self.params if _takes_value(option) for name in option.opts}
            refuse_options_as_values(args, valued)
            rest: list[str] = super().parse_args(ctx, canonical(args, switches, ignored))
        except UsageError as error:
            error.ctx = error.ctx or ctx  # the parser knows no context for an option that lacks its value
            known = {name for option in self.params for name in option.opts}
            if meant := _meant(getattr(error, "option_name", None), known):
                error.possibilities = [meant]
            raise
        return rest

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except WorkloadError as error:
            word = str(getattr(error.__cause__, "filename", ""))
            if (switch := ctx.meta[_AFTER_SWITCHES].get(word)) is None:
                raise
            raise WorkloadError(
                f"{switch} takes true, false or no value; {word} is none of them, and no file"
            ) from error

    def format_help(self, ctx: Any, formatter: Any) -> None:
        show(manual.command_help(self, ctx.command_path))


_AFTER_SWITCHES = "trainatomy.after_switches"


def _takes_value(option: Any) -> bool:
    is_flag = getattr(option, "is_flag", False) or getattr(option, "count", False)
    return option.param_type_name == "option" and not is_flag and not getattr(option, "hidden", False)


def refuse_options_as_values(arguments: Sequence[str], valued: Mapping[str, str | None]) -> None:
    """Raise ``UsageError`` where an option without its value would swallow the option after it.

    ``--option=--value`` gives a value that looks like an option.

    Args:
        arguments: The command line.
        valued: The options that take a value, with what stands for it in help.
    """
    for option, following in pairwise(arguments):
        if option == "--":
            return
        name = option.replace("_", "-")
        if name in valued and following.startswith("--"):
            what = f" ({valued[name]})" if valued[name] else ""
            raise UsageError(f"{option} needs a value{what}, but {following} follows it")


def _words_after(switches: Collection[str], arguments: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield each word that follows a switch and is neither an option nor a value of a switch, with the switch."""
    for switch, word in pairwise(arguments):
        if switch.replace("_", "-") in switches and not word.startswith("-") and word.lower() not in _ON | _OFF:
            yield word, switch


class Commands(TyperGroup):
    """The commands by name; a command is loaded before its arguments are parsed."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        by_panel: dict[str, list[manual.Entry]] = {}
        for entry in COMMANDS:
            by_panel.setdefault(entry.panel, []).append(manual.Entry(entry.name, entry.summary))
        show(manual.overview(self, ctx.command_path, by_panel))

    def list_commands(self, ctx: Any) -> list[str]:
        return [entry.name for entry in COMMANDS]

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and args[0] in self.commands:
            self.commands[args[0]] = load(args[0])
        return super().resolve_command(ctx, args)


def _meant(option: str | None, known: Collection[str]) -> str | None:
    """Return the option that an unknown one means in other tools: ``--learning-rate`` for ``--lr``."""
    from trainatomy.workload.arguments import arguments

    setting = arguments().synonyms.get((option or "").removeprefix("--").replace("-", "_"), "")
    meant = f"--{setting.replace('_', '-')}"
    return meant if meant in known else None


def load(name: str) -> Any:
    """Return the command ``name`` with all its options."""
    single = typer.Typer(add_completion=False, rich_markup_mode="rich", context_settings=CONTEXT)
    module = import_module(f"trainatomy.cli.{_MODULES.get(name, name)}")
    single.command(name, cls=getattr(module, "COMMAND", Command), context_settings=CONTEXT)(getattr(module, name))
    return typer.main.get_command(single)


def app() -> typer.Typer:
    """Return the application; its commands are not loaded yet."""
    application = typer.Typer(
        cls=Commands,
        no_args_is_help=True,
        rich_markup_mode="rich",
        pretty_exceptions_enable=False,
        context_settings=CONTEXT,
    )
    application.callback()(_start)
    for entry in COMMANDS:
        application.command(entry.name, help=entry.summary)(_not_loaded)
    return application


def _not_loaded() -> None:
    raise AssertionError("commands are loaded before they are called")


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"trainatomy {__version__}")
        raise typer.Exit


def _start(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", is_eager=True, callback=_version)
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks and all logs of the libraries.")] = False,
) -> None:
    """Predict, without a GPU, the memory and the time of a PyTorch or Hugging Face training step.

    For example: `trainatomy predict --model gpt2 --per-device-train-batch-size 8 --gpu h100`.
    """


_ON = frozenset({"true", "yes", "on", "1"})
_OFF = frozenset({"false", "no", "off", "0"})


def canonical(arguments: Sequence[str], switches: Collection[str], ignored: Collection[str] = ()) -> list[str]:
    """Return ``arguments`` in the one spelling that the parser knows.

    Option names get hyphens. For the options in ``switches`` (``{"--fp16", ...}``), ``--fp16 true`` and ``--fp16=True``
    become ``--fp16``, and ``--fp16 false`` becomes ``--no-fp16``. Options in ``ignored``, whose value does not matter,
    may come with or without one (``--do_train``). Everything after ``--`` is unchanged.

    >>> canonical(["--max_steps=3", "--bf16", "False", "file_a.yaml"], {"--bf16"})
    ['--max-steps=3', '--no-bf16', 'file_a.yaml']
    """
    spelt: list[str] = []
    rest = list(arguments)
    while rest:
        argument = rest.pop(0)
        if argument == "--":
            return [*spelt, argument, *rest]
        if not argument.startswith("--"):
            spelt.append(argument)
            continue
        name, equals, value = argument.partition("=")
        name = name.replace("_", "-")
        if name in ignored and not equals:
            value = rest.pop(0) if rest and not rest[0].startswith("--") else "true"
            spelt.append(f"{name}={value}")
        elif name not in switches:
            spelt.append(name + equals + value)
        elif not equals:
            value = rest.pop(0) if rest and rest[0].lower() in _ON | _OFF else "true"
            spelt.append(_switched(name, value))
        else:
            spelt.append(_switched(name, value) if value.lower() in _ON | _OFF else name + equals + value)
    return spelt


def _switched(name: str, value: str) -> str:
    return name if value.lower() in _ON else f"--no-{name.removeprefix('--')}"
