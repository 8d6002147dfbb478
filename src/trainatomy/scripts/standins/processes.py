"""Refuse questions to the user, the network and extensions in a dry run; leave out kernels."""

from __future__ import annotations

import builtins
import errno
import getpass
import io
import socket
import sys
from importlib import import_module
from typing import Any, NoReturn

import torch

from trainatomy.errors import SimulationError
from trainatomy.scripts.places import current_place
from trainatomy.scripts.standins import commands, pools, ranks
from trainatomy.scripts.standins.notes import StandIns

_LOCAL = ("localhost", "127.0.0.1", "::1", "")


def install(stand_ins: StandIns) -> None:
    """Put them in place."""
    policy = commands.install(stand_ins)
    pools.install(stand_ins, policy.refuse)
    ranks.install(stand_ins, policy)
    stand_ins.repeat = policy.repeat
    _install_questions(stand_ins)
    _install_extensions(stand_ins)
    if not stand_ins.network:
        _install_network(stand_ins)
    _install_kernels(stand_ins)
    if stand_ins.process.topology.has_group:
        _install_group(stand_ins)
    else:
        _install_own_group(stand_ins)


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


def _install_own_group(stand_ins: StandIns) -> None:
    """Let a group of one process need no connection; one of several has no others here, for which it would wait."""
    if not torch.distributed.is_available():
        return
    rendezvous: Any = import_module("torch.distributed.rendezvous")
    distributed: Any = torch.distributed

    def store(host: str, port: int, rank: int, world_size: int, *_: Any, **__: Any) -> Any:
        if world_size > 1:
            raise SimulationError(
                f"{_at(stand_ins)} joins a group of {world_size} processes, and there is one.\n"
                f"Say how many GPUs it has: trainatomy run --gpus {world_size} …"
            )
        return distributed.HashStore()

    stand_ins.put(rendezvous, "_create_c10d_store", store)


def _at(stand_ins: StandIns) -> str:
    return current_place(stand_ins.script) or "the script"


def _install_network(stand_ins: StandIns) -> None:
    """Let every connection fail at once, as the kernel would (``wall``)."""
    resolve = socket.getaddrinfo

    def refuse(host: object) -> OSError:
        return ConnectionRefusedError(f"the network is off in a dry run ({host}); switch it on with --network")

    def connecting(original: Any) -> Any:
        def connected(self: socket.socket, *rest: Any) -> Any:
            address = rest[-1]  # of ``sendto``, too
            if self.family != socket.AF_UNIX:  # nor to this machine: the kernel knows only ports
                raise refuse(address[0])
            return original(self, *rest)

        return connected

    def resolved(host: Any, *rest: Any, **more: Any) -> Any:
        if host is not None and str(host) not in _LOCAL:
            raise refuse(host)
        return resolve(host, *rest, **more)

    try_to_connect = socket.socket.connect_ex

    def tried(self: socket.socket, address: Any) -> int:
        return try_to_connect(self, address) if self.family == socket.AF_UNIX else errno.ECONNREFUSED

    for name in ("connect", "sendto"):
        stand_ins.put(socket.socket, name, connecting(getattr(socket.socket, name)))
    stand_ins.put(socket.socket, "connect_ex", tried)
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
