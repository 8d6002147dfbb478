"""The AdamW of transformers before 5.0, its Trainer's default in January 2022 (``adamw_hf``).

In a workload: ``optim: trainatomy.training.adamw_hf.AdamW``.  It steps through the parameters one by one with one
temporary of a parameter's size; ``torch.optim.AdamW`` without foreach and fused has two.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer


class AdamW(Optimizer):
    """Adam with decoupled weight decay, applied after the step (Loshchilov and Hutter, https://arxiv.org/abs/1711.05101).

    m ← β₁m + (1 − β₁)g,  v ← β₂v + (1 − β₂)g²,  p ← p − lr √(1 − β₂ᵗ) / (1 − β₁ᵗ) · m / (√v + ε),  p ← p − lr λ p

    Sparse gradients are refused.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Make one step; each temporary lives until the next one replaces it, as in transformers' loop."""
        loss = None if closure is None else closure()
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for parameter in group["params"]:
                gradient = parameter.grad
                if gradient is None:
                    continue
                if gradient.is_sparse:
                    raise RuntimeError("this AdamW does not take sparse gradients")
                state = self._state_of(parameter)
                state["step"] += 1
                mean, square = state["exp_avg"], state["exp_avg_sq"]
                mean.mul_(beta1).add_(gradient, alpha=1 - beta1)
                square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
                denominator = square.sqrt().add_(group["eps"])
                correction = math.sqrt(1 - beta2 ** state["step"]) / (1 - beta1 ** state["step"])
                parameter.addcdiv_(mean, denominator, value=-group["lr"] * correction)
                if group["weight_decay"] > 0:
                    parameter.add_(parameter, alpha=-group["lr"] * group["weight_decay"])
        return loss

    def _state_of(self, parameter: torch.Tensor) -> dict[str, Any]:
        """Return the state of a parameter, made at the first step in the parameter's dtype."""
        state: dict[str, Any] = self.state[parameter]
        if not state:
            state.update(step=0, exp_avg=torch.zeros_like(parameter), exp_avg_sq=torch.zeros_like(parameter))
        return state
