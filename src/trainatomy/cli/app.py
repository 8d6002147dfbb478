"""The commands as one typer application.

``trainatomy --help`` must be instant, and the options of a command come from the schema of a workload, which takes a
fifth of a second to load.  So the application starts with a name and a line of help for each command; a command itself
is imported when it is called.
"""

from __future__ import annotations

from importlib import import_module
from typing import Annotated, Any, NamedTuple

import typer
from typer.core import TyperCommand, TyperGroup

from trainatomy import __version__
from trainatomy.cli.exits import UsageError
from trainatomy.cli.spelling import canonical

CONTEXT = {"help_option_names": ["-h", "--help"]}


class Entry(NamedTuple):
    """A command: its name (also of its module here and of the function in it), its panel in ``--help``, its help."""

    name: str
    panel: str
    summary: str


COMMANDS = (
    Entry(
        "predict",
        "Memory of a training",
        "What every part of GPU memory holds at the peak, and whether the training fits.",
    ),
    Entry("compare", "Memory of a training", "Several trainings side by side, with the difference to the first."),
    Entry("measure", "Memory of a training", "The same step on the GPU of this machine, beside the prediction."),
    Entry("ops", "Operations of a step", "What the operations of a step do, by group, phase and module."),
    Entry("calibrate", "Operations of a step", "What the clock needs, measured on the GPU of this machine."),
    Entry("history", "Records", "The measured runs on record, as a table."),
    Entry("show", "Records", "One measured run, drawn again."),
    Entry("diff", "Records", "What changed between two measured runs, and which component it went to."),
    Entry("gpus", "What is known", "The cards that trainatomy knows, with the source of every figure."),
    Entry("models", "What is known", "The architectures that need no network, with their sources."),
)


class Command(TyperCommand):
    """A command whose options may be spelt as in a training script (``spelling.py``); its help cuts no name."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        switches = {name for option in self.params for name in option.opts if option.secondary_opts}
        set_aside = {name for option in self.params for name in option.opts if getattr(option, "hidden", False)}
        try:
            rest: list[str] = super().parse_args(ctx, canonical(args, switches, set_aside))
        except UsageError as error:
            error.ctx = error.ctx or ctx  # the parser knows no context for an option that lacks its value
            raise
        return rest

    def format_help(self, ctx: Any, formatter: Any) -> None:
        from trainatomy.cli.manual import command_help
        from trainatomy.cli.output import show

        show(command_help(self, ctx.command_path))


class Commands(TyperGroup):
    """The commands by name; the one that is called is loaded before its arguments are read."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        from trainatomy.cli import manual
        from trainatomy.cli.output import show

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


def load(name: str) -> Any:
    """The whole command ``name``, with its options."""
    single = typer.Typer(add_completion=False, rich_markup_mode="rich", context_settings=CONTEXT)
    function = getattr(import_module(f"trainatomy.cli.{name}"), name)
    single.command(name, cls=Command, context_settings=CONTEXT)(function)
    return typer.main.get_command(single)


def app() -> typer.Typer:
    """The application, with commands that are not loaded yet."""
    application = typer.Typer(
        cls=Commands,
        add_completion=False,
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
    raise AssertionError("a command is loaded before it is called")


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"trainatomy {__version__}")
        raise typer.Exit


def _start(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", is_eager=True, callback=_version)
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks and everything that libraries say.")] = False,
) -> None:
    """Predict, without a GPU, what every part of GPU memory holds during a training step, to the byte.

    Start with `trainatomy compare notebook`, or describe a training: `trainatomy predict workload.yaml --gpu h100`.
    """
