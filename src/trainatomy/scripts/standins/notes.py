"""Put stand-ins in place, and keep the list of those that were used.

Files with tensors that a script saves: the copies that the host holds meanwhile, and their sizes on disk.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, NoReturn
from unittest import mock

import torch

from trainatomy.alike import alike
from trainatomy.errors import SimulationError
from trainatomy.libraries import version_of
from trainatomy.results.script import StandIn, StandInKind
from trainatomy.scripts.files import RedirectedFiles
from trainatomy.scripts.imports import ImportHook
from trainatomy.scripts.job import current_place
from trainatomy.simulator.process import SimulatedProcess
from trainatomy.simulator.storages import Storages, storage_of


class SavedFiles:
    """The files of a script.

    Attributes:
        host_bytes: Most that is copied to host memory at once to save a file.
    """

    def __init__(self, storages: Storages) -> None:
        self._storages = storages
        self._sizes: dict[str, int] = {}
        self.host_bytes = 0

    @property
    def disk_bytes(self) -> int:
        """Bytes of all files."""
        return sum(self._sizes.values())

    def save(self, file: Any, values: Iterable[Any], *, at_once: bool) -> None:
        """Note a file, which takes the place of an earlier one of its name.

        Args:
            file: Its path, or that of a folder with the files of a model.
            values: What is in it, tensors among others.
            at_once: Whether all tensors are copied before the first is written (safetensors 0.8,
                ``_flatten_as_ptr``), or one storage after the other (``torch.save``).
        """
        with torch._C.DisableTorchFunction():
            tensors = [one for one in values if isinstance(one, torch.Tensor) and one.layout == torch.strided]
            storages = {storage_of(one)._cdata: storage_of(one).nbytes() for one in tensors}
            copied = {
                storage_of(one)._cdata: storage_of(one).nbytes()
                for one in tensors
                if one.is_meta and self._storages.on_device(one)
            }
        if storages:
            self._sizes[os.path.realpath(os.fspath(file))] = sum(storages.values())
        most = sum(copied.values()) if at_once else max(copied.values(), default=0)
        self.host_bytes = max(self.host_bytes, most)


ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""Environment variables with the settings of PyTorch's allocator."""


def once_called(function: Callable[..., Any], note: Callable[[], None]) -> Callable[..., Any]:
    """Return a function that notes its first call: libraries compile many that a training never calls."""
    is_noted = False

    @functools.wraps(function)
    def call(*arguments: Any, **options: Any) -> Any:
        nonlocal is_noted
        if not is_noted:
            is_noted = True
            note()
        return function(*arguments, **options)

    return call


@dataclass
class StandIns:
    """The stand-ins of one dry run.

    Attributes:
        process: The simulated process.
        files: Files that the script writes.
        stack: Undoes the patches.
        imports: Says when a library is imported.
        script: File name of the script, whose lines are named first.
        command: The script with its arguments, as it was typed after its launcher; empty for a block of code.
        network: True if the script may use the network.
        samples: Rows of synthetic data sets.
        lengths: Words of synthetic texts.
        data: A local file that takes the place of data sets of a hub.
        is_training: Tells whether a model of the script was called.
        draws: False while weights are read from a file: a run draws none for them.
        is_over: True once the run has ended.
        saved: Files with tensors that the script saves.
        repeat: Runs the script again as one of so many ranks on so many machines.
        used: How often each was used.
    """

    process: SimulatedProcess
    files: RedirectedFiles
    stack: ExitStack
    imports: ImportHook
    script: str = ""
    command: tuple[str, ...] = ()
    network: bool = False
    samples: int = 512
    lengths: int = 256
    data: str | None = None
    is_training: Callable[[], bool] = lambda: False
    draws: bool = True
    is_over: bool = False
    repeat: Callable[[int, int], NoReturn] = field(init=False)
    saved: SavedFiles = field(init=False)
    used: Counter[tuple[StandInKind, str]] = field(default_factory=Counter)
    places: dict[tuple[StandInKind, str], str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.repeat, self.saved = self._refuse_ranks, SavedFiles(self.process.storages)

    def _refuse_ranks(self, gpus: int, nodes: int) -> NoReturn:
        raise SimulationError(
            f"{current_place(self.script) or 'the script'} asks for {gpus} GPUs, and this machine has "
            f"{self.process.current.count}: say so, trainatomy run --gpus {gpus}"
        )

    def put(self, owner: Any, name: str, value: Any) -> None:
        """Replace an attribute of a module or class until the run ends; a function keeps the original's signature.

        A module that has imported a function by its name keeps the stand-in after the run, which then calls what is in
        its place.
        """
        placed = value
        if isinstance(owner, ModuleType):
            current = None if inspect.isclass(value) else lambda: getattr(owner, name) if self.is_over else value
            placed = alike(getattr(owner, name), value, current)
        elif inspect.isclass(owner):
            placed = alike(inspect.getattr_static(owner, name), value)
        self.stack.enter_context(mock.patch.object(owner, name, placed))

    def when(self, modules: str | tuple[str, ...], put: Callable[..., None]) -> None:
        """Call ``put`` with modules once all of them are imported: now, or while the script runs.

        Raises:
            SimulationError: A module has not what is to be replaced.
        """
        names = (modules,) if isinstance(modules, str) else modules

        def call() -> None:
            try:
                put(*(sys.modules[name] for name in names))
            except (AttributeError, ImportError, KeyError) as error:
                library = names[0].partition(".")[0]
                raise SimulationError(
                    f"{library} {version_of(library) or ''} is not a release that dry runs know: {error}.\n"
                    f"Install the newest one (pip install --upgrade {library})"
                ) from error

        self.imports.when(names, call)

    def note(self, kind: StandInKind, name: str = "") -> None:
        """Note that a stand-in was used, with the script's line at its first use."""
        key = (kind, name)
        if key not in self.used:
            self.places[key] = current_place(self.script)
        self.used[key] += 1

    def listed(self) -> tuple[StandIn, ...]:
        """Return the stand-ins that were used, in order of their first use."""
        return tuple(StandIn(kind, name, self.places[kind, name], times) for (kind, name), times in self.used.items())
