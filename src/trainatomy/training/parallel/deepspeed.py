"""DeepSpeed's engine under the Trainer: import it, follow its steps, and find the tensors that it holds."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial, wraps
from importlib import import_module
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch

from trainatomy.errors import WorkloadError
from trainatomy.libraries import import_library, version_of
from trainatomy.training.stored_weights import numbers

if TYPE_CHECKING:
    from trainatomy.training.observer import Observer

OLDEST = (0, 16, 4)
"""Oldest release of DeepSpeed whose engine is run."""

_IMPORTED_LATE = (
    "deepspeed.runtime.zero.muon.original_muon",
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "deepspeed.runtime.zero.stage3",
    "deepspeed.runtime.zero.stage_1_and_2",
)
"""Modules that the engine imports in a training; they import PyTorch's compiler, which looks for a GPU then."""
LAST = -1
"""Number of the last micro-batch of a step, for observers."""

_MASTER_WEIGHTS = (
    "single_partition_of_fp32_groups",  # runtime/zero/stage_1_and_2.py
    "fp32_partitioned_groups_flat",  # runtime/zero/stage3.py
    "fp32_groups_flat_partition",  # runtime/bf16_optimizer.py
    "fp32_groups_flat",  # runtime/fp16/fused_optimizer.py
    "fp32_groups",  # runtime/fp16/unfused_optimizer.py
)
_GRADIENTS = ("averaged_gradients", "all_grad_tensors", "grad_partitions_flat_buffer", "fp32_groups_gradients_flat")
"""Attributes of DeepSpeed's optimizers by what they hold, 0.16-0.19."""


def import_deepspeed() -> Any:
    """Import DeepSpeed for GPUs, on a machine without one too.

    Raises:
        MissingLibrary: It is not installed.
        WorkloadError: It is too old.
    """
    # DeepSpeed chooses the kind of device once, when it is imported.
    chosen = os.environ.get("DS_ACCELERATOR", "cuda")
    late = mock.patch.object(torch, "compile", partial(_compiled_late, torch.compile))
    with mock.patch.dict(os.environ, {"DS_ACCELERATOR": chosen, "DS_BUILD_OPS": "0"}), late:
        library = import_library("deepspeed", "train.deepspeed", install='"trainatomy[deepspeed]"')
        for module in _IMPORTED_LATE:
            with suppress(ImportError):  # older releases do not have them
                import_module(module)
    version = version_of("deepspeed") or "0"
    if tuple(int(part) for part in version.split("+")[0].split(".")[:3] if part.isdigit()) < OLDEST:
        wanted = ".".join(map(str, OLDEST))
        raise WorkloadError(
            f"train.deepspeed: DeepSpeed {version} is installed; {wanted} or later is run: pip install -U deepspeed",
            key="train.deepspeed",
        )
    return library


def _compiled_late(compiler: Callable[..., Any], function: Callable[..., Any] | None = None, **options: Any) -> Any:
    """Do as ``torch.compile``, but import the compiler, which takes seconds, when the function is first called.

    DeepSpeed compiles functions of one optimizer, Muon, as soon as it is imported.
    """
    if function is None:
        return partial(_compiled_late, compiler, **options)
    compiled: list[Callable[..., Any]] = []

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not compiled:
            compiled.append(compiler(function, **options))
        return compiled[0](*args, **kwargs)

    return call


def part_of(parameter: torch.Tensor) -> torch.Tensor:
    """Return what a rank holds of a parameter: its partition under ZeRO-3, packed numbers, else the parameter."""
    return numbers(getattr(parameter, "ds_tensor", parameter))


def engine_tensors(optimizer: Any) -> Mapping[str, list[torch.Tensor]]:
    """Return by label the tensors that an optimizer of DeepSpeed holds beside its states; nothing for others."""
    if not type(optimizer).__module__.startswith("deepspeed."):
        return {}
    found = {
        "master_weight": _tensors_of(optimizer, _MASTER_WEIGHTS),
        "gradient": _tensors_of(optimizer, _GRADIENTS),
    }
    for partition in list(found["master_weight"]):
        if partition.grad is not None:
            found["gradient"].append(partition.grad)
    persistent = getattr(optimizer, "persistent_parameters", [])
    found["gathered_weight"] = [parameter.data for parameter in persistent if parameter.numel()]
    buckets = getattr(optimizer, "ipg_buckets", {})
    found["communication_buffer"] = [one for each in buckets.values() for one in _tensors_in(each.buffer)]
    found["communication_buffer"] += _tensors_of(optimizer, ("temp_grad_buffer_for_gpu_offload",))
    return found


def _tensors_of(optimizer: Any, names: tuple[str, ...]) -> list[torch.Tensor]:
    return [tensor for name in names for tensor in _tensors_in(getattr(optimizer, name, None))]


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors_in(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors_in(item)


class EngineSteps:
    """Notifies an observer of the steps of DeepSpeed's engine.

    The engine takes the optimizer's step inside the call that the Trainer makes for the last backward pass of a step.

    Args:
        engine: The engine.
        observer: The observer.
    """

    def __init__(self, engine: Any, observer: Observer) -> None:
        """Follow the engine from now on."""
        self._observer = observer
        self._stepping = self._stepped = False
        self._step, self._zero_grad = engine.step, engine.zero_grad
        engine.step, engine.zero_grad = self._observed_step, self._observed_zero_grad

    def took_step(self) -> bool:
        """Return whether the engine took a step since the last call; the micro-batch before it has ended then."""
        stepped, self._stepped = self._stepped, False
        return stepped

    def _observed_step(self, *arguments: Any, **keywords: Any) -> Any:
        self._observer.micro_step_end(LAST)
        self._observer.optimizer_begin()
        self._stepping = True
        result = self._step(*arguments, **keywords)
        self._stepping, self._stepped = False, True
        self._observer.optimizer_end()
        return result

    def _observed_zero_grad(self, *arguments: Any, **keywords: Any) -> Any:
        """Release gradients when the Trainer asks for it; in its step, the engine does so itself."""
        if self._stepping:
            return self._zero_grad(*arguments, **keywords)
        self._observer.zero_grad_begin()
        result = self._zero_grad(*arguments, **keywords)
        self._observer.zero_grad_end()
        return result
