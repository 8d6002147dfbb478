"""The command that a script is started by: a script, a module, a command of a package, perhaps with a launcher.

Environment variables by which `accelerate launch` configures a script: precision, compiling, FSDP, DeepSpeed.
"""

from __future__ import annotations

import contextlib
import difflib
import io
import logging
import os
import re
import runpy
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from itertools import pairwise
from operator import attrgetter
from pathlib import Path
from typing import Any
from unittest import mock

from trainatomy.errors import WorkloadError
from trainatomy.libraries import import_library
from trainatomy.scripts.notebook import run_file
from trainatomy.scripts.programs import Entry, installed_command, module_file, names_python, package_folder
from trainatomy.workload.launch import read_launch
from trainatomy.workload.launch_accelerate import Launch

_MOST_NAMES = 6
_DEVICE = re.compile(r"(cuda|gpu)?:?(-?\d{1,2}(,\d{1,2})*)?|cpu|mps", re.IGNORECASE)
"""Values of a script's own ``--gpu``: numbers of devices, which name no GPU to simulate."""
_SWITCHES = frozenset(
    "--standalone --no-python --run-path --multi-gpu --use-fsdp --use-deepspeed --cpu --debug --quiet --same-network "
    "--use-megatron-lm --main-training-function --enable-cpu-affinity -u --no-local-rank --force-multi "
    "--bind-cores-to-core --save-pid --elastic-training --no-ssh --no-ssh-check".split()
)
"""Options of launchers that take no value."""
_PREFIXES = (
    ("env",), ("nohup",), ("time",), ("exec",), ("uv", "run"), ("poetry", "run"), ("pixi", "run"), ("pdm", "run"),
    ("pipenv", "run"), ("hatch", "run"), ("rye", "run"),
)  # fmt: skip
"""Words that start the command after them."""
_ASSIGNMENT = re.compile(r"[A-Za-z_][A-Za-z_0-9]*=")
_PYTHON_WITH_VALUE = ("-W", "-X")
"""Options of Python that take the next word."""
_LAUNCHERS = {
    "torchrun": ("torchrun",),
    "torch.distributed.run": ("torchrun",),
    "torch.distributed.launch": ("torchrun",),
    "accelerate-launch": ("accelerate", "launch"),
    "accelerate.commands.launch": ("accelerate", "launch"),
}
"""Commands and modules that start a script, by what they are called here."""


@dataclass(frozen=True, slots=True)
class Command:
    """A script and how it is started.

    Attributes:
        typed: The words as they were typed.
        target: Path of the script, name of the module, or of a command of a package.
        is_module: True for a module (``-m``).
        arguments: The script's own arguments.
        launch: What its launcher says; None without one.
        launcher: The launcher with its options; empty without one.
        variables: Environment variables that were typed before it.
    """

    typed: tuple[str, ...]
    target: str
    is_module: bool
    arguments: tuple[str, ...]
    launch: Launch | None = None
    launcher: tuple[str, ...] = ()
    variables: tuple[tuple[str, str], ...] = ()

    @property
    def name(self) -> str:
        """Name of the script, ``train.py``."""
        return self.target if self.is_module else Path(self.target).name

    @property
    def text(self) -> str:
        """The command as it would be typed in a shell."""
        return shlex.join(self.typed)

    def entry(self) -> Entry | None:
        """Return what a command of a package starts; None for a script or a module.

        Raises:
            WorkloadError: It is no command of this Python.
        """
        path = Path(self.target).expanduser()
        is_beside = path.parent.resolve() == Path(sys.executable).parent.resolve()
        if self.is_module or path.suffix == ".py" or (path.is_file() and not is_beside):
            return None
        return installed_command(self.target)

    def spelled(self, option: str, *, takes_value: bool = True) -> str:
        """Return how the script's own arguments spell an option (``--gpu t4``); "" where they do not."""
        for place, word in enumerate(self.arguments):
            name, equals, _ = word.partition("=")
            if name.replace("_", "-") == option and word.startswith("--"):
                following = self.arguments[place + 1 : place + 2] if takes_value and not equals else ()
                return " ".join([word, *(one for one in following if not one.startswith("--"))])
        return ""

    def without(self, words: str) -> str:
        """Return the command as it would be typed without some of its script's arguments."""
        kept, dropped = list(self.typed), words.split(" ", 1)
        begin = len(kept) - len(self.arguments)
        start = next(at for at in range(begin, len(kept)) if kept[at : at + len(dropped)] == dropped)
        return shlex.join(kept[:start] + kept[start + len(dropped) :])

    def file(self) -> Path:
        """Return the file that is run.

        Raises:
            WorkloadError: There is no such file, module or command.
        """
        if self.is_module:
            if os.getcwd() not in sys.path:  # noqa: PTH109
                sys.path.insert(0, os.getcwd())  # noqa: PTH109
            return module_file(self.target)
        entry = self.entry()
        if entry is None:
            return _script(self.target)
        return module_file(entry.module, is_main=False) if entry.module else Path(entry.path)

    def package(self) -> str:
        """Return the folder of the package whose module or command it is; "" for a script."""
        entry = self.entry()
        module = self.target if self.is_module else "" if entry is None else entry.module
        return package_folder(module) if module else ""

    def execute(self) -> None:
        """Run it in this process, as Python would."""
        entry, file = self.entry(), self.file()
        begin = str(file) if entry is None else entry.path
        with mock.patch.object(sys, "argv", [begin, *self.arguments]):
            if self.is_module:
                runpy.run_module(self.target, run_name="__main__", alter_sys=True)
            elif entry is not None and entry.module:
                if status := attrgetter(entry.function)(import_module(entry.module))():
                    sys.exit(status)  # without one the command has ended as a script does at its last line
            else:
                run_file(file)


