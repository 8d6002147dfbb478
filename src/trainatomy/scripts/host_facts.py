"""What decides about the host's bill of a script: what it imports, loads, keeps and saves in a dry run."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from trainatomy.catalog.host import CudaFootprint, Footprint, imported_footprint, launcher_footprint
from trainatomy.prediction.host_facts import HostFacts
from trainatomy.results.host import NOTHING_KEPT, HostPhaseName, KeptOnHost
from trainatomy.simulator.simulation import HostUse

if TYPE_CHECKING:
    from trainatomy.results.script import ScriptRun
    from trainatomy.scripts.session import Session

_STATM = "/proc/self/statm"
_PAGE = os.sysconf("SC_PAGE_SIZE")


class ImportGrowth:
    """How much this process grows while it imports each top-level package, without those that it imports in turn.

    Attributes:
        packages: The growth by the name of the package.
    """

    def __init__(self) -> None:
        self.packages: dict[str, Footprint] = {}
        self._nested: list[Footprint] = []
        try:
            self._file = os.open(_STATM, os.O_RDONLY)
        except OSError:  # another system than Linux
            self._file = -1

    @contextmanager
    def following(self) -> Iterator[None]:
        """Let go of the process's figures after the block."""
        try:
            yield
        finally:
            if self._file >= 0:
                os.close(self._file)
            self._file = -1

    @contextmanager
    def around(self, package: str) -> Iterator[None]:
        """Measure the import of a package in the block."""
        before = self._now()
        self._nested.append(Footprint(0, 0))
        try:
            yield
        finally:
            now, nested = self._now(), self._nested.pop()
            grown = Footprint(*(max(after - begin, 0) for after, begin in zip(now, before, strict=True)))
            if self._nested:
                self._nested[-1] = self._nested[-1].plus(grown)
            own = (max(all_ - inner, 0) for all_, inner in zip(grown, nested, strict=True))
            self.packages[package] = Footprint(*own)

    def _now(self) -> Footprint:
        """Return the resident memory: anonymous, and mapped files."""
        if self._file < 0:
            return Footprint(0, 0)
        _, resident, shared, *_ = os.pread(self._file, 200, 0).split()
        return Footprint((int(resident) - int(shared)) * _PAGE, int(shared) * _PAGE)


def host_facts_of(session: Session, run: ScriptRun, dataset: int, room: int) -> HostFacts:
    """Return what decides about the bill of a script.

    Args:
        session: Its dry run, which is over.
        run: What was seen of it.
        dataset: Bytes of a data set in Python's memory.
        room: Memory that it leaves of its GPU besides paged states.
    """
    host, loader, saved = session.process.storages.host_memory, session.loaders.training, session.stand_ins.saved
    topology = session.settings.topology
    evaluation = next((task for task in run.tasks if task.kind == "evaluation" and task.executed_after), None)
    kept: dict[HostPhaseName, KeptOnHost] = {"loading": NOTHING_KEPT, "training": NOTHING_KEPT}
    kept.update(host.kept)
    gathered = 0
    if evaluation is not None and evaluation.of and evaluation.batches:
        left_out = max(evaluation.of / evaluation.batches - 1, 0)
        in_evaluation = kept.get("evaluation", kept["training"]).anonymous
        gathered = round(left_out * max(in_evaluation - kept["training"].anonymous, 0))
    use = HostUse(
        weights=0,
        stored=0,
        is_built=True,
        batch=loader.batch,
        pinned=host.pinned,
        pageable=host.pageable,
        kept=kept,
        gathered=gathered,
        paged=host.paged,
        on_drive=host.on_drive,
    )
    return HostFacts(
        libraries=imported_footprint(set(sys.modules), session.import_growth.packages),
        cuda=CudaFootprint.known(),
        processes=topology.gpus_per_node,
        use=use,
        workers=loader.workers,
        prefetch=loader.prefetch,
        pins=loader.pins,
        evaluates=evaluation is not None,
        dataset=dataset,
        saved=saved.host_bytes,
        checkpoint=saved.disk_bytes,
        missing=max(host.paged - max(room, 0), 0),
        launcher=launcher_footprint() if topology.gpus_per_node > 1 else None,
    )
