"""Losses of pairs without a reference, as ms-swift and axolotl compute them by TRL's trainers of ORPO and CPO.

Sources: TRL 0.29 and 1.9, experimental/orpo/orpo_trainer.py and experimental/cpo/cpo_trainer.py; ms-swift 4.6,
swift/rlhf_trainers/rlhf_mixin.py (``concatenated_forward``).  Names are kept as long as the trainers keep them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainatomy.training.labels import IGNORED
from trainatomy.training.preference import axolotl
from trainatomy.training.preference.batches import Batch
from trainatomy.training.preference.losses import BETA, sigmoid
from trainatomy.training.preference.swift import selected_log_probabilities

if TYPE_CHECKING:
    from collections.abc import Callable

    from trainatomy.training.loops.preference import PreferenceTrainer

_SIMPO_BETA, _GAMMA = 2.0, 1.0


def _forward(
    trainer: PreferenceTrainer, model: nn.Module, batch: Batch
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return log-probabilities ``[B]`` and logits of both answers, and the loss of fine-tuning on the chosen ones."""
    model_kwargs = axolotl.concatenated(batch) if trainer.preference.trainer == "axolotl" else batch.copy()
    labels = model_kwargs.pop("labels")
    outputs = model(**model_kwargs, use_cache=False)
    return _scored(trainer, outputs.logits, labels, model_kwargs["attention_mask"])


