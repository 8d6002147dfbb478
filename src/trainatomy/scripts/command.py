"""The command that a script is started by: ``train.py ARGS``, ``-m module ARGS``, or a launcher with both."""

from __future__ import annotations

import difflib
import importlib.util
import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from trainatomy.errors import WorkloadError
from trainatomy.workload.launch import read_launch
from trainatomy.workload.launch_settings import Launch

_LAUNCHERS = {"torchrun": 1, "accelerate": 2, "python": 1, "python3": 1}
_MOST_NAMES = 6
_SWITCHES = frozenset(
    "--standalone --no-python --run-path --multi-gpu --use-fsdp --use-deepspeed --cpu --debug --quiet --same-network "
    "--use-megatron-lm --main-training-function --enable-cpu-affinity -u".split()
)
"""Options of launchers that take no value."""


@dataclass(frozen=True, slots=True)
class Command:
    """A script and how it is started.

    Attributes:
        typed: The words as they were typed.
        target: Path of the script, or name of the module.
        is_module: True for a module (``-m``).
        arguments: The script's own arguments.
        launch: What its launcher says; None without one.
    """

    typed: tuple[str, ...]
    target: str
    is_module: bool
    arguments: tuple[str, ...]
    launch: Launch | None = None

    @property
    def name(self) -> str:
        """Name of the script, ``train.py``."""
        return self.target if self.is_module else Path(self.target).name

    @property
    def text(self) -> str:
        """The command as it would be typed in a shell."""
        return shlex.join(self.typed)

    @property
    def launcher(self) -> tuple[str, ...]:
        """The launcher's words with its options, before the script; empty without one."""
        if self.launch is None:
            return ()
        before = self.typed[: len(self.typed) - len(self.arguments) - 1]
        return before[:-1] if self.is_module else before

    def file(self) -> Path:
        """Return the file that is run.

        Raises:
            WorkloadError: There is no such file or module.
        """
        if not self.is_module:
            return _script(self.target)
        if os.getcwd() not in sys.path:  # noqa: PTH109
            sys.path.insert(0, os.getcwd())  # noqa: PTH109
        try:
            spec = importlib.util.find_spec(self.target)
            if spec is not None and spec.submodule_search_locations is not None:
                spec = importlib.util.find_spec(f"{self.target}.__main__")
        except ModuleNotFoundError:
            spec = None
        if spec is None or spec.origin is None:
            raise WorkloadError(f"-m {self.target}: there is no such module, or it cannot be run")
        return Path(spec.origin)


def read_command(words: Sequence[str]) -> Command:
    """Read a command.

    Raises:
        WorkloadError: It names no script, or its launcher's options cannot be read.
    """
    typed, rest = tuple(words), list(words)
    launch: Launch | None = None
    name = Path(rest[0]).name if rest else ""
    if name in ("torchrun", "accelerate") or rest[:3] == ["python", "-m", "torch.distributed.run"]:
        own, rest = _after_launcher(rest, name)
        launch = read_launch(shlex.join(own))
    elif name in ("python", "python3"):
        rest = rest[1:]
        while rest and rest[0] == "-u":
            rest = rest[1:]
    elif name == "deepspeed":
        raise WorkloadError(
            "deepspeed: scripts that DeepSpeed launches are not simulated; describe the training by a workload"
        )
    if rest[:1] == ["-m"]:
        if len(rest) < 2:
            raise WorkloadError("-m needs the name of a module")
        return Command(typed, rest[1], True, tuple(rest[2:]), launch)
    if not rest or rest[0].startswith("-"):
        raise WorkloadError(
            f"no script in `{shlex.join(typed)}`: name one, such as `trainatomy run train.py --epochs 1`"
        )
    return Command(typed, rest[0], False, tuple(rest[1:]), launch)


def _after_launcher(words: list[str], name: str) -> tuple[list[str], list[str]]:
    """Divide a launcher with its options from the script (or ``-m module``) and its arguments."""
    start = 1 if name == "torchrun" else 2 if name == "accelerate" else 3
    position = start
    while position < len(words):
        word = words[position]
        if not word.startswith("-"):
            break
        if word in ("-m", "--module"):
            return [*words[:position], "script.py"], ["-m", *words[position + 1 :]]
        alone = "=" in word or word.replace("_", "-") in _SWITCHES
        position += 1 if alone else 2
    launcher = ["torchrun"] if name != "accelerate" else ["accelerate", "launch"]
    return [*launcher, *words[start:position], "script.py"], words[position:]


def _script(target: str) -> Path:
    path = Path(target).expanduser()
    if path.is_dir():
        raise WorkloadError(f"{target} is a folder: name the script in it, or run a module (-m {path.name})")
    if not path.is_file():
        raise WorkloadError(f"no such file: {target}{_nearest(path)}")
    if path.suffix in (".yaml", ".yml"):
        raise WorkloadError(f"{target} is a workload file, not a script: `trainatomy predict {target}`")
    if path.suffix == ".sh":
        raise WorkloadError(f"{target} is a shell script: give the Python command in it to `trainatomy run`")
    return path.resolve()


def _nearest(path: Path) -> str:
    """Return the scripts in the folder of a missing file, those with similar names first."""
    if not path.parent.is_dir():
        return f" (there is no folder {path.parent})"
    there = sorted(one.name for one in path.parent.glob("*.py"))
    near = difflib.get_close_matches(path.name, there, _MOST_NAMES) or difflib.get_close_matches(
        f"{path.name}.py", there
    )
    if near:
        return f"; did you mean {' or '.join(near)}?"
    return f"; in {path.parent}: {', '.join(there[:_MOST_NAMES])}" if there else ""


def with_gpus(command: Command, gpus: int | None) -> Command:
    """Return the command as torchrun would start it on this many GPUs.

    Raises:
        WorkloadError: It has a launcher, which says how many.
    """
    if gpus is None or gpus == 1:
        return command
    if command.launch is not None:
        raise WorkloadError(f"--gpus {gpus}: the launcher of `{command.text}` says how many GPUs there are")
    return replace(command, launch=Launch("--gpus", gpus))
