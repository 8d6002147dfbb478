"""The interface through which a loop notifies its observer of the phases of a step.

The order of calls in one run (``n`` optimizer steps of ``m`` micro-batches)::

    loaded, [reference_loaded], [average_kept], [restoring], ready, [restoring], n × [ step_begin,
                         m × (micro_step_begin, forward_end, loss_kept, micro_step_end),
                         optimizer_begin, optimizer_end, zero_grad_begin, zero_grad_end,
                         step_end,
                         evaluation, [saving] ], [restoring]

    evaluation: evaluates_after → False, or
                evaluation_begin, e × (repeat_evaluation, evaluation_forward_begin, evaluation_forward_end),
                evaluation_end
    saving: saving_begin, saving_end; restoring: restoring_begin, restoring_end

Between the last ``micro_step_end`` and ``optimizer_begin`` gradients are unscaled and clipped.  The Trainer moves the
batches of a step to the device before ``step_begin``, and zeroes gradients once between ``ready`` and the first step.
In a pipeline the micro-batches of a step overlap, and each part of one is between ``stage_begin`` and ``stage_end``.
In ``generation`` a step is one call of ``generate()``: generation_begin, cached …, (t - 1) × token_begin,
generation_end.
Inference has no optimizer: ``ready`` gets ``None``, and a step has neither an optimizer phase nor gradients to zero.

An observer keeps no tensor that a loop passes to it, so observing cannot prolong the life of one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    import torch
    from torch import nn

    from trainatomy.results.checkpoint import RestoringPurpose

StageWork = Literal["forward", "backward", "backward_input", "backward_weight"]
"""Actions of a pipeline's stage on a micro-batch; the last two are the halves of a divided backward pass."""


