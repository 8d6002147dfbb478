"""Losses beside a reference, from log-probabilities of answers: of pairs ``[B]``, and of good and bad ones.

Sources: R. Rafailov et al., "Direct Preference Optimization" (arXiv 2305.18290); hinge: arXiv 2305.10425; IPO: arXiv
2310.12036; KTO: arXiv 2402.01306.  TRL 0.24 and 0.29, ``dpo_loss`` and ``kto_loss``, decide which operations run, and
how long each result lives.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F

if TYPE_CHECKING:
    from accelerate import Accelerator
    from torch import Tensor

BETA = 0.1
_SMOOTHING = 0.0
"""Share of pairs whose labels are taken to be swapped; the operations for it run in any case."""


class Scored(NamedTuple):
    """Losses, and the rewards of chosen and rejected answers."""

    losses: Tensor
    chosen: Tensor
    rejected: Tensor


def beside_reference(kind: str, chosen: Tensor, rejected: Tensor, of_chosen: Tensor, of_rejected: Tensor) -> Scored:
    """Return the losses of a kind (sigmoid, hinge or ipo); ``of_chosen`` and ``of_rejected`` are the reference's."""
    unused = chosen - of_chosen  # noqa: F841  (TRL's function holds this and the next until it returns)
    unused_too = rejected - of_rejected  # noqa: F841
    own = chosen - rejected
    compared = of_chosen - of_rejected
    margin = own - compared
    if kind == "hinge":
        losses = torch.relu(1 - BETA * margin)
    elif kind == "ipo":
        losses = (margin - 1 / (2 * BETA)) ** 2
    else:
        losses = sigmoid(BETA, margin)
    return Scored(losses, BETA * (chosen - of_chosen).detach(), BETA * (rejected - of_rejected).detach())


def sigmoid(beta: float, margin: Tensor) -> Tensor:
    """Return the losses of margins by the logistic function."""
    return -F.logsigmoid(beta * margin) * (1 - _SMOOTHING) - F.logsigmoid(-beta * margin) * _SMOOTHING


def divergence(accelerator: Accelerator, own: Tensor, compared: Tensor) -> Tensor:
    """Return the divergence from the reference that KTO estimates from answers to other prompts."""
    kl = (own - compared).mean().detach()
    gathered: Tensor = accelerator.gather_for_metrics(kl)
    return gathered.mean().clamp(min=0)


def of_answers(kl: Tensor, good: Tensor, bad: Tensor, of_good: Tensor, of_bad: Tensor) -> Scored:
    """Return the losses of KTO on good and bad answers; ``of_good`` and ``of_bad`` are the reference's."""
    parts, rewards = [], []
    for logps, reference, is_good in ((good, of_good, True), (bad, of_bad, False)):
        if logps.shape[0]:
            ratios = logps - reference
            parts.append(1 - F.sigmoid(BETA * ((ratios - kl) if is_good else (kl - ratios))))
            rewards.append(BETA * ratios.detach())
        else:
            parts.append(torch.Tensor([]).to(kl.device))
            rewards.append(torch.Tensor([]).to(kl.device))
    return Scored(torch.cat([1.0 * part for part in parts], 0), rewards[0], rewards[1])
