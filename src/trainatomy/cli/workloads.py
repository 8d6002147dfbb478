"""The workloads that the arguments and options of a command describe.

The options that describe a training: one for each flag of a workload.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import typer

from trainatomy.catalog.gpus import find_gpu
from trainatomy.catalog.published import notebook as published_notebook
from trainatomy.catalog.published import parallel_runs
from trainatomy.cli.manual import command_help
from trainatomy.cli.options import command, parameter
from trainatomy.cli.output import note, show
from trainatomy.errors import WorkloadError
from trainatomy.workload.arguments import arguments
from trainatomy.workload.builtin import NOTEBOOK, NOTEBOOK_FP16, PARALLEL, READY, ready
from trainatomy.workload.document import nearest
from trainatomy.workload.overrides import FLAGS, Flag, merge
from trainatomy.workload.reading import read, read_all
from trainatomy.workload.schema import Workload

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


def workload_command(verb: Callable[[Any], None]) -> Callable[..., None]:
    """Make a command of a verb, with one option for each flag of a workload besides those of its request.

    The request's ``flags`` are those that were set, by name, as typed; ``RawWorkload.with_flags`` parses them.
    Names of TrainingArguments that change nothing are accepted too, so that the command line of a training script can
    be pasted; help does not show them.
    """
    names = {flag.name for flag in FLAGS}
    generated = [parameter(flag.name, *_option(flag)) for flag in FLAGS]
    generated.append(parameter("launch", str | None, _LAUNCH))
    generated.append(parameter("help_all", bool | None, _HELP_ALL))
    ignored = [parameter(name, *_hidden(name)) for name in arguments().names() if name not in names | {"debug"}]
    return command(verb, [*generated, *ignored])


def _option(flag: Flag) -> tuple[Any, Any]:
    """Return the type and the option of a flag; its value is checked by the schema, whose messages name the flag."""
    shown: Mapping[str, Any] = {"help": _help(flag), "rich_help_panel": flag.panel, "show_default": False}
    if flag.kind == "switch":
        return bool | None, typer.Option(f"{flag.option}/--no-{flag.option.removeprefix('--')}", **shown)
    kind: Any = list[str] if flag.repeatable else str
    return kind | None, typer.Option(flag.option, metavar=flag.metavar, **shown)


def _hidden(name: str) -> tuple[Any, Any]:
    return str | None, typer.Option(f"--{name.replace('_', '-')}", hidden=True)


def _help(flag: Flag) -> str:
    """Return what a flag means, with its default unless the description has it."""
    default = f" (default: {flag.default})" if flag.default and "default" not in flag.help else ""
    return _sentence(f"{flag.help}{default}")


def _sentence(text: str) -> str:
    """Return a description of the schema as a sentence."""
    return f"{text[:1].upper()}{text[1:]}{'' if text.endswith('.') else '.'}" if text else ""


_READY_SIZE = {
    NOTEBOOK: "nine training runs",
    NOTEBOOK_FP16: "eight training runs",
    PARALLEL: "three training runs on two GPUs",
}
_MANY_STEPS = 20


def refuse_misspelt(name: str, built_in: Collection[str]) -> None:
    """Refuse the name of a file that is none and is spelt like a built-in workload; raise ``WorkloadError``."""
    if name not in built_in and not Path(name).exists() and (close := nearest(name, built_in, 1)):
        raise WorkloadError(f"{name}: no such file; did you mean {close[0]}?")


def one_workload(file: str | None, flags: Mapping[str, Any]) -> Workload:
    """Return the workload of a file with flags over it, or of flags alone; raise ``WorkloadError``."""
    workload = read(file, flags) if file is not None else merge(None, flags)
    note_many_steps([workload])
    return workload


def several_workloads(files: Sequence[str], flags: Mapping[str, Any], *, today: bool = False) -> tuple[Workload, ...]:
    """Return every workload of several files, or the rows of a built-in comparison, with flags over each.

    Args:
        files: Paths, or the name of a built-in comparison; without any, the flags describe one workload.
        flags: Flags for all of them.
        today: Use today's libraries even where a built-in comparison would emulate those of 2022.

    Raises:
        WorkloadError: A file or a flag is wrong.
    """
    if not files:
        return (merge(None, flags),)
    for file in files:
        refuse_misspelt(file, READY)
    for name in READY:
        if name in files:
            if len(files) > 1:
                raise WorkloadError(
                    f"{name!r} stands for {_READY_SIZE[name]} and cannot be combined with files "
                    f"(write ./{name} for a file of that name)"
                )
            return _ready_workloads(name, flags, today=today)
    return tuple(workload for file in files for workload in read_all(file, flags))


def _ready_workloads(name: str, flags: Mapping[str, Any], *, today: bool) -> tuple[Workload, ...]:
    """Return a built-in comparison: on its own GPU with the libraries of 2022, on a named GPU with today's."""
    gpu, era = flags.get("gpu"), flags.get("era")
    if gpu is not None:
        find_gpu(gpu)
    as_published = era == "2022" or (gpu is None and era is None and not today)
    rest = {name: value for name, value in flags.items() if name not in ("gpu", "era")}
    if era not in (None, "2022"):
        rest["era"] = era
    return ready(name, "2022" if as_published else "today", gpu, rest)


def samples_of(files: Sequence[str]) -> int | None:
    """Return the number of samples that the source of a built-in comparison gives times for."""
    if list(files) == [PARALLEL]:
        return parallel_runs().samples
    return published_notebook().samples if list(files) == [NOTEBOOK] else None


def note_many_steps(workloads: Sequence[Workload]) -> None:
    """Print a note where the number of steps will make a prediction slow."""
    if (steps := max((workload.steps or 0 for workload in workloads), default=0)) > _MANY_STEPS:
        note(f"{steps:,} steps are executed one by one, which takes long; without `steps`, as many as the peak needs")