def read_command(words: Sequence[str]) -> Command:
    """Read a command.

    Raises:
        WorkloadError: It names no script, or its launcher's options cannot be read.
    """
    typed = tuple(words)
    variables, rest = _without_prefixes(list(words))
    launch: Launch | None = None
    launcher: tuple[str, ...] = ()
    begin, count = _launcher(rest)
    if begin:
        own, rest = _after_launcher(rest[count:])
        if begin == ("deepspeed",):
            begin, own, rest = ("torchrun",), *_as_torchrun(own, rest)
        launcher = (*begin, *own)
        launch = read_launch(shlex.join([*launcher, "script.py"]))
        if "--no-python" in {word.replace("_", "-") for word in own}:
            more, rest = _without_prefixes(rest)
            variables |= more
    found = {"launch": launch, "launcher": launcher, "variables": tuple(variables.items())}
    if rest[:1] == ["-m"]:
        if len(rest) < 2:
            raise WorkloadError("-m needs the name of a module")
        return Command(typed, rest[1], True, tuple(rest[2:]), **found)  # type: ignore[arg-type]
    if not rest or rest[0].startswith("-"):
        raise WorkloadError(
            f"no script in `{shlex.join(typed)}`: name one, such as `trainatomy run train.py --epochs 1`"
        )
    return Command(typed, rest[0], False, tuple(rest[1:]), **found)  # type: ignore[arg-type]


def check_gpu(command: Command, default: str, written: str = "trainatomy run --gpu {gpu} {script}") -> None:
    """Refuse a GPU's name among a script's arguments where none was named to simulate: it was probably meant for us.

    Args:
        command: The command.
        default: The GPU that would be simulated.
        written: How a GPU is named for a command.

    Raises:
        WorkloadError: There is one.
    """
    words = command.spelled("--gpu")
    value = re.split("[ =]", words, maxsplit=1)[1:]
    if not value or _DEVICE.fullmatch(value[0]):
        return
    raise WorkloadError(
        f"{words} stands after the script and goes to it, so that {default} would be simulated. Write "
        f"{written.format(gpu=value[0], script=command.without(words))}\n"
        f"If it is meant for the script, say so: {written.format(gpu=default, script=command.text)}"
    )


def _without_prefixes(words: list[str]) -> tuple[dict[str, str], list[str]]:
    """Return the variables before a command, and its words without what only starts it: ``env A=1 python train.py``.

    Raises:
        WorkloadError: A prefix has options of its own, or Python gets its code as an argument.
    """
    variables: dict[str, str] = {}
    while words:
        prefix = next((one for one in _PREFIXES if tuple(words[: len(one)]) == one), None)
        if _ASSIGNMENT.match(words[0]):
            name, _, variables_value = words[0].partition("=")
            variables[name] = variables_value
            words = words[1:]
        elif prefix is not None and not Path(words[0]).is_file():
            words = words[len(prefix) :]
            if words[:1] and words[0].startswith("-"):
                raise WorkloadError(f"`{shlex.join(prefix)} {words[0]}`: give the command after it to `trainatomy run`")
        elif names_python(words[0]) and not Path(words[0]).with_suffix(".py").is_file():
            return variables, _after_python(words[1:])
        else:
            break
    return variables, words


def _after_python(words: list[str]) -> list[str]:
    """Return the words after Python's own options, from ``-m`` or the script on."""
    while words and words[0].startswith("-") and not words[0].startswith("-m"):
        if words[0].startswith("-c"):
            raise WorkloadError("python -c: write the code into a file, and run that")
        words = words[2:] if words[0] in _PYTHON_WITH_VALUE else words[1:]
    return words


def _launcher(words: list[str]) -> tuple[tuple[str, ...], int]:
    """Return a launcher as it is called here, and how many words it takes; nothing without one."""
    first = words[1:2] if words[:1] == ["-m"] else [Path(word).name for word in words[:1]]
    count = 2 if words[:1] == ["-m"] else 1
    if first == ["accelerate"] and words[count : count + 1] == ["launch"]:
        return ("accelerate", "launch"), count + 1
    if first == ["deepspeed"] and not Path(words[0]).is_file():
        return ("deepspeed",), count
    return (_LAUNCHERS[first[0]], count) if first and first[0] in _LAUNCHERS else ((), 0)