def _scored(
    trainer: PreferenceTrainer, all_logits: Tensor, tokens: Tensor, attention_mask: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    spec, pairs = trainer.preference, len(tokens) // 2
    is_orpo = spec.loss_type == "orpo"
    labels = tokens.clone()
    if is_orpo:
        labels = torch.where(attention_mask == 1, labels, IGNORED)
    if is_orpo or spec.rpo_alpha:
        nll_loss = _cross_entropy(all_logits[:pairs], labels[:pairs])
    else:
        nll_loss = torch.tensor(0.0).to(trainer.accelerator.device)
    select = axolotl.selected_log_probabilities if spec.trainer == "axolotl" else selected_log_probabilities
    all_logps = _log_probabilities(
        all_logits, tokens, select, is_mean=spec.loss_type in ("orpo", "simpo"), is_orpo=is_orpo
    )
    last = slice(None, -1 if is_orpo else None)
    chosen_logits, rejected_logits = all_logits[:pairs, last], all_logits[pairs:, last]
    return all_logps[:pairs], all_logps[pairs:], chosen_logits, rejected_logits, nll_loss


def _cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the loss of the next tokens; logits and labels are copied without the last and the first place."""
    scores = logits[..., :-1, :].contiguous()
    wanted = labels[..., 1:].contiguous()
    found: Tensor = nn.CrossEntropyLoss()(scores.view(-1, scores.shape[-1]), wanted.view(-1))
    return found


def _log_probabilities(
    logits: Tensor, labels: Tensor, select: Callable[[Tensor, Tensor], Tensor], *, is_mean: bool, is_orpo: bool
) -> Tensor:
    """Return the log-probability of each answer (``get_batch_logps``)."""
    labels = labels[:, 1:].clone()
    logits = logits[:, :-1, :]
    loss_mask = labels != IGNORED
    if is_orpo:
        labels = torch.where(labels == IGNORED, 0, labels)
    else:
        labels[labels == IGNORED] = 0
    per_token = select(logits, labels)
    if is_mean:
        return (per_token * loss_mask).sum(-1) / loss_mask.sum(-1)
    return (per_token * loss_mask).sum(-1)


def orpo_loss(trainer: PreferenceTrainer, model: nn.Module, batch: Batch) -> Tensor:
    """Return the loss of ORPO (``ORPOTrainer.get_batch_loss_metrics``)."""
    metrics: dict[str, Tensor] = {}
    chosen_logps, rejected_logps, chosen_logits, rejected_logits, nll_loss = _forward(trainer, model, batch)
    losses, chosen_rewards, rejected_rewards, log_odds_ratio, log_odds_chosen = _odds(chosen_logps, rejected_logps)
    loss = nll_loss - losses.mean()
    accuracies = (chosen_rewards > rejected_rewards).float()
    gather = trainer.accelerator.gather_for_metrics
    metrics["rewards/chosen"] = gather(chosen_rewards).mean()
    metrics["rewards/rejected"] = gather(rejected_rewards).mean()
    metrics["rewards/accuracies"] = gather(accuracies).mean()
    metrics["rewards/margins"] = gather(chosen_rewards - rejected_rewards).mean()
    metrics["logps/rejected"] = gather(rejected_logps).detach().mean()
    metrics["logps/chosen"] = gather(chosen_logps).detach().mean()
    metrics["logits/rejected"] = gather(rejected_logits.detach().mean()).mean()
    metrics["logits/chosen"] = gather(chosen_logits.detach().mean()).mean()
    metrics["nll_loss"] = gather(nll_loss).detach().mean()
    metrics["log_odds_ratio"] = gather(log_odds_ratio).detach().mean()
    metrics["log_odds_chosen"] = gather(log_odds_chosen).detach().mean()
    for name in list(metrics):
        metrics[name] = metrics[name].item()  # type: ignore[assignment]
    return loss


def _odds(chosen_logps: Tensor, rejected_logps: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return losses, rewards and mean odds (``odds_ratio_loss``)."""
    chosen_logps, rejected_logps = chosen_logps.float(), rejected_logps.float()
    log_odds = (chosen_logps - rejected_logps) - (_log1mexp(chosen_logps) - _log1mexp(rejected_logps))
    ratio = F.logsigmoid(log_odds)
    losses = BETA * ratio
    chosen_rewards, rejected_rewards = BETA * chosen_logps.detach(), BETA * rejected_logps.detach()
    return losses, chosen_rewards, rejected_rewards, torch.mean(ratio), torch.mean(log_odds)


def cpo_loss(trainer: PreferenceTrainer, model: nn.Module, batch: Batch) -> Tensor:
    """Return the loss of CPO or SimPO (``CPOTrainer.get_batch_loss_metrics``)."""
    spec, metrics = trainer.preference, dict[str, float]()
    chosen_logps, rejected_logps, chosen_logits, rejected_logits, nll_loss = _forward(trainer, model, batch)
    losses, chosen_rewards, rejected_rewards = _contrast(spec.loss_type, chosen_logps, rejected_logps)
    loss = losses.mean() + spec.rpo_alpha * nll_loss
    accuracies = (chosen_rewards > rejected_rewards).float()
    gather = trainer.accelerator.gather_for_metrics
    metrics["rewards/chosen"] = gather(chosen_rewards).mean().item()
    metrics["rewards/rejected"] = gather(rejected_rewards).mean().item()
    metrics["rewards/accuracies"] = gather(accuracies).mean().item()
    metrics["rewards/margins"] = gather(chosen_rewards - rejected_rewards).mean().item()
    metrics["logps/rejected"] = gather(rejected_logps).detach().mean().item()
    metrics["logps/chosen"] = gather(chosen_logps).detach().mean().item()
    metrics["logits/rejected"] = gather(rejected_logits.detach().mean()).mean().item()
    metrics["logits/chosen"] = gather(chosen_logits.detach().mean()).mean().item()
    metrics["nll_loss"] = gather(nll_loss).detach().mean().item()
    return loss


def _contrast(kind: str, chosen_logps: Tensor, rejected_logps: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return losses and rewards (``cpo_loss``)."""
    logits, beta = chosen_logps - rejected_logps, BETA
    if kind == "simpo":
        beta = _SIMPO_BETA
        logits = logits - _GAMMA / beta
    return sigmoid(beta, logits), beta * chosen_logps.detach(), beta * rejected_logps.detach()


def _log1mexp(values: Tensor) -> Tensor:
    """Return log(1 − exp(x)) of negative numbers."""
    split = -0.6931471805599453
    return torch.where(values < split, torch.log1p(-torch.exp(values)), torch.log(-torch.expm1(values)))
