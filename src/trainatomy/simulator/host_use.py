"""What an execution takes of the host's memory besides the process itself (``prediction/host.py`` makes the bill)."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from trainatomy.results.prediction import copies_of_weights
from trainatomy.simulator.process import SimulatedProcess
from trainatomy.simulator.simulation import HostUse
from trainatomy.training.batch import batch_bytes
from trainatomy.training.model import stored_share
from trainatomy.workload.schema import Workload


def host_use(workload: Workload, model: nn.Module, *, is_built: bool) -> HostUse:
    """Return what a process's host memory holds of a model before it is moved, and what FSDP leaves there."""
    tensors = [*model.parameters(), *model.buffers()]
    train, parallel = workload.train, workload.parallel
    offloads = parallel.offload_policy == "cpu" or bool((train.fsdp_config or {}).get("cpu_offload"))
    ranks = copies_of_weights(parallel.data_parallel_size, parallel.dp_replicate_size, parallel.dp_shard_size)
    shards = parallel.data_parallel_size // ranks if offloads else 1
    weights = sum(int(tensor.nbytes) for tensor in tensors)
    return HostUse(
        weights=weights,
        stored=round(weights * stored_share(model)),
        is_built=is_built or workload.model.factory is not None,
        shards=tuple(_shard_bytes(each, shards) for each in model.parameters()) if offloads else (),
    )


def _shard_bytes(parameter: nn.Parameter, shards: int) -> int:
    """Return the bytes of the first rank's shard: FSDP2 divides the first dimension, rounding up."""
    rows = parameter.shape[0] if parameter.dim() else 1
    return int(parameter.nbytes) // max(rows, 1) * -(-rows // shards)


def with_execution(host: HostUse, process: SimulatedProcess, model: nn.Module) -> HostUse:
    """Add what executing the steps found."""
    found, arrays = process.storages.host_memory, process.recorder.gathered
    pinned, pageable = found.pinned, found.pageable
    return replace(host, batch=batch_bytes(model), pinned=pinned, pageable=pageable, gathered=arrays.most)
