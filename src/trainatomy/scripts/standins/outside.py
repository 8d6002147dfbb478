"""What lies outside a dry run: other processes, the user, the network, compilers of extensions, Triton's kernels."""

from __future__ import annotations

import builtins
import errno
import getpass
import io
import os
import socket
import sys
from collections.abc import Callable
from typing import Any, NoReturn

from torch.utils import cpp_extension

from trainatomy.errors import SimulationError
from trainatomy.scripts.job import current_place
from trainatomy.scripts.standins import commands, pools, ranks
from trainatomy.scripts.standins.notes import StandIns


def install(stand_ins: StandIns) -> None:
    """Put them in place."""
    policy = commands.install(stand_ins)
    pools.install(stand_ins, policy.refuse)
    ranks.install(stand_ins, policy)
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
