"""Refuse other processes, questions and the network in a dry run; leave out commands and kernels."""

from __future__ import annotations

import builtins
import getpass
import io
import multiprocessing.process
import os
import shlex
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import torch

from trainatomy.errors import SimulationError
from trainatomy.scripts.places import current_place, is_called_by_user
from trainatomy.scripts.standins import nvidia_smi
from trainatomy.scripts.standins.notes import StandIns

_PYTHON = ("python", "torchrun", "accelerate", "deepspeed")
"""Beginnings of the names of programs that run Python."""
_NOTHING = [sys.executable, "-S", "-c", ""]
"""A command that does nothing."""
_MOST_WORDS = 60
"""Characters of a command in a note."""
_LOCAL = ("localhost", "127.0.0.1", "::1", "")


def install(stand_ins: StandIns) -> None:
    """Put them in place."""

    def start(*_: Any, **__: Any) -> NoReturn:
        raise SimulationError(
            f"{_at(stand_ins)} starts another process, and a dry run follows one.\n"
            "Run the script as one process (without --multiprocessing-distributed, mp.spawn or the like); "
            "`trainatomy run torchrun --nproc-per-node N …` simulates one rank of several"
        )

    stand_ins.put(multiprocessing.process.BaseProcess, "start", start)
    stand_ins.put(os, "fork", start)
    for name in ("execv", "execve", "posix_spawn"):
        if hasattr(os, name):
            stand_ins.put(os, name, start)
    _install_commands(stand_ins, start)
    _install_questions(stand_ins)
    _install_extensions(stand_ins)
    if not stand_ins.network:
        _install_network(stand_ins)
    _install_kernels(stand_ins)
    if stand_ins.process.topology.has_group:
        _install_group(stand_ins)


def _install_commands(stand_ins: StandIns, refuse: Callable[[], NoReturn]) -> None:
    """Let commands that the script runs do nothing, as they could write and remove files; refuse other Pythons.

    What libraries run to find out about the machine is left to them.
    """
    create, system = subprocess.Popen.__init__, os.system

    def left_out(command: Any) -> int:
        """Note a command of the script, and return the exit status of a successful one."""
        words = command if isinstance(command, str) else shlex.join(map(os.fsdecode, command))
        if any(Path(word).name.startswith(_PYTHON) for word in shlex.split(words)[:1]):
            refuse()
        stand_ins.note("command", words if len(words) <= _MOST_WORDS else f"{words[:_MOST_WORDS]}…")
        return 0

    def popen(process: Any, args: Any, *rest: Any, **options: Any) -> None:
        if not is_called_by_user():
            create(process, args, *rest, **options)
            return
        command = [os.fspath(args)] if isinstance(args, os.PathLike) else args
        instead = _asking_the_gpu(stand_ins, command)
        if instead is None:
            left_out(command)
        kept = {name: value for name, value in options.items() if name not in _OF_A_COMMAND}
        create(process, instead or _NOTHING, *rest, **kept)

    def run(command: Any) -> int:
        if not is_called_by_user():
            return system(command)
        instead = _asking_the_gpu(stand_ins, command)
        return system(shlex.join(instead)) if instead else left_out(command)

    stand_ins.put(subprocess.Popen, "__init__", popen)
    stand_ins.put(os, "system", run)


def _asking_the_gpu(stand_ins: StandIns, command: Any) -> list[str] | None:
    """Return a command that prints what ``nvidia-smi`` would, through the filters behind it; None for others."""
    asked = nvidia_smi.split(command if isinstance(command, str) else [*map(os.fsdecode, command)])
    if asked is None:
        return None
    words, filters = asked
    current, counters = stand_ins.process.current, stand_ins.process.counters.functions()
    free, total = counters["mem_get_info"]()
    major, minor = torch.cuda.get_device_capability()
    name = stand_ins.process.name
    used = [total - free if index == torch.cuda.current_device() else 0 for index in range(current.count)]
    gpus = [nvidia_smi.GpuState(name, f"{major}.{minor}", total, one) for one in used]
    text = nvidia_smi.answer(words, gpus, os.getpid())
    if text is None:
        return None
    stand_ins.note("monitor", nvidia_smi.PROGRAM)
    printing = [sys.executable, "-S", "-c", "import sys; sys.stdout.write(sys.argv[1])", text]
    return ["/bin/sh", "-c", f"{shlex.join(printing)} | {filters}"] if filters else printing


