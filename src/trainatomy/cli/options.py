"""Commands made of the requests of their verbs, options that several share, and values that need parsing."""

from __future__ import annotations

import inspect
import os
import shlex
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import MISSING
from functools import wraps
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, TypeVar, get_type_hints

import typer

from trainatomy.cli.exits import UsageError
from trainatomy.option import Offered, Option, offered
from trainatomy.workload.dialects.recognise import command_in, usual_commands

EVERY_GPU = "all"


def several_gpus(text: str | None, costs: Mapping[str, float] = MappingProxyType({})) -> list[str] | None:
    """Return the names in ``--gpu`` if several are asked for (an empty list: all), else ``None``."""
    listed = [name.strip() for name in str(text).split(",") if name.strip()] if text is not None else []
    if listed == [EVERY_GPU]:
        return []
    if len(listed) > 1:
        return listed
    return (listed or list(costs)) if costs else None


def prices(texts: Sequence[str]) -> dict[str, float]:
    """Return the prices in ``--price``."""
    found: dict[str, float] = {}
    for text in (part for each in texts for part in each.split(",")):
        name, _, number = text.partition("=")
        try:
            found[name.strip()] = float(number)
        except ValueError:
            raise typer.BadParameter(f"--price must look like h100=2.9 (a price per hour), found {text!r}") from None
        if found[name.strip()] <= 0:
            raise typer.BadParameter(f"--price {text}: a price must be above 0")
    return found


def refuse_together(given: Mapping[str, bool]) -> None:
    """Raise ``BadParameter`` if more than one of several options is given that exclude each other."""
    both = [name for name, is_given in given.items() if is_given]
    if len(both) > 1:
        raise typer.BadParameter(f"{both[0]} and {both[1]} cannot be combined")


def refuse_others(context: typer.Context, used: Collection[str], where: str) -> None:
    """Raise ``BadParameter`` if an option is given that a mode of the command does not use.

    Args:
        context: The command that runs.
        used: Parameters that the mode uses.
        where: The mode, as the message ends.
    """
    for parameter in context.command.params:
        name = parameter.name or ""
        source = context.get_parameter_source(name)
        if name not in used and source is not None and source.name == "COMMANDLINE":
            option = parameter.opts[0] if parameter.opts[0].startswith("-") else name.upper()
            raise typer.BadParameter(f"{option} cannot be used {where}")


Request = TypeVar("Request")


def command(verb: Callable[[Request], None], more: Sequence[inspect.Parameter] = ()) -> Callable[..., None]:
    """Make a command of a verb: with an option for each field of its request that has one.

    Args:
        verb: A function of one request, whose docstring is the help. A field ``context`` is the command that runs.
        more: Further parameters, whose values are the request's ``flags`` by name, as typed.
    """
    request: type[Request] = next(iter(get_type_hints(verb).values()))
    options = offered(request)
    parameters = [parameter(name, *_typed(options[name])) for name in options]
    if "context" in request.__dataclass_fields__:  # type: ignore[attr-defined]
        parameters.insert(0, inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context))
    parameters += more

    @wraps(verb)
    def called(**values: Any) -> None:
        given = {name: value for name, value in values.items() if value is not None and value != []}
        own = {name: options[name].read(given.pop(name)) for name in options if name in given}
        if "context" in given:
            own["context"] = given.pop("context")
        verb(request(**own, **({"flags": given} if more else {})))

    called.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    called.__annotations__ = {each.name: each.annotation for each in parameters}
    return called


def parameter(name: str, kind: Any, option: Any, default: Any = None) -> inspect.Parameter:
    """Return a parameter of a command."""
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, option])


def _typed(offer: Offered) -> tuple[Any, Any, Any]:
    """Return the type, the option and the default of a parameter."""
    option = offer.option
    default = inspect.Parameter.empty if offer.default is MISSING else offer.default
    shown: dict[str, Any] = {"metavar": option.metavar, "help": option.help, "show_default": False}
    if not offer.name:
        return offer.kind, typer.Argument(**shown), default
    more: dict[str, Any] = {"min": option.min, "max": option.max, "exists": option.exists, "hidden": option.hidden}
    callback = _writable if option.writes else None
    return (
        offer.kind,
        typer.Option(offer.name, rich_help_panel=option.panel, callback=callback, **shown, **more),
        default,
    )


def _writable(parameter: typer.CallbackParam, value: Any) -> Any:
    """Return the files of an option; raise ``UsageError`` if one cannot be written."""
    for file in value if isinstance(value, list) else [] if value is None else [value]:
        check_writable(parameter.opts[0], file)
    return value


def check_writable(option: str, file: Path) -> None:
    """Raise ``UsageError`` if a file cannot be written when the work is done."""
    folder = file.absolute().parent
    if file.is_dir():
        problem = "is a folder; name a file"
    elif not folder.is_dir():
        problem = f"{file.parent} is no folder" if folder.exists() else f"there is no folder {file.parent}"
    elif file.exists():
        problem = "" if os.access(file, os.W_OK) else "the file cannot be written"
    else:
        problem = "" if os.access(folder, os.W_OK | os.X_OK) else f"the folder {file.parent} cannot be written"
    if problem:
        raise UsageError(f"{option} {file}: {problem}")


def file_or_command(words: Sequence[str]) -> str:
    """Return the one file among the words of a command line, or the command of another framework that they are."""
    text = words[0] if len(words) == 1 else shlex.join(words)
    if len(words) > 1 and command_in(text) is None:
        raise UsageError(
            f"one file describes a training, found {' '.join(words)}; `trainatomy compare` takes several, and a "
            f"command of another framework follows `--`: {', '.join(f'`{name}`' for name in usual_commands())}"
        )
    return text


FILE = Option(
    "A file that describes the training: a workload, or a configuration of another framework. Or, after --, the "
    "command of one.",
    name="",
    metavar="WORKLOAD.yaml | -- COMMAND",
    words=list[str] | None,
    read=file_or_command,
)
DEBUG = Option("Show tracebacks and all logs of the libraries.", panel="Output")
JSON = Option("Print one JSON object and nothing else.", panel="Output")
SOURCES = Option("Also list the inputs of the prediction and where they come from.", panel="Output")
PRICE = Option(
    "Price of a GPU per hour, such as h100=2.9 (`predict`: or of a machine, p5.48xlarge=55); repeatable. Adds the "
    "cost of training; of a prediction where the length of the whole training is known.",
    metavar="GPU=PRICE",
    words=list[str] | None,
    read=prices,
)


def command_line() -> str:
    """Return the command line of this process, for records and hints."""
    return shlex.join(["trainatomy", *sys.argv[1:]])
