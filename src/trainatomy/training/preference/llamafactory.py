"""LLaMA-Factory's losses of preferences.

Sources: LLaMA-Factory 0.9.5, src/llamafactory/train (``dpo/trainer.py``, ``kto/trainer.py``, ``rm/trainer.py``,
``trainer_utils.py``), and the parts that it inherits from TRL 0.24 (``dpo_loss``, ``kto_loss``).  Names are kept as
long as the trainers keep them, because a tensor lives as long as its name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainatomy.training.labels import IGNORED
from trainatomy.training.preference.batches import IMAGES, IS_GOOD, OTHER_ANSWER, Batch
from trainatomy.training.preference.losses import BETA, beside_reference, divergence, of_answers

if TYPE_CHECKING:
    from trainatomy.training.loops.preference import PreferenceTrainer

_GAMMA = 0.5
_MEANS = ("ipo", "orpo", "simpo")
"""Losses of the mean log-probability of a token; the others take the sum."""


class _Pairs(NamedTuple):
    """What a model makes of pairs: log-probabilities ``[B]``, and logits ``[B, S, V]`` in float32, which are views."""

    chosen_logps: Tensor
    rejected_logps: Tensor
    chosen_logits: Tensor
    rejected_logits: Tensor
    chosen_logps_avg: Tensor


class _Answers(NamedTuple):
    """What a model makes of good and bad answers, whose logits are copies."""

    chosen_logps: Tensor
    rejected_logps: Tensor
    chosen_logits: Tensor
    rejected_logits: Tensor
    kl_logps: Tensor
    chosen_logps_avg: Tensor


def _log_probabilities(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return the log-probability of each answer, and its tokens (``get_batch_logps``)."""
    labels = labels[:, 1:].clone()
    logits = logits[:, :-1, :]
    mask = labels != IGNORED
    labels[labels == IGNORED] = 0
    per_token = torch.gather(logits.log_softmax(-1), dim=2, index=labels.unsqueeze(2)).squeeze(2)
    valid_length = mask.sum(-1)
    return (per_token * mask).sum(-1), valid_length


def _cloned(batch: Batch) -> Batch:
    return {name: value.detach().clone() for name, value in batch.items()}


def pair_loss(trainer: PreferenceTrainer, model: nn.Module, batch: Batch) -> Tensor:
    """Return the loss of pairs of answers (``CustomDPOTrainer.get_batch_loss_metrics``)."""
    spec, metrics = trainer.preference, dict[str, float]()
    policy = _forward_pairs(trainer, model, batch)
    if trainer.compares:
        with trainer.reference(model) as reference:
            compared = _forward_pairs(trainer, reference, batch)
            ref_chosen, ref_rejected = compared.chosen_logps, compared.rejected_logps
        del compared
        # LLaMA-Factory hands no name of a loss to TRL 0.24, which takes the sigmoid
        losses, chosen_rewards, rejected_rewards = beside_reference(
            "sigmoid", policy.chosen_logps, policy.rejected_logps, ref_chosen, ref_rejected
        )
    else:
        without = _orpo_losses if spec.loss_type == "orpo" else _simpo_losses
        losses = without(policy.chosen_logps, policy.rejected_logps)
        chosen_rewards = BETA * policy.chosen_logps.detach()
        rejected_rewards = BETA * policy.rejected_logps.detach()
    sft_loss = -policy.chosen_logps_avg
    if spec.rpo_alpha > 1e-6:
        losses += spec.rpo_alpha * sft_loss
    metrics["rewards/chosen"] = chosen_rewards.mean().item()
    metrics["rewards/rejected"] = rejected_rewards.mean().item()
    metrics["rewards/accuracies"] = (chosen_rewards > rejected_rewards).float().mean().item()
    metrics["rewards/margins"] = (chosen_rewards - rejected_rewards).mean().item()
    metrics["logps/chosen"] = policy.chosen_logps.mean().item()
    metrics["logps/rejected"] = policy.rejected_logps.mean().item()
    metrics["logits/chosen"] = policy.chosen_logits.mean().item()
    metrics["logits/rejected"] = policy.rejected_logits.mean().item()
    if spec.loss_type == "orpo":
        metrics["sft_loss"] = sft_loss.mean().item()
        metrics["odds_ratio_loss"] = ((losses - sft_loss) / BETA).mean().item()
    return losses.mean()


