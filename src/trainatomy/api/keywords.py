"""A workload as the keywords of the library's functions change it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from trainatomy.errors import WorkloadError
from trainatomy.workload.arguments import path_of
from trainatomy.workload.schema import Workload

if TYPE_CHECKING:
    import torch

    from trainatomy.training.batch import MakeBatch

Batch = Mapping[str, Any] | Callable[[int], Mapping[str, Any]]

_SECTIONS = frozenset(Workload.model_fields) - {"train"}


def check_keywords(batch: Any, optimizer: Any) -> None:
    """Raise ``WorkloadError`` if a batch or an optimizer has the wrong type; names need no torch."""
    if batch is not None or not isinstance(optimizer, str | None):
        from trainatomy.simulator import live

        live.check_keywords(batch, optimizer)


def changed(
    workload: Workload,
    optimizer: str | type[torch.optim.Optimizer] | Callable[[Any], Any] | None,
    gpu: str | None,
    settings: Mapping[str, Any],
) -> Workload:
    """Return the workload with keywords applied: settings of ``train``, and sections by their name."""
    changes: dict[str, Any] = {}
    for name, value in settings.items():
        if name not in _SECTIONS:
            changes[f"train.{name}"] = value
        elif isinstance(value, Mapping):
            changes |= {f"{name}.{key}": inner for key, inner in value.items()}
        else:
            changes[name] = value
    if gpu is not None:
        changes["gpu"] = gpu
    if optimizer is not None:
        changes["train.optim"] = optimizer if isinstance(optimizer, str) else path_of(optimizer)
    return workload.replace(changes) if changes else workload


def with_settings(workload: Workload, settings: Mapping[str, Any], gpu: str | None = None) -> Workload:
    """Return the workload with keywords applied, ``optimizer`` among them; a batch is refused."""
    check_keywords(None, settings.get("optimizer"))
    if "batch" in settings:
        raise WorkloadError("batch: only predict takes one; name data.factory in the workload", key="data")
    rest = {name: value for name, value in settings.items() if name != "optimizer"}
    return changed(workload, settings.get("optimizer"), gpu, rest)


def with_batch(
    workload: Workload, batch: Batch | None, settings: Mapping[str, Any]
) -> tuple[Workload, MakeBatch | None]:
    """Return the workload for an explicit batch, and the function that makes it; the batch replaces ``data``."""
    if batch is None:
        return workload, None
    from trainatomy.simulator.live import batches_of

    make_batch, size = batches_of(batch)
    is_eval = workload.mode != "training" and workload.train.per_device_eval_batch_size is not None
    name = "per_device_eval_batch_size" if is_eval else "per_device_train_batch_size"
    if size is not None and settings.get(name, size) != size:
        raise WorkloadError(f"{name}={settings[name]}, but the batch holds {size} samples", key=f"train.{name}")
    changes: dict[str, Any] = {"data": {}}
    if size is not None:
        changes[f"train.{name}"] = size
    return workload.replace(changes), make_batch
