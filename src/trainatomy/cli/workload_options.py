"""The options that describe a training: one for each flag of a workload."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Annotated, Any

import typer

from trainatomy.workload.arguments import arguments
from trainatomy.workload.flags import FLAGS, Flag

_LAUNCH = typer.Option(
    "--launch",
    metavar="FILE",
    help="An accelerate configuration, or a command line of torchrun or accelerate launch, to read the GPUs, mixed "
    "precision and FSDP from.",
    rich_help_panel="Parallel",
)


def _show_all(context: typer.Context, is_wanted: bool | None) -> None:
    """Show the whole help of a command."""
    if is_wanted:
        from trainatomy.cli.manual import command_help
        from trainatomy.cli.output import show

        show(command_help(context.command, context.command_path, is_whole=True))
        raise typer.Exit


_HELP_ALL = typer.Option(
    "--help-all",
    help="Show every option, by topic, and exit.",
    is_eager=True,
    callback=_show_all,
    rich_help_panel="Output",
    show_default=False,
)


def with_workload_options(command: Callable[..., None]) -> Callable[..., None]:
    """Replace the last parameter of a command, ``**flags``, by one option for each flag of a workload.

    The command receives the flags that were set, by name, as typed; ``RawWorkload.with_flags`` parses them.
    Names of TrainingArguments that change nothing are accepted too, so that the command line of a training script can
    be pasted; help does not show them.
    """
    signature = inspect.signature(command, eval_str=True)
    own = [parameter for parameter in signature.parameters.values() if parameter.kind is not parameter.VAR_KEYWORD]
    generated = [_parameter(flag.name, *_option(flag)) for flag in FLAGS]
    generated.append(_parameter("launch", str | None, _LAUNCH))
    generated.append(_parameter("help_all", bool | None, _HELP_ALL))
    names = {flag.name for flag in FLAGS}
    ignored = [_parameter(name, *_hidden(name)) for name in arguments().names() if name not in names | {"debug"}]

    @wraps(command)
    def called(**values: Any) -> None:
        command(**{name: value for name, value in values.items() if value is not None and value != []})

    called.__signature__ = signature.replace(parameters=[*own, *generated, *ignored])  # type: ignore[attr-defined]
    called.__annotations__ = {parameter.name: parameter.annotation for parameter in (*own, *generated, *ignored)}
    return called


def _option(flag: Flag) -> tuple[Any, Any]:
    """Return the type and the option of a flag; its value is checked by the schema, whose messages name the flag."""
    shown: Mapping[str, Any] = {"help": _help(flag), "rich_help_panel": flag.panel, "show_default": False}
    if flag.kind == "switch":
        return bool | None, typer.Option(f"{flag.option}/--no-{flag.option.removeprefix('--')}", **shown)
    kind: Any = list[str] if flag.repeatable else str
    return kind | None, typer.Option(flag.option, metavar=flag.metavar, **shown)


def _hidden(name: str) -> tuple[Any, Any]:
    return str | None, typer.Option(f"--{name.replace('_', '-')}", hidden=True)


def _parameter(name: str, kind: Any, option: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind, option])


def _help(flag: Flag) -> str:
    """Return what a flag means, with its default unless the description has it."""
    default = f" (default: {flag.default})" if flag.default and "default" not in flag.help else ""
    return _sentence(f"{flag.help}{default}")


def _sentence(text: str) -> str:
    """Return a description of the schema as a sentence."""
    return f"{text[:1].upper()}{text[1:]}{'' if text.endswith('.') else '.'}" if text else ""