def _forward_pairs(trainer: PreferenceTrainer, model: nn.Module, batch: Batch) -> _Pairs:
    """Run a model on both answers at once (``concatenated_forward``)."""
    batch = _cloned(batch) if trainer.compares else batch
    labels = batch.pop("labels")
    logits = model(**batch, return_dict=True, use_cache=False).logits.to(torch.float32)
    logps, valid_length = _log_probabilities(logits, labels)
    is_mean = trainer.preference.loss_type in _MEANS
    if is_mean:
        logps = logps / valid_length
    pairs = batch["input_ids"].size(0) // 2
    chosen_logps, rejected_logps = logps.split(pairs, dim=0)
    chosen_logits, rejected_logits = logits.split(pairs, dim=0)
    chosen_length, _ = valid_length.split(pairs, dim=0)
    average = chosen_logps if is_mean else chosen_logps / chosen_length
    return _Pairs(chosen_logps, rejected_logps, chosen_logits, rejected_logits, average)


def _orpo_losses(chosen: Tensor, rejected: Tensor) -> Tensor:
    """Return the losses of ORPO: fine-tuning on the chosen answer, and the odds of both (arXiv 2403.07691)."""
    odds = (chosen - rejected) - (torch.log1p(-torch.exp(chosen)) - torch.log1p(-torch.exp(rejected)))
    fine_tuning = -chosen
    contrast = -F.logsigmoid(odds)
    return fine_tuning + BETA * contrast


def _simpo_losses(chosen: Tensor, rejected: Tensor) -> Tensor:
    """Return the losses of SimPO (arXiv 2405.14734)."""
    margin = chosen - rejected
    shifted = margin - _GAMMA / BETA
    return -F.logsigmoid(BETA * shifted)


def kto_loss(trainer: PreferenceTrainer, model: nn.Module, batch: Batch) -> Tensor:
    """Return the loss of good and bad answers (``CustomKTOTrainer.get_batch_loss_metrics``)."""
    alpha, metrics = trainer.preference.rpo_alpha, dict[str, float]()
    policy = _forward_answers(model, batch)
    with trainer.reference(model) as reference:
        compared = _forward_answers(reference, batch)
        ref_chosen, ref_rejected, ref_kl = compared.chosen_logps, compared.rejected_logps, compared.kl_logps
        del compared
    losses, chosen_rewards, rejected_rewards, kl = _kto_losses(trainer, policy, ref_chosen, ref_rejected, ref_kl)
    losses = losses.nanmean()
    if alpha > 1e-6 and len(policy.chosen_logps) > 0:
        sft_loss = -policy.chosen_logps_avg
        losses += alpha * sft_loss.nanmean() / len(policy.chosen_logps) * len(batch["labels"])
    if len(chosen_rewards) > 0:
        metrics["rewards/chosen_sum"] = chosen_rewards.nansum().item()
        metrics["logps/chosen_sum"] = policy.chosen_logps.nansum().item()
        metrics["logits/chosen_sum"] = policy.chosen_logits.nansum().item()
    if len(rejected_rewards) > 0:
        metrics["rewards/rejected_sum"] = rejected_rewards.nansum().item()
        metrics["logps/rejected_sum"] = policy.rejected_logps.nansum().item()
        metrics["logits/rejected_sum"] = policy.rejected_logits.nansum().item()
    metrics["kl"] = kl.item()
    return losses


