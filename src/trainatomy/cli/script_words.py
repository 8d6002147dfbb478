"""Words of ``trainatomy run``: its own options stand before the script; the rest is the script's."""

from __future__ import annotations

from typing import Any

import typer

from trainatomy.cli.app import Command
from trainatomy.errors import WorkloadError
from trainatomy.scripts.command import Command as Script
from trainatomy.scripts.command import check_gpu

DEFAULT_GPU = "h200"
_NOT_GIVEN = "trainatomy.not_given"
"""Options of the command that were not given before the script, each with whether it takes a value."""


class ScriptCommand(Command):
    """A command whose own options end where the script begins; the script's are passed on as they are."""

    options_first = True

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        switches = {
            name for option in self.params for name in (*option.opts, *option.secondary_opts) if _is_switch(option)
        }
        position = 0
        while position < len(args) and args[position].startswith("-") and args[position] not in ("-m", "--"):
            word = args[position]
            alone = "=" in word or word.replace("_", "-") in switches or word in ("-h", "--help")
            position += 1 if alone else 2
        script = args[position:]
        is_divided = script[:1] == ["--"]
        script = script[1:] if is_divided else script
        rest: list[str] = super().parse_args(ctx, [*args[:position], "--", *script])
        if not is_divided:
            own = {word.partition("=")[0].replace("_", "-") for word in args[:position]}
            ctx.meta[_NOT_GIVEN] = [
                (name, not _is_switch(option))
                for option in self.params
                for name in (*option.opts, *option.secondary_opts)
                if option.param_type_name == "option" and name not in own
            ]
        return rest


def passed_on(command: Script, context: typer.Context) -> str:
    """Return that arguments of a script are spelled like options that were not given before it; "" if none is.

    Raises:
        WorkloadError: The answer would be another: for another GPU, or success whether the script fits or not.
    """
    options = dict(context.meta.get(_NOT_GIVEN, []))
    if "--gpu" in options:
        check_gpu(command, DEFAULT_GPU)
    if "--check" in options and (words := command.spelled("--check", takes_value=False)):
        raise WorkloadError(
            f"{words} stands after the script and goes to it, so that nothing would be checked. Write "
            f"trainatomy run --check {command.without(words)}\n"
            f"If it is meant for the script, say so: trainatomy run -- {command.text}"
        )
    spelled = (command.spelled(name, takes_value=takes_value) for name, takes_value in options.items())
    found = ", ".join(filter(None, spelled))
    return found and f"{found}: for the script, not for trainatomy run, whose options stand before the script"


def _is_switch(option: Any) -> bool:
    return bool(getattr(option, "is_flag", False))
