"""``loop: pytorch``: a plain training loop with PyTorch's own mixed precision, as in Hugging Face's guide.

No tensor lives longer than in the usual hand-written loop, which holds the last batch and the last loss.

``loop: pytorch`` with an optimizer that evaluates the loss itself, several times in a step: LBFGS.

``optimizer.step(closure)`` runs the forward and backward passes of all micro-batches as often as it likes, which
depends on values.  Here it makes all its iterations (``max_iter``), and each adds a direction to its history until that
is full.  A training that converges makes fewer iterations and holds at most as much.

``mode: inference``: the forward pass alone, in evaluation mode and without gradients.

Batches have no labels, and outputs are released after each forward.  With ``fp16_full_eval`` or ``bf16_full_eval`` the
whole model is cast when it is moved to the device, as in the Trainer's evaluation.
"""

from __future__ import annotations

import tempfile
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader

from trainatomy.training.batch import Batch, build_batch
from trainatomy.training.checkpointing import check_checkpointing, enable_checkpointing, offloading
from trainatomy.training.model import set_use_cache
from trainatomy.training.optimizer import each_of, needs_closure, without_tolerance
from trainatomy.training.parallel.spread import Spread, spread_over_gpus
from trainatomy.training.process import autocast, full_precision_of_inference, set_tf32
from trainatomy.workload.defaults import loop_checkpoints

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from trainatomy.training.observer import Observer
    from trainatomy.training.run import Run
    from trainatomy.workload.schema import Workload
    from trainatomy.workload.train import TrainSpec


def train(run: Run) -> None:
    """Train the model of ``run``."""
    workload, model, observer = run.workload, run.model, run.observer
    if workload.parallel.pp_size > 1:
        from trainatomy.training.loops.pipeline import train as train_pipeline

        train_pipeline(run)
        return
    settings = workload.train
    accumulation = settings.gradient_accumulation_steps
    check_checkpointing(model, settings)
    set_use_cache(model, settings.use_cache)
    batches = batches_of(run, workload.batch_size * workload.parallel.devices)
    use_liger(model, settings)
    enable_training(model, workload)
    spread = spread_over_gpus(model, workload.parallel, run.device)
    observer.loaded(model)
    average = average_of(run)
    optimizer = optimizer_of(run, spread)
    observer.ready(model, spread.with_states(optimizer))
    optimizers = each_of(optimizer)
    kind = torch.device(run.device).type
    scaler = spread.scaler(kind, enabled=settings.fp16)
    module = compiled(spread.module, workload)
    outputs = Outputs(workload)

    closure = ClosureSteps(run, spread, optimizer, batches) if needs_closure(settings) else None
    for step in range(run.steps):
        observer.step_begin(step)
        if closure is not None:
            closure.step()
            average.update_parameters(model)
            observer.step_end(step)
            continue
        for micro_step in range(accumulation):
            batch = next(batches)
            if observer.leaves_out(micro_step, accumulation):
                continue
            repeated = observer.repeat(micro_step, batch)
            if repeated is not None:
                loss, repeated = repeated, None
                continue
            observer.micro_step_begin(micro_step)
            with spread.synchronizes(last=micro_step == accumulation - 1), spread.sharing(batch):
                with autocast(settings, kind), offloading(workload):
                    loss = spread.loss(outputs.kept(module(**batch)))
                observer.forward_end()
                scaler.scale(loss / accumulation).backward()
                outputs.release()
            observer.loss_kept(loss)
            observer.micro_step_end(micro_step)
        update_weights(optimizers, scaler, spread, settings, observer)
        average.update_parameters(model)
        observer.zero_grad_begin()
        optimizer.zero_grad(set_to_none=workload.zero_grad_set_to_none)
        observer.zero_grad_end()
        observer.step_end(step)


def update_weights(
    optimizers: Sequence[torch.optim.Optimizer],
    scaler: torch.amp.GradScaler,
    spread: Spread,
    settings: TrainSpec,
    observer: Observer,
) -> None:
    """Clip the gradients of a step and let the optimizers use them."""
    if settings.max_grad_norm > 0:
        for optimizer in optimizers:
            scaler.unscale_(optimizer)
        spread.clip(settings.max_grad_norm)
    observer.optimizer_begin()
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()
    observer.optimizer_end()


class _NoAverage:
    """The average of a training that keeps none."""

    def update_parameters(self, model: nn.Module) -> None:
        """Do nothing."""


class Outputs:
    """What a model returned, held through backward by loops that keep it in a variable.

    Args:
        workload: The training, which says so (``keep_outputs``).
    """

    def __init__(self, workload: Workload) -> None:
        self._is_kept = workload.keep_outputs
        self._held: Any = None

    def kept(self, outputs: Any) -> Any:
        """Return what a model returned, which dies in the loss unless it is kept."""
        self._held = outputs if self._is_kept else None
        return outputs

    def release(self) -> None:
        """Let go of it."""
        self._held = None


def average_of(run: Run) -> Any:
    """Return the moving average of the weights: a copy of the model, which is updated after each step."""
    if run.workload.ema_decay is None:
        return _NoAverage()
    average = AveragedModel(run.model, multi_avg_fn=get_ema_multi_avg_fn(run.workload.ema_decay))
    run.observer.average_kept(average)
    return average