_OF_A_COMMAND = ("shell", "executable", "cwd", "env", "preexec_fn")
"""Options of ``subprocess.Popen`` that belong to the command."""


def _install_questions(stand_ins: StandIns) -> None:
    """Refuse to wait for the user."""

    def ask(prompt: object = "", *_: Any, **__: Any) -> NoReturn:
        raise SimulationError(
            f"{_at(stand_ins)} asks for input ({str(prompt).strip() or 'no prompt'}), and nobody answers in a dry "
            "run.\nPass the answer as an argument of the script"
        )

    class Nobody(io.TextIOBase):
        """The standard input of a script."""

        def read(self, *_: Any) -> NoReturn:
            raise SimulationError(
                f"{_at(stand_ins)} reads its standard input, which is empty in a dry run.\n"
                "Let it read a file, or pass what it needs as an argument"
            )

        readline = readlines = __next__ = read

    stand_ins.put(builtins, "input", ask)
    stand_ins.put(getpass, "getpass", ask)
    stand_ins.put(sys, "stdin", Nobody())


def _install_group(stand_ins: StandIns) -> None:
    """Let the script find the process group that the simulated rank has already."""
    import torch.distributed as dist

    def nothing(*_: Any, **__: Any) -> None:
        """Do nothing."""

    stand_ins.put(dist, "init_process_group", nothing)
    stand_ins.put(dist, "destroy_process_group", nothing)
    stand_ins.put(dist.distributed_c10d, "init_process_group", nothing)


def _at(stand_ins: StandIns) -> str:
    return current_place(stand_ins.script) or "the script"


def _install_network(stand_ins: StandIns) -> None:
    """Let every connection to another machine fail at once."""
    connect, resolve = socket.socket.connect, socket.getaddrinfo

    def refuse(host: object) -> OSError:
        return ConnectionRefusedError(f"the network is off in a dry run ({host}); switch it on with --network")

    def connected(self: socket.socket, address: Any) -> Any:
        if self.family != socket.AF_UNIX and address[0] not in _LOCAL:
            raise refuse(address[0])
        return connect(self, address)

    def resolved(host: Any, *rest: Any, **more: Any) -> Any:
        if host is not None and str(host) not in _LOCAL:
            raise refuse(host)
        return resolve(host, *rest, **more)

    stand_ins.put(socket.socket, "connect", connected)
    stand_ins.put(socket, "getaddrinfo", resolved)


def _install_kernels(stand_ins: StandIns) -> None:
    """Let Triton's kernels do nothing."""

    def put(*_: Any) -> None:
        from trainatomy.simulator.triton import simulated_triton

        stand_ins.stack.enter_context(simulated_triton())

    stand_ins.when(("triton.runtime.jit", "triton.runtime.autotuner"), put)


def _install_extensions(stand_ins: StandIns) -> None:
    """Refuse to compile C++ and CUDA code."""
    from torch.utils import cpp_extension

    def load(name: str = "", *_: Any, **__: Any) -> Any:
        raise SimulationError(
            f"{_at(stand_ins)} compiles an extension of its own ({name}), whose kernels cannot run without a GPU.\n"
            "Replace it by PyTorch's operators for the dry run, or measure the script: trainatomy run --measure"
        )

    stand_ins.put(cpp_extension, "load", load)
    stand_ins.put(cpp_extension, "load_inline", load)
