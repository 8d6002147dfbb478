"""Options of a command that are keys of a workload, generated from ``workload.flags`` (the one list of them)."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import wraps
from pathlib import Path
from typing import Annotated, Any

import typer

from trainatomy.workload.arguments import arguments
from trainatomy.workload.flags import FLAGS, Flag


def in_run(name: str, help: str, **more: Any) -> Any:
    """An option that says how something is run, or how it is predicted."""
    return typer.Option(name, help=help, rich_help_panel="Run", show_default=False, **more)


def in_output(name: str, help: str, **more: Any) -> Any:
    """An option that says what is shown, and where things are kept."""
    return typer.Option(name, help=help, rich_help_panel="Output", show_default=False, **more)


Debug = Annotated[bool, in_output("--debug", "Show tracebacks and everything that libraries say.")]
Json = Annotated[bool, in_output("--json", "Print one JSON object and nothing else.")]
TrustRemoteCode = Annotated[bool, in_run("--trust-remote-code", "Let code that a hub's model brings along run here.")]
CalibrationFile = Annotated[
    Path | None,
    in_run(
        "--calibration",
        "Price time by this file of `trainatomy calibrate`, in place of what ships; of the card that is predicted for, "
        "or of one of the same compute capability.",
        metavar="FILE",
    ),
]
Records = Annotated[
    str | None,
    in_output(
        "--records",
        "Where records of measured runs are: a folder or its URL. Default: TRAINATOMY_RECORDS, else "
        "./trainatomy-records.",
        metavar="PATH",
    ),
]


def with_workload_options(command: Callable[..., None]) -> Callable[..., None]:
    """Replace the last parameter of ``command``, a ``**overrides``, by one option for each flag.

    The command receives what was given on the command line, by the flag's name, as it was typed:
    ``workload.overrides.merge`` reads it. Names of TrainingArguments that change nothing are accepted too, so that a
    training script's command line can be pasted; help does not show them.
    """
    signature = inspect.signature(command, eval_str=True)
    own = [parameter for parameter in signature.parameters.values() if parameter.kind is not parameter.VAR_KEYWORD]
    generated = [_parameter(flag.name, *_option(flag)) for flag in FLAGS]
    names = {flag.name for flag in FLAGS}
    aside = [_parameter(name, *_hidden(name)) for name in arguments().names() if name not in names | {"debug"}]

    @wraps(command)
    def called(**given: Any) -> None:
        command(**{name: value for name, value in given.items() if value is not None and value != []})

    called.__signature__ = signature.replace(parameters=[*own, *generated, *aside])  # type: ignore[attr-defined]
    called.__annotations__ = {parameter.name: parameter.annotation for parameter in (*own, *generated, *aside)}
    return called


def _option(flag: Flag) -> tuple[Any, Any]:
    """Type and option of a flag; values are checked by the schema, whose messages name the flag."""
    shown: Mapping[str, Any] = {"help": _sentence(flag.help), "rich_help_panel": flag.panel, "show_default": False}
    if flag.kind == "switch":
        return bool | None, typer.Option(f"{flag.option}/--no-{flag.option.removeprefix('--')}", **shown)
    kind: Any = list[str] if flag.repeatable else str
    return kind | None, typer.Option(flag.option, metavar=flag.metavar, **shown)


def _hidden(name: str) -> tuple[Any, Any]:
    return str | None, typer.Option(f"--{name.replace('_', '-')}", hidden=True)


def _parameter(name: str, kind: Any, option: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind, option])


def _sentence(text: str) -> str:
    """The schema's description as help: a capital in front, a full stop behind."""
    return f"{text[:1].upper()}{text[1:]}{'' if text.endswith('.') else '.'}" if text else ""