def _after_launcher(words: list[str]) -> tuple[list[str], list[str]]:
    """Divide the options of a launcher from the script (or ``-m module``) and its arguments."""
    position = 0
    while position < len(words):
        word = words[position]
        if not word.startswith("-"):
            break
        if word in ("-m", "--module"):
            return words[:position], ["-m", *words[position + 1 :]]
        alone = "=" in word or word.replace("_", "-") in _SWITCHES
        position += 1 if alone else 2
    return words[:position], words[position:]


def _as_torchrun(own: list[str], rest: list[str]) -> tuple[list[str], list[str]]:
    """Return torchrun's options for those of DeepSpeed's launcher, and the script with what that adds to its arguments.

    Source: deepspeed/launcher/launch.py, which sets torchrun's variables and passes ``--local_rank``.

    Raises:
        WorkloadError: They do not say how many GPUs there are.
    """
    words = [part for word in own for part in word.split("=", 1)]
    given = {name.replace("_", "-"): value for name, value in pairwise([*words, ""]) if name.startswith("--")}
    gpus = given.get("--num-gpus") or str(len(given.get("--include", "").rpartition(":")[2].split(",")))
    if not ({"--num-gpus", "--include"} & given.keys()) or ("--hostfile" in given and "--num-nodes" not in given):
        raise WorkloadError(
            "deepspeed takes all GPUs that it finds: say how many there are, deepspeed --num_gpus N (and --num_nodes M)"
        )
    options = ["--nproc-per-node", gpus, "--nnodes", given.get("--num-nodes", "1")]
    options += ["--no-python"] * ("--no-python" in given)
    begin = 2 if rest[:1] == ["-m"] else 1
    rank = [] if "--no-local-rank" in given or not rest else ["--local_rank=0"]
    return options, [*rest[:begin], *rank, *rest[begin:]]


def _script(target: str) -> Path:
    path = Path(target).expanduser()
    if path.is_dir():
        raise WorkloadError(f"{target} is a folder: name the script in it, or run a module (-m {path.name})")
    if not path.is_file():
        is_a_command = path.name == target and not path.suffix
        raise WorkloadError(f"no such file{' or command' if is_a_command else ''}: {target}{_nearest(path)}")
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
    visible = dict(command.variables).get("CUDA_VISIBLE_DEVICES", "").count(",") + 1
    if gpus is None and command.launch is None and visible > 1:
        raise WorkloadError(
            f"`{command.text}` shows the script {visible} GPUs and has no launcher: say what it does with them, by "
            f"--gpus {visible} (a process for each, as torchrun starts them) or --gpus 1"
        )
    if gpus is None or gpus == 1:
        return command
    if command.launch is not None:
        raise WorkloadError(f"--gpus {gpus}: the launcher of `{command.text}` says how many GPUs there are")
    return replace(command, launch=Launch("--gpus", gpus))


_VARIABLE_PREFIXES = ("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_")


def variables(command: Command) -> Mapping[str, str]:
    """Return the variables that a command's launcher sets for each process, as accelerate's own code computes them.

    torchrun's say a process's rank, which the simulated process does itself.

    Raises:
        MissingLibrary: accelerate or DeepSpeed is not installed.
        WorkloadError: accelerate refuses its options.
    """
    words = command.launcher
    if words[:1] != ("accelerate",):
        return {}
    import_library("accelerate", f"`{command.text}`", install="accelerate")
    from accelerate.commands import launch

    parser = launch.launch_command_parser()
    given: Any = parser.parse_args([*words[2:], "script.py"])
    if given.num_processes is None and given.config_file is None and command.launch is not None:
        given.num_processes = command.launch.gpus
    logging.getLogger("accelerate.commands.launch").setLevel(logging.ERROR)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            given, defaults, says_precision = launch._validate_launch_command(given)
            if given.use_deepspeed and not given.cpu:
                from trainatomy.training.parallel.deepspeed import import_deepspeed

                import_deepspeed()  # for a GPU, before the simulated one appears
                fields = [*(defaults.deepspeed_config if defaults else ()), *["mixed_precision"] * says_precision]
                given.deepspeed_fields_from_accelerate_config = ",".join(fields)  # as `launch_command` does
                found = launch.prepare_deepspeed_cmd_env(given)[1]
            elif (given.use_fsdp or given.multi_gpu) and not given.cpu:
                found = launch.prepare_multi_gpu_env(given)
            else:
                found = launch.prepare_simple_launcher_cmd_env(given)[1]
    except ValueError as error:
        raise WorkloadError(f"`{command.text}`: accelerate refuses this: {error}") from error
    return {name: value for name, value in found.items() if name.startswith(_VARIABLE_PREFIXES)}
