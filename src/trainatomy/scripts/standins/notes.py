"""Put stand-ins in place, and keep the list of those that were used."""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

from trainatomy.results.script import StandIn, StandInKind
from trainatomy.scripts.files import RedirectedFiles
from trainatomy.scripts.places import current_place
from trainatomy.simulator.process import SimulatedProcess

ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""Environment variables with the settings of PyTorch's allocator."""


@dataclass
class StandIns:
    """The stand-ins of one dry run.

    Attributes:
        process: The simulated process.
        files: Files that the script writes.
        stack: Undoes the patches.
        script: File name of the script, whose lines are named first.
        network: True if the script may use the network.
        samples: Rows of synthetic data sets.
        lengths: Words of synthetic texts.
        data: A local file that takes the place of data sets of a hub.
        draws: False while weights are read from a file: a run draws none for them.
        used: How often each was used.
    """

    process: SimulatedProcess
    files: RedirectedFiles
    stack: ExitStack
    script: str = ""
    network: bool = False
    samples: int = 512
    lengths: int = 256
    data: str | None = None
    draws: bool = True
    used: Counter[tuple[StandInKind, str]] = field(default_factory=Counter)
    places: dict[tuple[StandInKind, str], str] = field(default_factory=dict)

    def put(self, owner: Any, name: str, value: Any) -> None:
        """Replace an attribute of a module or class until the run ends."""
        self.stack.enter_context(mock.patch.object(owner, name, value))

    def note(self, kind: StandInKind, name: str = "") -> None:
        """Note that a stand-in was used, with the script's line at its first use."""
        key = (kind, name)
        if key not in self.used:
            self.places[key] = current_place(self.script)
        self.used[key] += 1

    def listed(self) -> tuple[StandIn, ...]:
        """Return the stand-ins that were used, in order of their first use."""
        return tuple(StandIn(kind, name, self.places[kind, name], times) for (kind, name), times in self.used.items())
