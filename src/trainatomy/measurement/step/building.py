"""Build the model of a training that is measured, quickly: random numbers are drawn once, and processes share it.

PyTorch draws random numbers on the CPU one after the other: a minute for a model of one billion weights.  Neither
memory nor time of a step depends on which numbers they are.

A server builds the model before it forks the processes of a task, which share its memory until they move it to the GPU;
the next task finds it built.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

from trainatomy.measurement.process.job import Job
from trainatomy.training.model import build_model
from trainatomy.workload.schema import Workload

DRAWN = 1 << 20
"""Numbers that are drawn for a tensor; a larger one repeats them."""
_METHODS = ("normal_", "uniform_")
_NOT_OF_THE_MODEL = ("name", "gpu", "allocator", "steps", "parallel")
_NOT_OF_THE_MODEL_IN_TRAIN = (
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "gradient_checkpointing",
    "gradient_checkpointing_every",
    "gradient_checkpointing_kwargs",
    "optim",
)


@contextmanager
def repeated_random_values() -> Iterator[None]:
    """Make ``normal_`` and ``uniform_`` draw ``DRAWN`` numbers for larger tensors in host memory, and repeat them."""
    for name in _METHODS:
        setattr(torch.Tensor, name, _repeating(getattr(torch.Tensor, name)))
    try:
        yield
    finally:
        for name in _METHODS:
            delattr(torch.Tensor, name)  # torch.Tensor inherits both from torch._C.TensorBase


def _repeating(draw: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    known: dict[tuple[Any, ...], torch.Tensor] = {}

    def fill(self: torch.Tensor, *args: Any, **keywords: Any) -> torch.Tensor:
        if self.device.type != "cpu" or self.numel() <= DRAWN or not self.is_contiguous():
            return draw(self, *args, **keywords)
        key = (self.dtype, args, tuple(sorted(keywords.items())))
        if key not in known:
            known[key] = draw(torch.empty(DRAWN, dtype=self.dtype), *args, **keywords)
        drawn, flat = known[key], self.view(-1)
        whole = self.numel() // DRAWN * DRAWN
        flat[:whole].view(-1, DRAWN).copy_(drawn)
        flat[whole:].copy_(drawn[: self.numel() - whole])
        return self

    return fill


class _Built(NamedTuple):
    """A model, what it was built from, and the state of PyTorch's generator after that."""

    key: str
    model: nn.Module
    random_state: torch.Tensor


_built: list[_Built] = []
"""The model that was built last in this process, or in the one that it was forked from."""


def build_beforehand(arguments: Mapping[str, Any]) -> None:
    """Build the model of a job (``job``: its line of JSON) for the processes that are forked from this one.

    Code of the user's, and of peft and quantising libraries, which may initialise CUDA, runs in those only.
    """
    workload = Workload.from_mapping(Job.from_json(arguments["job"]).workload)
    spec, key = workload.model, _key(workload)
    if spec.factory or workload.data.factory or spec.has_adapters or spec.is_quantised:
        return
    if not _built or _built[0].key != key:
        _built.clear()  # first, as both may not fit in host memory
        torch.default_generator.manual_seed(workload.train.seed)
        model = _build(workload)
        _built.append(_Built(key, model, torch.get_rng_state()))


def built_model(workload: Workload) -> nn.Module:
    """Return the model of ``workload`` on the CPU: the one that was built beforehand, or a new one."""
    torch.manual_seed(workload.train.seed)
    beforehand = _built.pop() if _built else None
    if beforehand is None or beforehand.key != _key(workload):
        return _build(workload)
    torch.set_rng_state(beforehand.random_state)
    return beforehand.model


def _build(workload: Workload) -> nn.Module:
    with repeated_random_values():
        return build_model(workload)


def _key(workload: Workload) -> str:
    """Return what is equal for workloads that have the same model before their first step."""
    mapping = workload.to_mapping()
    train = {key: value for key, value in mapping.get("train", {}).items() if key not in _NOT_OF_THE_MODEL_IN_TRAIN}
    kept = {key: value for key, value in mapping.items() if key not in _NOT_OF_THE_MODEL}
    return repr(sorted({**kept, "train": sorted(train.items())}.items()))
