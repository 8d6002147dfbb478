"""What an execution takes of the host's memory besides the process itself (``prediction/host.py`` makes the bill)."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from trainatomy.results.host import NOTHING_KEPT
from trainatomy.simulator.process import SimulatedProcess
from trainatomy.simulator.simulation import HostUse
from trainatomy.training.batch import batch_bytes
from trainatomy.training.model import stored_share
from trainatomy.workload.schema import Workload


def host_use(workload: Workload, model: nn.Module, *, is_built: bool) -> HostUse:
    """Return what a process's host memory holds of a model before it is moved."""
    weights = sum(int(tensor.nbytes) for tensor in [*model.parameters(), *model.buffers()])
    return HostUse(
        weights=weights,
        stored=round(weights * stored_share(model)),
        is_built=is_built or workload.model.factory is not None,
    )


def with_execution(host: HostUse, process: SimulatedProcess, model: nn.Module) -> HostUse:
    """Add what executing the steps found.

    What is kept is that of the steps in all phases: what an evaluation, saving and loading take is known by itself.
    """
    found = process.storages.host_memory
    return replace(
        host,
        batch=batch_bytes(model),
        pinned=found.pinned,
        pageable=found.pageable,
        kept={"training": found.kept.get("training", NOTHING_KEPT)},
        gathered=process.recorder.gathered.most,
        paged=found.paged,
        on_drive=found.on_drive,
    )