def _forward_answers(model: nn.Module, batch: Batch) -> _Answers:
    """Run a model on the answers, and without gradients on the others (``concatenated_forward``)."""
    target_logits, target_logps, target_logps_avg = _forward(model, batch)
    with torch.no_grad():
        _, kl_logps, _ = _forward(model, batch, OTHER_ANSWER)
    good = batch[IS_GOOD]
    chosen_logits, chosen_logps = target_logits[good], target_logps[good]
    rejected_logits, rejected_logps = target_logits[~good], target_logps[~good]
    average = target_logps_avg[good]
    return _Answers(chosen_logps, rejected_logps, chosen_logits, rejected_logits, kl_logps, average)


def _forward(model: nn.Module, batch: Batch, prefix: str = "") -> tuple[Tensor, Tensor, Tensor]:
    batch = _cloned(batch)
    inputs = {name: batch[f"{prefix}{name}"] for name in ("input_ids", "attention_mask")}
    inputs |= {name: batch[name] for name in IMAGES if name in batch}
    logits = model(**inputs, return_dict=True, use_cache=False).logits.to(torch.float32)
    logps, valid_length = _log_probabilities(logits, batch[f"{prefix}labels"])
    return logits, logps, logps / valid_length


def _kto_losses(
    trainer: PreferenceTrainer, policy: _Answers, ref_chosen: Tensor, ref_rejected: Tensor, ref_kl: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return losses and rewards of answers, and the divergence."""
    kl = divergence(trainer.accelerator, policy.kl_logps, ref_kl)
    return *of_answers(kl, policy.chosen_logps, policy.rejected_logps, ref_chosen, ref_rejected), kl


class _ValueHead(nn.Module):
    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.1)
        self.summary = nn.Linear(hidden_size, 1)

    def forward(self, hidden_states: Tensor) -> Tensor:
        output = self.dropout(hidden_states)
        if output.dtype != self.summary.weight.dtype:
            output = output.to(self.summary.weight.dtype)
        scores: Tensor = self.summary(output)
        return scores


class WithValueHead(nn.Module):
    """A model that also gives each token a score, in float32 (TRL 0.24, models/modeling_value_head.py)."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.pretrained_model = model
        self.config = model.config
        self.v_head = _ValueHead(model.config.hidden_size)

    def gradient_checkpointing_enable(self, **keywords: Any) -> None:
        """Recompute the layers of the model in backward."""
        self.pretrained_model.gradient_checkpointing_enable(**keywords)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, **keywords: Any) -> tuple[Tensor, None, Tensor]:
        """Return logits ``[B, S, V]`` in float32, no loss, and scores ``[B, S]``."""
        base_model_output = self.pretrained_model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            **{**keywords, "output_hidden_states": True, "past_key_values": None},
        )
        last_hidden_state = base_model_output.hidden_states[-1]
        lm_logits = base_model_output.logits
        value = self.v_head(last_hidden_state).squeeze(-1)
        if lm_logits.dtype != torch.float32:
            lm_logits = lm_logits.float()
        return lm_logits, base_model_output.loss, value


def reward_loss(trainer: PreferenceTrainer, model: nn.Module, batch: Batch) -> Tensor:
    """Return the loss of a reward model on pairs, by the scores of their last tokens (``PairwiseTrainer``)."""
    _, _, scores = model(**batch, output_hidden_states=True, return_dict=True, use_cache=False)
    pairs = batch["input_ids"].size(0) // 2
    masks, split = torch.split(batch["attention_mask"], pairs, dim=0), torch.split(scores, pairs, dim=0)
    last = [
        of_tokens.gather(dim=-1, index=mask.sum(dim=-1, keepdim=True) - 1)
        for of_tokens, mask in zip(split, masks, strict=True)
    ]
    chosen, rejected = (each.squeeze() for each in last)
    return -F.logsigmoid(chosen.float() - rejected.float()).mean()
