"""ms-swift's losses of preferences.

Sources: ms-swift 4.6, swift/rlhf_trainers (``dpo_trainer.py``, ``kto_trainer.py``, ``reward_trainer.py``,
``rlhf_mixin.py``) and swift/trainers/mixin.py (``prepare_logits_to_keep``), and the parts that it inherits from TRL
0.29 (``selective_log_softmax``, ``kto_loss``).  Names are kept as long as the trainers keep them, because a tensor
lives as long as its name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainatomy.training.labels import IGNORED
from trainatomy.training.preference.batches import ANSWER, IMAGES, IS_GOOD, OTHER_ANSWER, Batch
from trainatomy.training.preference.losses import beside_reference, divergence, of_answers

if TYPE_CHECKING:
    from trainatomy.training.loops.preference import PreferenceTrainer


def _keep_logits(batch: Batch) -> None:
    """Leave out the logits of the prompts (``prepare_logits_to_keep``)."""
    labels = batch["labels"]
    if labels.shape[0] == 1:
        loss_mask = (labels != IGNORED)[0]
        labels = labels[:, loss_mask]
        labels = F.pad(labels, (1, 0), value=IGNORED)
        logits_to_keep: Any = F.pad(loss_mask[1:], (0, 1), value=True)
    else:
        logits_to_keep = labels.shape[-1] - (int((labels != IGNORED).int().argmax(-1).min().item())) + 1
        labels = labels[:, -logits_to_keep:]
    batch["labels"] = labels
    batch["logits_to_keep"] = logits_to_keep


def selected_log_probabilities(logits: Tensor, tokens: Tensor) -> Tensor:
    """Return the log-probability of each token ``[B, S]``, one row at a time (TRL's ``selective_log_softmax``)."""
    tokens = tokens.unsqueeze(-1)
    if logits.dtype in (torch.float32, torch.float64):
        chosen = torch.gather(logits, dim=-1, index=tokens)
        normalisers = torch.stack([torch.logsumexp(row, dim=-1) for row in logits])
        found = chosen - normalisers.unsqueeze(-1)
    else:
        rows = []
        for row, of_row in zip(logits, tokens, strict=True):
            probabilities = F.log_softmax(row, dim=-1)
            rows.append(probabilities.gather(dim=-1, index=of_row))
        found = torch.stack(rows)
    return found.squeeze(-1)


def _per_token(logits: Tensor, labels: Tensor, *, is_sum: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Return log-probabilities, means or sums of logits, and the tokens that count (``get_per_token_logps``)."""
    loss_mask = labels != IGNORED
    labels = labels.clone()
    labels[~loss_mask] = 0
    reduced = logits.sum(-1) if is_sum else logits.mean(-1)
    per_token = selected_log_probabilities(logits, labels)
    per_token[~loss_mask] = 0
    reduced[~loss_mask] = 0
    return per_token, reduced, loss_mask


def dpo_loss(trainer: PreferenceTrainer, model: nn.Module, batch: Batch) -> Tensor:
    """Return the loss of pairs beside a reference (``DPOTrainer.get_batch_loss_metrics``)."""
    spec, metrics = trainer.preference, dict[str, float]()
    policy = _forward_pairs(model, batch)
    with trainer.reference(model) as reference:
        compared = _forward_pairs(reference, batch, is_reference=True)
    ref_chosen, ref_rejected = compared["chosen_logps"], compared["rejected_logps"]
    del compared
    chosen, rejected = policy["chosen_logps"], policy["rejected_logps"]
    scored: tuple[Tensor, ...] = (chosen, rejected, ref_chosen, ref_rejected)
    if spec.loss_type == "ipo":
        counts = (policy["chosen_tokens"], policy["rejected_tokens"]) * 2
        scored = tuple(_mean(logps, count) for logps, count in zip(scored, counts, strict=True))
    made, chosen_of_loss, rejected_of_loss = beside_reference(spec.loss_type, *scored)
    losses = 0 + made * 1.0
    chosen_rewards, rejected_rewards = 0 + chosen_of_loss * 1.0, 0 + rejected_of_loss * 1.0
    accuracies = (chosen_rewards > rejected_rewards).float()
    if spec.rpo_alpha:
        losses = losses + spec.rpo_alpha * policy["nll_loss"]
    gather = trainer.accelerator.gather_for_metrics
    metrics["rewards/chosen"] = gather(chosen_rewards).mean().item()
    metrics["rewards/rejected"] = gather(rejected_rewards).mean().item()
    metrics["rewards/accuracies"] = gather(accuracies).mean().item()
    metrics["rewards/margins"] = gather(chosen_rewards - rejected_rewards).mean().item()
    metrics["logps/chosen"] = gather(policy["chosen_logps"]).detach().mean().item()
    metrics["logps/rejected"] = gather(policy["rejected_logps"]).detach().mean().item()
    if spec.loss_type == "ipo":
        for name in ("chosen", "rejected"):
            mean = _mean(policy[f"{name}_logps"], policy[f"{name}_tokens"])
            metrics[f"logps_mean/{name}"] = gather(mean).detach().mean().item()
    metrics["logits/chosen"] = gather(policy["mean_chosen_logits"]).detach().mean().item()
    metrics["logits/rejected"] = gather(policy["mean_rejected_logits"]).detach().mean().item()
    if spec.rpo_alpha:
        metrics["nll_loss"] = gather(policy["nll_loss"]).detach().mean().item()
    return losses.mean()


def _forward_pairs(model: nn.Module, batch: Batch, *, is_reference: bool = False) -> dict[str, Tensor]:
    """Run a model on both answers at once (``concatenated_forward``)."""
    batch = batch.copy()
    _keep_logits(batch)
    labels = batch.pop("labels")
    outputs = model(**batch, use_cache=False)
    all_logits = outputs.logits
    labels = torch.roll(labels, shifts=-1, dims=1)
    per_token, mean_all_logits, loss_mask = _per_token(all_logits, labels)
    output: dict[str, Tensor] = {}
    pairs = labels.shape[0] // 2
    tokens = loss_mask.sum(dim=1)
    if not is_reference:
        output["nll_loss"] = -per_token[:pairs][loss_mask[:pairs]].mean()
    all_logps = per_token.sum(-1)
    output["chosen_logps"] = all_logps[:pairs]
    output["rejected_logps"] = all_logps[pairs:]
    output["mean_chosen_logits"] = mean_all_logits[:pairs][loss_mask[:pairs]].mean()
    output["mean_rejected_logits"] = mean_all_logits[pairs:][loss_mask[pairs:]].mean()
    output["chosen_tokens"] = tokens[:pairs]
    output["rejected_tokens"] = tokens[pairs:]
    return output


def _mean(logps: Tensor, tokens: Tensor) -> Tensor:
    return logps / tokens.to(logps).clamp_min(1)


def kto_loss(trainer: PreferenceTrainer, model: nn.Module, batch: Batch) -> Tensor:
    """Return the loss of good and bad answers (``KTOTrainer.forward``, TRL's ``get_batch_loss_metrics``)."""
    metrics = dict[str, float]()
    labels = torch.tensor(batch[IS_GOOD])
    device = trainer.accelerator.device
    num_chosen = labels.sum().to(device)
    num_rejected = (len(labels) - num_chosen).to(device)
    chosen_logps, rejected_logps, chosen_logits, rejected_logits, kl_logps = _forward_answers(model, batch)
    with trainer.reference(model) as reference:
        ref_chosen, ref_rejected, _, _, ref_kl = _forward_answers(reference, batch)
    kl = divergence(trainer.accelerator, kl_logps, ref_kl)
    losses, chosen_rewards, rejected_rewards = of_answers(kl, chosen_logps, rejected_logps, ref_chosen, ref_rejected)
    metrics["kl"] = kl.item()
    gather = trainer.accelerator.gather_for_metrics
    if gather(num_chosen).sum().item() > 0:
        metrics["rewards/chosen_sum"] = gather(chosen_rewards.nansum()).nansum().item()
        metrics["logps/chosen_sum"] = gather(chosen_logps.nansum()).nansum().item()
        metrics["logits/chosen_sum"] = gather(chosen_logits.nansum()).nansum().item()
    if gather(num_rejected).sum().item() > 0:
        metrics["rewards/rejected_sum"] = gather(rejected_rewards.nansum()).nansum().item()
        metrics["logps/rejected_sum"] = gather(rejected_logps.nansum()).nansum().item()
        metrics["logits/rejected_sum"] = gather(rejected_logits.nansum()).nansum().item()
    return losses.nanmean()


def _forward_answers(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Run a model without gradients on the other answers, and then on the answers."""
    kl_logps = _of_others(model, batch)
    inputs, labels = _inputs(batch)
    outputs = model(**inputs)
    completion_logits = outputs.logits
    logps, completion_logits = _sums(completion_logits, labels)
    good = [place for place, is_good in enumerate(batch[IS_GOOD]) if is_good]
    bad = [place for place, is_good in enumerate(batch[IS_GOOD]) if not is_good]
    return logps[good, ...], logps[bad, ...], completion_logits[good], completion_logits[bad], kl_logps


def _of_others(model: nn.Module, batch: Batch) -> Tensor:
    with torch.no_grad():
        inputs, labels = _inputs(batch, OTHER_ANSWER)
        logits = model(**inputs).logits
    return _sums(logits, labels)[0]


def _inputs(batch: Batch, prefix: str = ANSWER) -> tuple[Batch, Tensor]:
    inputs = {name: batch[f"{prefix}{name}"] for name in ("input_ids", "attention_mask", "labels")}
    inputs |= {name: batch[f"{ANSWER}{name}"] for name in IMAGES if f"{ANSWER}{name}" in batch}
    _keep_logits(inputs)
    return inputs, inputs.pop("labels")


def _sums(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return the log-probability of each answer, and the sum of its logits (``get_batch_logps``)."""
    labels = torch.roll(labels, shifts=-1, dims=1)
    per_token, sum_logits, _ = _per_token(logits, labels, is_sum=True)
    return per_token.sum(-1), sum_logits.sum(-1)


def reward_loss(trainer: PreferenceTrainer, model: nn.Module, batch: Batch) -> Tensor:
    """Return the loss of a classifier that gives rewards, on pairs (``RewardTrainer.compute_loss``)."""
    metrics = dict[str, float]()
    pairs = batch["attention_mask"].shape[0] // 2
    scores = model(**batch).logits
    chosen, rejected = torch.split(scores, pairs, dim=0)
    loss = -F.logsigmoid(chosen - rejected).mean()
    chosen, rejected = chosen.detach(), rejected.detach()
    metrics["rewards/chosen"] = chosen.mean().item()
    metrics["rewards/rejected"] = rejected.mean().item()
    metrics["rewards/accuracies"] = (chosen > rejected).float().mean().item()
    metrics["rewards/margins"] = (chosen - rejected).mean().item()
    return loss