class Observer(Protocol):
    """Hooks into a loop; each is called on the loop's thread at the moment that its name says."""

    def loaded(self, model: nn.Module) -> None:
        """The model is on the device, in the dtype in which it stays."""

    def reference_loaded(self, model: nn.Module) -> None:
        """A model that is not trained, with which the loss compares the trained one, is on the device."""

    def average_kept(self, model: nn.Module) -> None:
        """A moving average of the weights is on the device, as a copy of the model."""

    def ready(self, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        """The optimizer exists.  Read ``optimizer.state`` only when it is needed: the Trainer replaces it once."""

    def step_begin(self, step: int) -> None:
        """Optimizer step ``step`` (from 0) begins."""

    def micro_step_begin(self, micro_step: int) -> None:
        """Micro-batch ``micro_step`` (from 0 in each step) begins: its forward is next."""

    def leaves_out(self, micro_step: int, of: int) -> bool:
        """Return whether micro-batch ``micro_step`` of ``of`` may be skipped, because it repeats the one before.

        Always False in a real training; a simulation may skip the repetition.
        """

    def repeat(self, micro_step: int, batch: Any) -> torch.Tensor | None:
        """Return the loss of micro-batch ``micro_step`` if it need not be executed, because it repeats an earlier one.

        Always None in a real training; a simulation may copy what the earlier one did.  ``batch`` is on the device.
        """

    def forward_end(self) -> None:
        """The loss is computed and the model's other outputs are released; backward is next."""

    def loss_kept(self, loss: torch.Tensor) -> None:
        """Backward of this micro-batch is over; the loop keeps ``loss`` until the next one's takes its place."""

    def micro_step_end(self, micro_step: int) -> None:
        """Backward of this micro-batch is over."""

    def stage_begin(self, work: StageWork, stage: int, micro_batch: int) -> None:
        """A stage of a pipeline begins a part of a micro-batch."""

    def stage_end(self) -> None:
        """It is over."""

    def optimizer_begin(self) -> None:
        """Gradients are clipped; the optimizer's step is next."""

    def optimizer_end(self) -> None:
        """The optimizer's step is over."""

    def zero_grad_begin(self) -> None:
        """Gradients are about to be zeroed or released."""

    def zero_grad_end(self) -> None:
        """Gradients have been zeroed or released."""

    def step_end(self, step: int) -> None:
        """Optimizer step ``step`` is over."""

    def evaluates_after(self, step: int) -> bool:
        """Return whether the training evaluates and saves after optimizer step ``step``, as far as it does."""

    def saving_begin(self) -> None:
        """A checkpoint is about to be saved."""

    def saving_end(self, files: Mapping[str, int], folder: Path) -> None:
        """A checkpoint has been saved in ``folder``: its files with their bytes."""

    def restoring_begin(self, purpose: RestoringPurpose) -> None:
        """A checkpoint is about to be loaded: to continue a training (in two parts), or as the best one."""

    def restoring_end(self) -> None:
        """It has been loaded, or a part of it."""

    def evaluation_begin(self, batches: int) -> None:
        """An evaluation of ``batches`` batches begins: after a step, or before the first one."""

    def repeat_evaluation(self, batch: Any) -> Any:
        """Return the outputs of an evaluation batch if it need not be executed, because it repeats an earlier one.

        Always None in a real training.  ``batch`` is on the device.
        """

    def evaluation_forward_begin(self) -> None:
        """The forward of an evaluation batch is next."""

    def evaluation_forward_end(self, outputs: Any) -> None:
        """The forward of an evaluation batch is over; the loop gathers ``outputs`` now."""

    def evaluation_end(self) -> None:
        """The evaluation is over: what it gathered is on the host."""

    def repeat_generation(self, step: int) -> bool:
        """Return whether call ``step`` of ``generate()`` need not be executed, because it repeats the one before.

        Always False on a GPU.
        """

    def repeat_generate(self, model: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        """Return the tokens of a call of ``model.generate()`` that need not be executed, as it repeats the one before.

        None on a GPU, and for a call that is executed; ``generated`` follows both.
        """

    def generation_begin(self, tokens: int) -> None:
        """``generate()`` is about to be called; it will generate ``tokens`` tokens for each prompt."""

    def token_begin(self, token: int) -> None:
        """The first tokens have been chosen, and number ``token`` (from 1) is next."""

    def cached(self, tensors: list[torch.Tensor]) -> None:
        """A forward begins or ends with these keys and values."""

    def generation_end(self) -> None:
        """``generate()`` has returned."""

    def generated(self, tokens: torch.Tensor, word: int) -> None:
        """A training is about to use these tokens: its prompts, each followed by what was generated for it.

        ``word`` is a token that ends no sequence.
        """


class Silent:
    """Observer that does nothing; a base class for those that need only some of the hooks."""

    def loaded(self, model: nn.Module) -> None: ...
    def reference_loaded(self, model: nn.Module) -> None: ...
    def average_kept(self, model: nn.Module) -> None: ...
    def ready(self, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None: ...
    def step_begin(self, step: int) -> None: ...
    def micro_step_begin(self, micro_step: int) -> None: ...
    def leaves_out(self, micro_step: int, of: int) -> bool:
        return False

    def repeat(self, micro_step: int, batch: Any) -> torch.Tensor | None:
        return None

    def forward_end(self) -> None: ...
    def loss_kept(self, loss: torch.Tensor) -> None: ...
    def micro_step_end(self, micro_step: int) -> None: ...
    def stage_begin(self, work: StageWork, stage: int, micro_batch: int) -> None: ...
    def stage_end(self) -> None: ...
    def optimizer_begin(self) -> None: ...
    def optimizer_end(self) -> None: ...
    def zero_grad_begin(self) -> None: ...
    def zero_grad_end(self) -> None: ...
    def step_end(self, step: int) -> None: ...
    def evaluates_after(self, step: int) -> bool:
        return False

    def saving_begin(self) -> None: ...
    def saving_end(self, files: Mapping[str, int], folder: Path) -> None: ...
    def restoring_begin(self, purpose: RestoringPurpose) -> None: ...
    def restoring_end(self) -> None: ...
    def evaluation_begin(self, batches: int) -> None: ...
    def repeat_evaluation(self, batch: Any) -> Any:
        return None

    def evaluation_forward_begin(self) -> None: ...
    def evaluation_forward_end(self, outputs: Any) -> None: ...
    def evaluation_end(self) -> None: ...
    def repeat_generation(self, step: int) -> bool:
        return False

    def repeat_generate(self, model: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        return None

    def generation_begin(self, tokens: int) -> None: ...
    def token_begin(self, token: int) -> None: ...
    def cached(self, tensors: list[torch.Tensor]) -> None: ...
    def generation_end(self) -> None: ...
    def generated(self, tokens: torch.Tensor, word: int) -> None: ...
