"""What lies outside a dry run: other processes, the user, the network, compilers of extensions, Triton's kernels.

Functions that start the ranks of a training, or join their group: this process is the first of them.

If it is not one of as many, the command is run again as if ``torchrun`` had started that number.
"""

from __future__ import annotations

import builtins
import errno
import getpass
import inspect
import io
import os
import socket
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

import torch
from torch.utils import cpp_extension

from trainatomy.errors import SimulationError
from trainatomy.scripts.imports import replace_everywhere
from trainatomy.scripts.job import current_place
from trainatomy.scripts.standins import commands, pools
from trainatomy.scripts.standins.commands import Commands
from trainatomy.scripts.standins.notes import StandIns


def install_ranks(stand_ins: StandIns, commands: Commands) -> None:
    """Put them in place."""
    topology = stand_ins.process.topology

    def as_rank(gpus: int, nodes: int, call: Callable[[], Any]) -> Any:
        """Return what the function of the first rank returns, where there are that many."""
        if gpus * nodes in (1, topology.world_size) or gpus == topology.gpus_per_node:
            return call()
        return commands.repeat(gpus, nodes)

    def start_ranks(module: Any) -> None:
        def start_processes(fn: Any, args: Any = (), nprocs: int = 1, join: bool = True, *_: Any, **__: Any) -> Any:
            as_rank(nprocs, 1, lambda: fn(0, *args))
            return None if join else _Ended()

        replace_everywhere(stand_ins.stack, [(module.start_processes, start_processes)])

    def start_agent(module: Any) -> None:
        def launch_agent(config: Any, entrypoint: Any, args: Any, *_: Any, **__: Any) -> dict[int, Any]:
            gpus, nodes = int(config.nproc_per_node), int(config.min_nodes)
            if callable(entrypoint):
                return {0: as_rank(gpus, nodes, lambda: entrypoint(*args))}
            return commands.launch(gpus, nodes, [entrypoint, *args])

        replace_everywhere(stand_ins.stack, [(module.launch_agent, launch_agent)])

    def count_processes(module: Any) -> None:
        original = module._validate_launch_command

        def validate(args: Any) -> Any:
            has_file = args.config_file is not None or os.path.isfile(module.default_config_file)  # noqa: PTH113
            others = (args.cpu, args.tpu, args.use_deepspeed, args.use_fsdp, args.use_megatron_lm)
            if (args.num_processes or 1) > 1 and not has_file and not any(others):
                args.multi_gpu = True  # as accelerate sets it where it finds as many GPUs
            return original(args)

        stand_ins.put(module, "_validate_launch_command", validate)

    stand_ins.when("accelerate.commands.launch", count_processes)
    stand_ins.when("torch.multiprocessing.spawn", start_ranks)
    stand_ins.when("torch.distributed.launcher.api", start_agent)
    if topology.has_group:
        _find_group(stand_ins)
    elif torch.distributed.is_available():
        stand_ins.when("torch.distributed.rendezvous", partial(_need_no_connection, stand_ins))
        _follow_only_rank(stand_ins, commands)


def _find_group(stand_ins: StandIns) -> None:
    """Let the script find the process group that the simulated rank has already."""

    def nothing(*_: Any, **__: Any) -> None:
        """Do nothing."""

    for module in (torch.distributed, torch.distributed.distributed_c10d):
        stand_ins.put(module, "init_process_group", nothing)
    stand_ins.put(torch.distributed, "destroy_process_group", nothing)


def _follow_only_rank(stand_ins: StandIns, commands: Commands) -> None:
    """Run a script again as torchrun's only process where it makes itself a group of one for collectives of a GPU."""
    original = torch.distributed.init_process_group

    signature = inspect.signature(original)

    def init(*arguments: Any, **keywords: Any) -> Any:
        given = signature.bind(*arguments, **keywords).arguments
        backend, size = given.get("backend"), given.get("world_size", -1)
        if size < 0:
            size = int(os.environ.get("WORLD_SIZE", "0"))
        if size == 1 and (backend is None or "nccl" in str(backend).lower()):
            return commands.repeat(1, 1)
        return original(*arguments, **keywords)

    for module in (torch.distributed, torch.distributed.distributed_c10d):
        stand_ins.put(module, "init_process_group", init)


def _need_no_connection(stand_ins: StandIns, rendezvous: Any) -> None:
    """Let a group of one process need no connection; one of several has no others here, for which it would wait."""

    def store(host: str, port: int, rank: int, world_size: int, *_: Any, **__: Any) -> Any:
        if world_size > 1:
            raise SimulationError(
                f"{current_place(stand_ins.script) or 'the script'} joins a group of {world_size} processes, and there "
                f"is one.\nSay how many GPUs it has: trainatomy run --gpus {world_size} …"
            )
        return torch.distributed.HashStore()  # type: ignore[attr-defined]

    stand_ins.put(rendezvous, "_create_c10d_store", store)


class _Ended:
    """The context of processes that have ended."""

    processes: tuple[Any, ...] = ()

    def join(self, *_: Any, **__: Any) -> bool:
        """Return True."""
        return True

    def pids(self) -> list[int]:
        """Return no numbers."""
        return []


def install(stand_ins: StandIns) -> None:
    """Put them in place."""
    policy = commands.install(stand_ins)
    pools.install(stand_ins, policy.refuse)
    install_ranks(stand_ins, policy)
    stand_ins.repeat = policy.repeat
    _install_questions(stand_ins)
    stand_ins.put(os, "_exit", lambda status: sys.exit(status))  # the bill is still to be written
    _install_extensions(stand_ins)
    _install_trials(stand_ins)
    _install_names(stand_ins)


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


def _at(stand_ins: StandIns) -> str:
    return current_place(stand_ins.script) or "the script"


def _install_trials(stand_ins: StandIns) -> None:
    """Let a connection that is only tried return that it is refused, which the guard raises."""
    connect = socket.socket.connect_ex

    def tried(self: socket.socket, address: Any) -> int:
        try:
            return connect(self, address)
        except ConnectionRefusedError:
            return errno.ECONNREFUSED

    stand_ins.put(socket.socket, "connect_ex", tried)


def _install_names(stand_ins: StandIns) -> None:
    """Let this machine's own name mean this machine, as scripts ask that set ``MASTER_ADDR``; no server is asked."""
    own = socket.gethostname()

    def local(original: Callable[..., Any]) -> Callable[..., Any]:
        return lambda host, *rest, **more: original("localhost" if host == own else host, *rest, **more)

    for name in ("gethostbyname", "gethostbyname_ex", "getaddrinfo"):
        stand_ins.put(socket, name, local(getattr(socket, name)))


def _install_extensions(stand_ins: StandIns) -> None:
    """Refuse to compile C++ and CUDA code."""

    def load(name: str = "", *_: Any, **__: Any) -> Any:
        raise SimulationError(
            f"{_at(stand_ins)} compiles an extension of its own ({name}), whose kernels cannot run without a GPU.\n"
            "Replace it by PyTorch's operators for the dry run, or measure the script: trainatomy run --measure"
        )

    stand_ins.put(cpp_extension, "load", load)
    stand_ins.put(cpp_extension, "load_inline", load)