def use_liger(model: nn.Module, settings: TrainSpec) -> None:
    """Replace layers by Liger's, by the function that the Trainer calls."""
    if settings.use_liger_kernel:
        from transformers.integrations.liger import apply_liger_kernel

        apply_liger_kernel(model, settings.liger_kernel_config)


def enable_training(model: nn.Module, workload: Workload) -> None:
    """Set training mode and checkpointing."""
    model.train()
    settings = workload.train
    if loop_checkpoints(workload):
        enable_checkpointing(model, settings.gradient_checkpointing_kwargs, settings.gradient_checkpointing_every)


def compiled(module: nn.Module, workload: Workload) -> nn.Module:
    """Return the module to call: the module, or what ``torch.compile`` makes of it.

    Layers that FSDP2 shards are compiled in place, so that its hooks run before and after them, as accelerate does.
    """
    settings = workload.train
    if not settings.compiles:
        return module
    options: dict[str, Any] = {"backend": "inductor", "mode": settings.torch_compile_mode}
    if not settings.dynamo_use_regional_compilation:
        whole: nn.Module = torch.compile(module, **options)  # type: ignore[assignment]
        return whole
    from accelerate.utils import other

    compile_regions = other.compile_regions_fsdp2 if workload.parallel.strategy == "fsdp2" else other.compile_regions
    regions: nn.Module = compile_regions(module, **options)
    return regions


def optimizer_of(run: Run, spread: Spread) -> torch.optim.Optimizer:
    """Return the optimizer of a model that is spread."""
    with tempfile.TemporaryDirectory(prefix="trainatomy-") as folder:
        return spread.optimizer(run.workload.train, run.arguments(folder))


def batches_of(run: Run, size: int) -> Iterator[Batch]:
    """Yield batches of ``size`` samples, moved to the device one by one."""
    dataset = run.dataset(size * run.steps * run.workload.train.gradient_accumulation_steps)
    loader = DataLoader(dataset, batch_size=size, collate_fn=dataset.collate)
    return (to_device(batch, run.device) for batch in loader)


def to_device(batch: Batch, device: str) -> Batch:
    """Return ``batch`` with its tensors on ``device``, those in nested lists and dicts too; other values stay."""
    moved: Batch = tree_map(lambda value: value.to(device) if isinstance(value, torch.Tensor) else value, dict(batch))
    return moved


class ClosureSteps:
    """The steps of an optimizer that is given a closure."""

    def __init__(self, run: Run, spread: Spread, optimizer: torch.optim.Optimizer, batches: Iterator[Batch]) -> None:
        self._workload = run.workload
        self._observer = run.observer
        self._kind = torch.device(run.device).type
        self._spread = spread
        self._optimizer = without_tolerance(optimizer)
        self._batches = batches
        self._evaluations = 0

    def step(self) -> None:
        """Take one optimizer step on the next micro-batches.

        The optimizer's own work lies between two evaluations, and after the last one.
        """
        accumulation = self._workload.train.gradient_accumulation_steps
        held = [next(self._batches) for _ in range(accumulation)]
        self._evaluations = 0
        take_step: Any = self._optimizer.step  # its stub wants a closure that returns a float
        take_step(lambda: self._evaluate(held))
        self._observer.optimizer_end()

    def _evaluate(self, held: list[Batch]) -> torch.Tensor:
        """Compute the gradients of all micro-batches anew, and return their mean loss."""
        observer, count = self._observer, len(held)
        if self._evaluations:
            observer.optimizer_end()
        observer.zero_grad_begin()
        self._optimizer.zero_grad(set_to_none=self._workload.zero_grad_set_to_none)
        observer.zero_grad_end()
        total = torch.zeros((), device=self._kind)
        outputs = Outputs(self._workload)
        for number, batch in enumerate(held):
            observer.micro_step_begin(self._evaluations * count + number)
            with autocast(self._workload.train, self._kind), offloading(self._workload):
                loss = self._spread.loss(outputs.kept(self._spread.module(**batch))) / count
            observer.forward_end()
            loss.backward()
            outputs.release()
            total += loss.detach()
            observer.micro_step_end(self._evaluations * count + number)
        if self._workload.train.max_grad_norm > 0:
            self._spread.clip(self._workload.train.max_grad_norm)
        self._evaluations += 1
        observer.optimizer_begin()
        return total


def infer(run: Run) -> None:
    """Run the forward of the model."""
    workload, model, observer = run.workload, run.model, run.observer
    set_use_cache(model, workload.train.use_cache)
    batch = build_batch(workload, model, run.make_batch)
    prepare(run)
    for step in range(run.steps):
        observer.step_begin(step)
        observer.micro_step_begin(0)
        _forward(run, to_device(batch, run.device))
        observer.forward_end()
        observer.micro_step_end(0)
        observer.step_end(step)


def _forward(run: Run, batch: Batch) -> None:
    with torch.no_grad(), autocast(run.workload.train, torch.device(run.device).type):
        run.model(**batch)


def prepare(run: Run) -> None:
    """Move a model to the GPU for forward passes without training, in the precision of the workload."""
    train, model = run.workload.train, run.model
    dtype = full_precision_of_inference(train)
    model.to(run.device) if dtype is None else model.to(run.device, dtype)
    run.observer.loaded(model)
    run.observer.ready(model, None)
    model.eval()
    set_tf32(train)
