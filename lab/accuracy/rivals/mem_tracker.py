"""``MemTracker`` of ``torch.distributed._tools`` under ``FakeTensorMode``: PyTorch's own estimate.

It follows storages below autograd and rounds each to 512 bytes; its peak corresponds to PyTorch's allocated peak.  The
fake tensors are on CUDA, which requires a CUDA build of PyTorch and a GPU.

In its favour: a plain loop (the Trainer reads values, which fake tensors lack), two steps, since optimizer states exist
from the second on, ``reset_mod_stats`` between forwards as its error message advises, micro-batches included, and no
gradient scaler, which would read values too.
"""

from __future__ import annotations

import tempfile
from typing import TYPE_CHECKING, Any

from rivals import About, NoAnswer

if TYPE_CHECKING:
    import torch
    from torch import nn

    from trainatomy.workload.schema import Workload

ABOUT = About(
    tool="MemTracker of torch.distributed._tools",
    packages=("torch", "transformers"),
    figure="allocated",
    how="the model, the optimizer and two steps of a plain loop on fake CUDA tensors; its peak snapshot",
    needs_gpu=True,
)
STEPS = 2


def answer(line: dict[str, Any], device: str = "cuda") -> int:
    """Return the peak of the training of a measured line, bytes; ``device``: ``cpu`` for a build without CUDA."""
    from outcomes import workload_of

    return peak(workload_of(line, "h200"), device)


def peak(workload: Workload, device: str) -> int:
    """Return MemTracker's peak for ``workload``."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._tools.mem_tracker import MemTracker

    from trainatomy.training.batch import build_batch
    from trainatomy.training.model import build_model
    from trainatomy.training.process import set_tf32

    workload = _cast(workload)
    set_tf32(workload.train)
    with torch.device("meta"):
        batch = build_batch_of(workload, build_batch, build_model)
    with FakeTensorMode(allow_non_fake_inputs=True), torch.device(device):
        model = build_model(workload)
        inputs = {name: _fake(value, device) for name, value in batch.items()}
        optimizer = _prepare(workload, model, device)
        tracker = MemTracker()
        tracker.track_external(model, *(value for value in inputs.values() if isinstance(value, torch.Tensor)))
        if optimizer is not None:
            tracker.track_external(optimizer)
        with tracker:
            _run(workload, model, optimizer, inputs, tracker)
        snapshots = tracker.get_tracker_snapshot("peak")
    found = [snapshot["Total"] for place, snapshot in snapshots.items() if place.type == device]
    if not found:
        raise NoAnswer(f"no snapshot of {device}")
    return int(max(found))


def _cast(workload: Workload) -> Workload:
    """Build the model in 16 bits for inference in 16 bits: fake parameters cannot be cast in place."""
    from trainatomy.training.process import full_precision_of_inference

    dtype = full_precision_of_inference(workload.train) if workload.mode == "inference" else None
    if dtype is None:
        return workload
    model = workload.model.model_copy(update={"dtype": str(dtype).removeprefix("torch.")})
    return workload.model_copy(update={"model": model})


def build_batch_of(workload: Workload, build_batch: Any, build_model: Any) -> dict[str, Any]:
    """Build a real batch on the CPU for a model without memory."""
    import torch

    model = build_model(workload)
    with torch.device("cpu"):
        batch: dict[str, Any] = build_batch(workload, model)
    return batch


def _fake(value: Any, device: str) -> Any:
    import torch

    return torch.empty(value.shape, dtype=value.dtype, device=device) if isinstance(value, torch.Tensor) else value


def _prepare(workload: Workload, model: nn.Module, device: str) -> torch.optim.Optimizer | None:
    """Set the mode and checkpointing, and create the optimizer where there is one."""
    from trainatomy.training.arguments import training_arguments
    from trainatomy.training.optimizer import create_optimizer

    settings = workload.train
    if workload.mode == "inference":
        model.eval()
        return None
    model.train()
    if settings.gradient_checkpointing:
        enable: Any = model.gradient_checkpointing_enable
        keywords = settings.gradient_checkpointing_kwargs
        enable() if keywords is None else enable(gradient_checkpointing_kwargs=keywords)
    with tempfile.TemporaryDirectory(prefix="trainatomy-") as folder:
        arguments = training_arguments(workload, steps=STEPS, output_dir=folder, use_cpu=device == "cpu")
        return create_optimizer(settings, arguments, model)


def _run(workload: Workload, model: nn.Module, optimizer: Any, inputs: dict[str, Any], tracker: Any) -> None:
    import torch
    from torch import nn

    from trainatomy.training.factory import loss_of
    from trainatomy.training.process import autocast

    settings = workload.train
    kind = next(model.parameters()).device.type
    for _ in range(STEPS):
        if optimizer is None:
            with torch.no_grad(), autocast(settings, kind):
                model(**inputs)
            tracker.reset_mod_stats()
            continue
        for _ in range(settings.gradient_accumulation_steps):
            with autocast(settings, kind):
                loss = loss_of(model(**inputs))
            (loss / settings.gradient_accumulation_steps).backward()
            tracker.reset_mod_stats()
        if settings.max_grad_norm > 0:
            nn.utils.clip_grad_norm_(model.parameters(), settings.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=workload.zero_grad_set_to_none)
