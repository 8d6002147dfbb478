"""DataLoaders that stay in this process, and what they would take of the host with their workers.

A framework makes loaders of its own from a script's (accelerate, Lightning), with the settings that they find there: a
loader that asks for no workers gets those that another one asked for with the same data set.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils.data import DataLoader

from trainatomy.prediction.host_facts import DEFAULT_PREFETCH
from trainatomy.scripts.longest import batch_tensors, fetches_followed
from trainatomy.scripts.standins.notes import StandIns

_IN_ANOTHER_PROCESS: dict[str, Any] = {
    "num_workers": 0,
    "persistent_workers": False,
    "pin_memory": False,
    "prefetch_factor": None,
    "multiprocessing_context": None,
    "timeout": 0,
    "worker_init_fn": None,
}
"""Settings of a loader that start processes or threads, with the values that do not; none changes GPU memory."""


@dataclass(frozen=True, slots=True)
class LoaderUse:
    """What a DataLoader asks of the host.

    Attributes:
        workers: Its worker processes.
        prefetch: Batches that each of them makes ahead.
        pins: Whether batches are copied to pinned memory.
        batch: Bytes of the tensors of a batch.
    """

    workers: int = 0
    prefetch: int = DEFAULT_PREFETCH
    pins: bool = False
    batch: tuple[int, ...] = ()

    @property
    def held_bytes(self) -> int:
        """What the batches take that exist at once."""
        return (self.workers * self.prefetch + 1) * sum(self.batch)


class Loaders:
    """The loaders of a script.

    Attributes:
        training: The one that takes most of the host, of those that are read while the training evaluates nothing.
    """

    def __init__(self, stand_ins: StandIns) -> None:
        self._recorder = stand_ins.process.recorder
        self._asked: dict[int, LoaderUse] = {}
        self.training = LoaderUse()
        stand_ins.put(DataLoader, "__init__", self._made_alone(DataLoader.__init__))
        stand_ins.stack.enter_context(fetches_followed(self._around_fetch))

    def _made_alone(self, original: Any) -> Any:
        """Return ``DataLoader.__init__`` without workers and without pinned memory."""
        signature = inspect.signature(original)

        def make(loader: Any, *arguments: Any, **keywords: Any) -> None:
            bound = signature.bind(loader, *arguments, **keywords)
            given = bound.arguments
            asked = LoaderUse(
                int(given.get("num_workers", 0)),
                given.get("prefetch_factor") or DEFAULT_PREFETCH,
                bool(given.get("pin_memory", False)),
            )
            for name, value in _IN_ANOTHER_PROCESS.items():
                if name in given:
                    given[name] = value
            original(*bound.args, **bound.kwargs)
            if asked.workers or asked.pins or id(loader.dataset) not in self._asked:
                self._asked[id(loader.dataset)] = asked

        return make

    def _around_fetch(self, original: Any, fetcher: Any, index: Any) -> Any:
        batch = original(fetcher, index)
        asked = self._asked.get(id(fetcher.dataset))
        if asked is not None and self._recorder.stage != "evaluation":
            with torch._C.DisableTorchFunction():
                found = replace(asked, batch=tuple(int(one.nbytes) for one in batch_tensors(batch)))
            if found.held_bytes >= self.training.held_bytes:
                self.training = found
        return batch
