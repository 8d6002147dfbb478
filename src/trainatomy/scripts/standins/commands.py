"""One policy for every command that a script starts, whatever function starts it.

``nvidia-smi`` is answered, launchers are followed, questions about the machine are asked, other programs are left out,
and Python code of the user's is refused: it would train outside the simulation.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import platform
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import import_module
from typing import Any, NoReturn

import torch

from trainatomy.catalog.files import read_yaml
from trainatomy.errors import SimulationError
from trainatomy.scripts.guard import WRITES, passing
from trainatomy.scripts.job import HandedOver, Handover, callers, current_place, is_called_by_user
from trainatomy.scripts.programs import (
    NOTHING,
    SHELL,
    Words,
    command_of,
    commands_of,
    is_python,
    is_question,
    launched,
    python_command,
)
from trainatomy.scripts.standins.notes import StandIns
from trainatomy.scripts.standins.nvidia_smi import PROGRAM, GpuState, answer, split

_MOST_CHARACTERS = 60
"""Characters of a command in a note."""
_OF_A_COMMAND = ("args", "shell", "executable", "cwd", "env", "preexec_fn")
"""Arguments of ``subprocess.Popen`` that belong to the command."""
_OF_RANKS = frozenset(
    "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE NODE_RANK GROUP_RANK MASTER_ADDR MASTER_PORT".split()
)
"""Variables that tell a process its place among others; the simulated process sets them itself."""


class Commands:
    """What becomes of the commands that a script starts."""

    def __init__(self, stand_ins: StandIns) -> None:
        self._stand_ins = stand_ins
        self._before = dict(os.environ)

    def refuse(self, *_: Any, **__: Any) -> NoReturn:
        """Refuse to start a process, and say what to do instead."""
        known: Mapping[str, str] = read_yaml("programs.yaml")["without_processes"]
        library = next((name for name in callers() if name in known), None)
        advice = (
            "Run the script as one process (without --multiprocessing-distributed, multiprocessing.Process or the "
            "like); `trainatomy run torchrun --nproc-per-node N …` simulates one rank of several"
            if library is None
            else f"{library} needs none: {known[library]}"
        )
        raise SimulationError(f"{self._place()} starts another process, and a dry run follows one.\n{advice}")

    def is_run(self, command: Any, *, shell: bool, environment: Any = None, folder: Any = None) -> bool:
        """Return whether a command is run as it is; else it does nothing.

        Args:
            command: Its words, or a line for a shell.
            shell: Whether a shell reads the line.
            environment: Its variables; None for those of the process.
            folder: The folder that it is started in; None for that of the process.

        Raises:
            HandedOver: It trains in the place of this script.
            SimulationError: It would run code of the user's outside the simulation.
        """
        by_user = is_called_by_user()
        if shell or isinstance(command, str | bytes | os.PathLike):
            text = os.fsdecode(command)
            commands = commands_of(text) if shell else [command_of([text])]
        else:
            words = [*map(os.fsdecode, command)]
            text, commands = shlex.join(words), [command_of(words)]
            if len(words) > 2 and commands[0].program in ("sh", "bash", "zsh") and words[1] in ("-c", "-lc"):
                text, commands = words[2], commands_of(words[2])
        if commands is None:
            if any(is_python(each) or launched(each) for each in _programs_of(text)):
                self.refuse()
        elif commands:
            where = self._folder(folder)
            for each in commands:
                variables = {**self._added(environment), **each.variables}
                self._check(each, variables, where, text, by_user=by_user)
            is_missing = launched(commands[0]) is None and shutil.which(commands[0].words[0]) is None
            is_asked = all(map(is_question, commands)) and not self._names_written(commands, where)
            if is_asked or (is_missing and not by_user):
                return True
            if self._accompanies(commands[0]):
                return False
        self._stand_ins.note("command", text if len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS]}…")
        return False

    def replaces(self, path: Any, command: Iterable[Any], environment: Any = None) -> NoReturn:
        """Follow what a script puts in its own place (``os.exec…``) where that is Python; refuse other programs."""
        words = command_of([os.fsdecode(path), *map(os.fsdecode, [*command][1:])])
        variables = {**self._added(environment), **words.variables}
        if not self._stand_ins.is_training():
            self._follow(words, variables, self._folder(None))
        self.refuse()

    def launch(self, gpus: int, nodes: int, command: Sequence[str]) -> NoReturn:
        """Follow a command that a launcher in this process starts as several ranks."""
        words = command_of(command)
        called = python_command(words).words if is_python(words) else words.words
        self._hand_over(_torchrun(gpus, nodes, called), self._added(None), self._folder(None))

    def repeat(self, gpus: int, nodes: int) -> NoReturn:
        """Run the script again as ranks that a function of it starts; what it sets before, it sets again."""
        if self._stand_ins.is_training() or not self._stand_ins.command:
            self.refuse()
        self._hand_over(_torchrun(gpus, nodes, self._stand_ins.command), {}, self._folder(None))

    def redirected(self, kind: int, number: int, *rest: Any) -> tuple[Any, ...]:
        """Return an action of ``posix_spawn`` for a file of the new process, redirected where it is written."""
        if kind == os.POSIX_SPAWN_OPEN and rest[1] & WRITES:
            rest = (self._stand_ins.files.to_write(rest[0], keeps=not rest[1] & os.O_TRUNC), *rest[1:])
        return (kind, number, *rest)

    def answer(self, command: Any) -> list[str] | None:
        """Return a command that prints what ``nvidia-smi`` would, through the filters behind it, or Python's version.

        None for others.
        """
        words = command if isinstance(command, str) else [*map(os.fsdecode, command)]
        if _asks_for_python(command_of(words.split() if isinstance(words, str) else words)):
            return [SHELL, "-c", f"echo Python {platform.python_version()}"]
        asked = split(words)
        if asked is None:
            return None
        words, filters = asked
        process = self._stand_ins.process
        free, total = process.counters.functions()["mem_get_info"]()
        major, minor = torch.cuda.get_device_capability()
        current = torch.cuda.current_device()
        used = [total - free if index == current else 0 for index in range(process.current.count)]
        gpus = [GpuState(process.name, f"{major}.{minor}", total, each) for each in used]
        text = answer(words, gpus, os.getpid())
        if text is None:
            return None
        self._stand_ins.note("monitor", PROGRAM)
        return [SHELL, "-c", f"printf %s {shlex.quote(text)}{f' | {filters}' if filters else ''}"]

    def _check(self, command: Words, variables: Mapping[str, str], folder: str, text: str, *, by_user: bool) -> None:
        """Follow a command that trains, or refuse it; return where it does something else."""
        is_launcher = launched(command) is not None
        if not is_launcher and not is_python(command):
            return
        if self._stand_ins.is_training():
            if by_user:
                self.refuse()
            return
        if is_launcher or not by_user:
            self._follow(command, variables, folder)
            return
        called = python_command(command)
        if called.kind == "-m" and called.target in read_yaml("programs.yaml")["tools"]:
            return
        if self._accompanies(command):
            return
        raise SimulationError(
            f"{self._place()} starts another process, and a dry run follows one.\n"
            f"Run what it starts by itself: trainatomy run {text[:_MOST_CHARACTERS]}"
        )

    def _follow(self, command: Words, variables: Mapping[str, str], folder: str) -> None:
        """Leave the training to a launcher's command or another Python; return where it is neither.

        Raises:
            HandedOver: It is.
            SimulationError: It is a process of a pool.
        """
        words = launched(command)
        if words is None:
            called = python_command(command) if is_python(command) else None
            known = read_yaml("programs.yaml")
            if called is not None and any(part in called.target for part in known["works"]):
                self.refuse()
            if called is None or called.kind not in ("-m", "file") or called.target in known["tools"]:
                return
            words = ("python", *called.words)
            count = int(variables.get("WORLD_SIZE", "1"))
            if count > 1:  # a rank of several, which it is told by its variables
                local = int(variables.get("LOCAL_WORLD_SIZE", count))
                words = _torchrun(local, count // local, called.words)
        self._hand_over(words, variables, folder)

    def _hand_over(self, words: Sequence[str], variables: Mapping[str, str], folder: str) -> NoReturn:
        """Leave the training to a command, which is to find what this one has written."""
        if variables.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true":
            raise SimulationError(
                f"{self._place()} starts `{shlex.join(words)[:_MOST_CHARACTERS]}` with DeepSpeed: scripts that "
                "accelerate starts with DeepSpeed are not simulated; describe the training by a workload"
            )
        found = tuple(self._only_written(word) if word.endswith(".py") else word for word in words)
        added = {name: value for name, value in variables.items() if name not in _OF_RANKS}
        raise HandedOver(Handover(found, added, self._only_written(folder)))

    def _names_written(self, commands: Sequence[Words], folder: str) -> bool:
        """Return whether commands name what the script wrote, which other programs would look for on the machine."""
        words = (word for command in commands for word in command.words[1:])
        return any(self._stand_ins.files.found(os.path.join(folder, word)) is not None for word in words)  # noqa: PTH118

    def _only_written(self, path: str) -> str:
        """Return where a path is that the script wrote, if the machine has none of that name."""
        files = self._stand_ins.files
        return path if files.is_below(os.path.abspath(path)) else files.found(path) or path  # noqa: PTH100

    def _accompanies(self, command: Words) -> bool:
        """Return whether a command is a process that cleans up after this one, which is not needed."""
        if not is_python(command):
            return False
        called = python_command(command)
        parts: list[str] = read_yaml("programs.yaml")["accompanies"]
        return called.kind == "-c" and any(part in called.target for part in parts)

    def _added(self, environment: Any) -> dict[str, str]:
        """Return the variables that differ from those with which the script began."""
        given = os.environ if environment is None else environment
        decoded = {os.fsdecode(name): os.fsdecode(value) for name, value in given.items()}
        return {name: value for name, value in decoded.items() if self._before.get(name) != value}

    def _folder(self, folder: Any) -> str:
        return os.path.abspath(os.getcwd() if folder is None else os.fsdecode(folder))  # noqa: PTH100, PTH109

    def _place(self) -> str:
        return current_place(self._stand_ins.script) or "the script"


def _asks_for_python(command: Words) -> bool:
    """Return whether a command asks Python for its version."""
    return is_python(command) and command.words[1:] in (("--version",), ("-V",))


def _torchrun(gpus: int, nodes: int, words: Sequence[str]) -> tuple[str, ...]:
    return ("torchrun", *([f"--nnodes={nodes}"] if nodes > 1 else []), f"--nproc-per-node={gpus}", *words)


def _programs_of(text: str) -> list[Words]:
    """Return the words after everything in a line of a shell after which a command may begin."""
    found = []
    for part in re.split(r"[;&|\n(){}`]", text):
        words = re.findall(r"[^\s\"'<>$]+", part)
        found += [command_of(words)] if words else []
    return [each for each in found if each.words]


def install(stand_ins: StandIns) -> Commands:
    """Let every function that starts a command ask the policy."""
    commands = Commands(stand_ins)
    _install_popen(stand_ins, commands)
    _install_os(stand_ins, commands)
    _install_fork_exec(stand_ins, commands)
    return commands


def _install_popen(stand_ins: StandIns, commands: Commands) -> None:
    create, system = subprocess.Popen.__init__, os.system
    signature = inspect.signature(create)

    def popen(self: Any, *arguments: Any, **options: Any) -> None:
        given = signature.bind(self, *arguments, **options).arguments
        command, shell = given["args"], bool(given.get("shell"))
        if isinstance(command, os.PathLike):
            command = [os.fspath(command)]
        if not isinstance(command, str | bytes):
            command = [*command]
            if shell:
                command = command[0]
            elif given.get("executable"):
                command = [given["executable"], *command[1:]]
        instead = commands.answer(os.fsdecode(command) if isinstance(command, bytes) else command)
        where = {"environment": given.get("env"), "folder": given.get("cwd")}
        is_run = instead is None and commands.is_run(command, shell=shell, **where)
        with passing():
            if is_run:
                with contextlib.suppress(PermissionError):  # by the wall, which knows another program of that name
                    create(**{**given, "preexec_fn": None})
                    return
            kept = {name: value for name, value in given.items() if name not in _OF_A_COMMAND}
            create(args=instead or [NOTHING], **kept)

    def run(command: Any) -> int:
        instead = commands.answer(os.fsdecode(command))
        if instead is None and not commands.is_run(command, shell=True):
            return 0
        with passing():
            return system(shlex.join(instead) if instead else command)

    stand_ins.put(subprocess.Popen, "__init__", popen)
    stand_ins.put(os, "system", run)


def _install_os(stand_ins: StandIns, commands: Commands) -> None:
    """Replace ``exec``, ``posix_spawn``, ``spawn`` and ``fork`` of ``os``."""
    stand_ins.put(os, "execv", commands.replaces)
    stand_ins.put(os, "execve", commands.replaces)
    for name in ("fork", "forkpty"):
        if hasattr(os, name):
            stand_ins.put(os, name, commands.refuse)
    if not hasattr(os, "posix_spawn"):
        return

    def spawning(original: Callable[..., int]) -> Callable[..., int]:
        def spawn(path: Any, command: Any, environment: Any, /, **options: Any) -> int:
            words = [path, *[*command][1:]]
            actions = options.get("file_actions") or ()
            options["file_actions"] = [commands.redirected(*action) for action in actions]
            instead = commands.answer(words)
            is_run = instead is None and commands.is_run(words, shell=False, environment=environment)
            with passing():
                if is_run:
                    return original(path, command, environment, **options)
                return named(*_program(instead or [NOTHING]), environment, **options)

        return spawn

    named = os.posix_spawnp

    def spawnvef(mode: int, file: Any, args: Any, env: Any, func: Any) -> int:
        process = os.posix_spawnp(file, args, os.environ if env is None else env)
        return process if mode == os.P_NOWAIT else os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])

    stand_ins.put(os, "posix_spawn", spawning(os.posix_spawn))
    stand_ins.put(os, "posix_spawnp", spawning(os.posix_spawnp))
    stand_ins.put(os, "_spawnvef", spawnvef)


def _program(words: list[str]) -> tuple[str, list[str]]:
    return words[0], words


def _install_fork_exec(stand_ins: StandIns, commands: Commands) -> None:
    """Replace the function in C below ``subprocess`` and the processes of ``multiprocessing``."""
    try:
        module: Any = import_module("_posixsubprocess")
    except ImportError:
        return
    original = module.fork_exec

    def fork_exec(command: Any, executables: Any, *rest: Any) -> int:
        if not commands.is_run(command, shell=False):
            found = shutil.which(NOTHING) or NOTHING
            command, executables = [NOTHING], [os.fsencode(found)]
        with passing():
            return original(command, executables, *rest)

    stand_ins.put(module, "fork_exec", fork_exec)
