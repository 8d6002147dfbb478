"""What a dry run refuses: other processes, questions to the user, the network; and kernels that are not run."""

from __future__ import annotations

import builtins
import multiprocessing.process
import os
import socket
import sys
from typing import Any

import torch

from trainatomy.errors import SimulationError
from trainatomy.scripts.places import current_place
from trainatomy.scripts.standins.notes import StandIns

_LOCAL = ("localhost", "127.0.0.1", "::1", "")


def install(stand_ins: StandIns) -> None:
    """Put them in place."""

    def start(*_: Any, **__: Any) -> Any:
        raise SimulationError(
            f"{_at(stand_ins)} starts another process, and a dry run follows one.\n"
            "Run the script as one process (without --multiprocessing-distributed, mp.spawn or the like); "
            "`trainatomy run torchrun --nproc-per-node N …` simulates one rank of several"
        )

    def ask(prompt: object = "") -> str:
        raise SimulationError(
            f"{_at(stand_ins)} asks for input ({str(prompt).strip() or 'no prompt'}), and nobody answers in a dry "
            "run.\nPass the answer as an argument of the script"
        )

    stand_ins.put(multiprocessing.process.BaseProcess, "start", start)
    stand_ins.put(os, "fork", start)
    stand_ins.put(builtins, "input", ask)
    _install_extensions(stand_ins)
    if not stand_ins.network:
        _install_network(stand_ins)
    _install_kernels(stand_ins)
    if stand_ins.process.topology.has_group:
        _install_group(stand_ins)


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
    """Let Triton's kernels do nothing, and compiled models run eagerly."""
    if "triton.runtime.jit" in sys.modules:
        from trainatomy.simulator.triton import simulated_triton

        stand_ins.stack.enter_context(simulated_triton())

    def compiled(model: Any = None, **options: Any) -> Any:
        stand_ins.note("compiled", type(model).__name__ if isinstance(model, torch.nn.Module) else "a function")
        return (lambda function: function) if model is None else model

    def compiled_in_place(module: Any, *_: Any, **__: Any) -> None:
        stand_ins.note("compiled", type(module).__name__)

    stand_ins.put(torch, "compile", compiled)
    stand_ins.put(torch.nn.Module, "compile", compiled_in_place)


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
