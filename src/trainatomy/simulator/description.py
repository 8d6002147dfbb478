"""The description of an executed model: its parameters, layers, experts, and sentences for the reader.

What an execution takes of the host's memory besides the process itself (``prediction/host.py`` makes the bill).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from trainatomy.results.host import NOTHING_KEPT
from trainatomy.results.tasks import Experts
from trainatomy.simulator.experts import experts_of
from trainatomy.simulator.notes import Note, notes_on
from trainatomy.simulator.process import SimulatedProcess
from trainatomy.simulator.simulation import HostUse
from trainatomy.training.batch import batch_bytes
from trainatomy.training.model import model_notes, stored_share, unwrap, weights_dtype
from trainatomy.training.quantization import parameter_count
from trainatomy.training.shape import tokens_per_sample
from trainatomy.training.stored_weights import quantization_name, stored_quantization
from trainatomy.workload.schema import Workload


@dataclass(frozen=True, slots=True)
class Description:
    """Facts of a simulation about the model and the workload."""

    parameters: int
    trainable_parameters: int
    libraries: frozenset[str]
    notes: tuple[Note, ...]
    tokens_per_sample: int | None
    weights_dtype: str
    layers: int
    experts: Experts | None
    model: str
    attention: str | None
    stored_quantization: str | None


def describe(workload: Workload, model: nn.Module) -> Description:
    """Describe a model, and the workload that trains it."""
    counts = [(parameter_count(parameter), parameter.requires_grad) for parameter in model.parameters()]
    tokens, batch = tokens_per_sample(workload, model), workload.train.per_device_train_batch_size
    return Description(
        parameters=sum(count for count, _ in counts),
        trainable_parameters=sum(count for count, trained in counts if trained),
        libraries=frozenset({"kernels", "training"} if workload.mode == "training" else {"kernels"}),
        notes=(*model_notes(model), *workload.train.notes(), *notes_on(workload, model)),
        tokens_per_sample=tokens,
        weights_dtype=str(weights_dtype(workload, model)).removeprefix("torch."),
        layers=_layers(workload, model),
        experts=experts_of(model, None if tokens is None else tokens * batch),
        model=type(unwrap(model)).__name__,
        attention=attention_of(model),
        stored_quantization=quantization_name(stored_quantization(unwrap(model))),
    )


def attention_of(model: nn.Module) -> str | None:
    """Return transformers' name of the attention of a model; None for one that has none, or is not transformers'."""
    config: Any = getattr(unwrap(model), "config", None)
    parts = (config, getattr(config, "text_config", None), getattr(config, "decoder", None))
    has_heads = any(getattr(part, "num_attention_heads", None) for part in parts)
    name = getattr(config, "_attn_implementation", None)
    return name if has_heads and isinstance(name, str) else None


def _layers(workload: Workload, model: nn.Module) -> int:
    """Return the number of layers that a pipeline divides; 0 without one."""
    if workload.parallel.pp_size == 1:
        return 0
    from trainatomy.training.parallel.pipeline import layers_in

    return len(layers_in(model))


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
