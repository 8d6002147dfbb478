"""Jobs of Slurm and SkyPilot: which GPUs they ask for, and the command that trains."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trainatomy.errors import WorkloadError
from trainatomy.workload.dialects.recognise import usual_commands
from trainatomy.workload.document import parse
from trainatomy.workload.shell import LAUNCHERS, commands_in

_WITH_VALUE = re.compile(
    r"-[A-Za-z]|--(?!exclusive\b|wait\b|hold\b|requeue\b|verbose\b|down\b|yes\b|detach-run\b)[\w-]+"
)
"""Options of sbatch, srun and sky that take the next word."""
_GPU_OPTIONS = ("--gres", "--gpus-per-node", "--gpus", "-G")
_VARIABLE = re.compile(r"\$(\{\w+\}|\w+)")


@dataclass(frozen=True, slots=True)
class BatchJob:
    """A command to be run on GPUs.

    Attributes:
        command: The words that start the training.
        gpu: The name of the GPU, as the job asks for it; None where it does not.
        gpus: GPUs of each machine; None where the job does not say.
        nodes: Machines.
        source: The file of the job, for messages.
    """

    command: tuple[str, ...]
    gpu: str | None = None
    gpus: int | None = None
    nodes: int = 1
    source: str = ""


def read_job(words: Sequence[str]) -> BatchJob:
    """Return what a command starts: a job of ``sbatch``, ``srun`` or ``sky launch``, or a training itself.

    Raises:
        WorkloadError: A file of the job cannot be read, or holds no training.
    """
    starter = Path(words[0]).name if words else ""
    if starter == "sbatch":
        return _slurm(words[1:])
    if starter == "srun":
        options, rest = _own_options(words[1:])
        return replace(_asked(BatchJob(tuple(rest)), options), command=tuple(rest))
    if starter == "sky":
        return _sky(words[1:])
    return BatchJob(tuple(words))


def _own_options(words: Sequence[str]) -> tuple[list[tuple[str, str]], list[str]]:
    """Return the options before the first word that is none, and the words from there on."""
    options, rest = list[tuple[str, str]](), list(words)
    while rest and rest[0].startswith("-"):
        name, equals, value = rest.pop(0).partition("=")
        if not equals and rest and _WITH_VALUE.fullmatch(name) and not rest[0].startswith("-"):
            value = rest.pop(0)
        options.append((name, value))
    return options, rest


def _text(file: str) -> str:
    try:
        return Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise WorkloadError(f"{file}: cannot be read: {getattr(error, 'strerror', None) or error}") from None


def _slurm(words: Sequence[str]) -> BatchJob:
    options, rest = _own_options(words)
    wrapped = next((value for name, value in options if name == "--wrap"), None)
    if wrapped is None and not rest:
        raise WorkloadError("sbatch: no script is named, so that there is nothing to check")
    text = wrapped if wrapped is not None else _text(rest[0])
    source = "sbatch --wrap" if wrapped is not None else rest[0]
    directives = re.findall(r"^#SBATCH\s+(.+)$", text, flags=re.MULTILINE)
    stated = [option for line in directives for option in _own_options(shlex.split(line, comments=True))[0]]
    variables = {str(place): word for place, word in enumerate(rest)}
    job = _asked(BatchJob((), source=source), [*stated, *options])
    return _with_command(job, text, variables)


def _asked(job: BatchJob, options: Sequence[tuple[str, str]]) -> BatchJob:
    """Return a job with the machines and GPUs that options of Slurm ask for; later ones override earlier ones."""
    for name, value in options:
        if name in ("--nodes", "-N") and value.partition("-")[0].isdigit():
            job = replace(job, nodes=int(value.partition("-")[0]))
    for name, value in options:
        asked = re.fullmatch(r"(?:gpu:)?(?:([A-Za-z][\w.-]*):)?(\d+).*", value) if name in _GPU_OPTIONS else None
        if asked is not None:
            count = int(asked[2]) // job.nodes if name in ("--gpus", "-G") else int(asked[2])
            job = replace(job, gpu=asked[1] or job.gpu, gpus=max(count, 1))
    return job


def _sky(words: Sequence[str]) -> BatchJob:
    """Read ``sky launch TASK.yaml`` and its like (``sky jobs launch``)."""
    rest = [word for word in words if word not in ("jobs", "launch", "exec")]
    options, others = list[tuple[str, str]](), list[str]()
    while rest:
        found, rest = _own_options(rest)
        options += found
        others += rest[:1]
        rest = rest[1:]
    file = next((word for word in others if word.endswith((".yaml", ".yml"))), None)
    if file is None:
        raise WorkloadError("sky: no task file (.yaml) is named, so that there is nothing to check")
    task = parse(_text(file), file).value
    if not isinstance(task, Mapping) or not isinstance(task.get("run"), str):
        raise WorkloadError(f"{file}: has no `run`, so that there is nothing to check")
    asked = next((value for name, value in options if name == "--gpus"), None)
    gpu, count = _accelerators(asked or (task.get("resources") or {}).get("accelerators"))
    job = BatchJob((), gpu, count, int(task.get("num_nodes") or 1), file)
    variables = {str(name): str(value) for name, value in (task.get("envs") or {}).items() if value is not None}
    return _with_command(job, task["run"], {"SKYPILOT_NUM_GPUS_PER_NODE": str(count or 1), **variables})


def _accelerators(asked: Any) -> tuple[str | None, int | None]:
    """Return the first of the accelerators that a task accepts, and how many: ``A100:8``, a list, or a mapping."""
    if isinstance(asked, Mapping):
        name, count = next(iter(asked.items()), (None, None))
        return name, int(count or 1)
    if isinstance(asked, list | tuple):
        return _accelerators(asked[0]) if asked else (None, None)
    name, _, number = str(asked or "").partition(":")
    return (name or None), (int(number) if number.isdigit() else 1 if name else None)


def _with_command(job: BatchJob, text: str, variables: Mapping[str, str]) -> BatchJob:
    """Return a job with the last command of a script that trains.

    Raises:
        WorkloadError: The script holds none, or one with a variable that is known on the machine only.
    """
    found: list[str] | None = None
    for words, _ in commands_in(text, {**os.environ, **variables}):
        command = _own_options(words[1:])[1] if words[0] == "srun" else words
        if command and Path(command[0]).name in _trainers():
            found = command
    if found is None:
        raise WorkloadError(f"{job.source}: no command of it is known to train ({', '.join(_trainers())} …)")
    unknown = next((match for word in found if (match := _VARIABLE.search(word))), None)
    if unknown is not None:
        raise WorkloadError(f"{job.source}: {unknown[0]} is not known here: set it before `trainatomy check`")
    return replace(job, command=tuple(found))


def _trainers() -> list[str]:
    """Return the first words of commands that train: of launchers, and of frameworks."""
    return [*LAUNCHERS, *dict.fromkeys(command.split()[0] for command in usual_commands())]
