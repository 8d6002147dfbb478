"""axolotl's losses of preferences: those of TRL, with the log-probabilities of tokens by axolotl's Triton kernels.

Sources: axolotl 0.19, core/trainers/dpo/trainer.py, core/trainers/trl.py and monkeypatch/trainer/utils.py, which
replaces two functions of TRL; TRL 1.9, trainer/dpo_trainer.py (``_compute_loss``) and experimental/orpo and cpo
(``concatenated_inputs``).  Names are kept as long as the trainers keep them: a tensor lives as long as its name.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from trainatomy.libraries import import_library
from trainatomy.training.preference.batches import CHOSEN, REJECTED, Batch
from trainatomy.training.preference.losses import BETA

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor, nn

    from trainatomy.training.loops.preference import PreferenceTrainer

_LIBRARY = "axolotl.monkeypatch.trainer.utils"


def selected_log_probabilities(logits: Tensor, tokens: Tensor) -> Tensor:
    """Return the log-probability of each token ``[B, S]``, by one kernel for all of them."""
    found: Tensor = import_library(_LIBRARY, "preference.trainer", install="axolotl").selective_log_softmax(
        logits, tokens
    )
    return found


def concatenated(batch: Batch) -> Batch:
    """Join both answers of each pair on the GPU (``concatenated_inputs``)."""
    names = [name.removeprefix(CHOSEN) for name in batch if name.startswith(CHOSEN)]
    return {name: torch.cat((batch[f"{CHOSEN}{name}"], batch[f"{REJECTED}{name}"]), dim=0) for name in names}


@contextlib.contextmanager
def _without_checkpointing(trainer: PreferenceTrainer) -> Iterator[None]:
    """Switch checkpointing off, as TRL does around the reference."""
    model: Any = trainer.accelerator.unwrap_model(trainer.model)
    if not model.is_gradient_checkpointing:
        yield
        return
    model.gradient_checkpointing_disable()
    yield
    model.gradient_checkpointing_enable(trainer.args.gradient_checkpointing_kwargs)


def dpo_loss(trainer: PreferenceTrainer, model: nn.Module, batch: Batch) -> Tensor:
    """Return the loss of pairs beside a reference."""
    kind, metrics = trainer.preference.loss_type, dict[str, float]()
    inputs = {name: value for name, value in batch.items() if name != "completion_mask"}
    outputs = model(**inputs, use_cache=False)
    logits = outputs.logits[..., :-1, :]
    labels = batch["input_ids"][..., 1:]
    mask = batch["completion_mask"][..., 1:]
    per_token = selected_log_probabilities(logits, labels)
    per_token[mask == 0] = 0.0
    logps = per_token.sum(dim=1)
    chosen_logps, rejected_logps = logps.chunk(2, dim=0)
    with _without_checkpointing(trainer), trainer.reference(model) as reference:
        ref_outputs = reference(**inputs, use_cache=False)
    ref_logits = ref_outputs.logits[..., :-1, :]
    with torch.no_grad():
        ref_per_token = selected_log_probabilities(ref_logits, labels)
        ref_per_token[mask == 0] = 0.0
        ref_chosen_logps, ref_rejected_logps = ref_per_token.sum(dim=1).chunk(2, dim=0)
    chosen_logratios = chosen_logps - ref_chosen_logps
    rejected_logratios = rejected_logps - ref_rejected_logps
    delta = chosen_logratios - rejected_logratios
    if kind == "hinge":
        per_sequence = torch.relu(1 - BETA * delta)
    elif kind == "ipo":
        chosen_mask, rejected_mask = batch["completion_mask"].chunk(2, dim=0)
        chosen_mean = chosen_logratios / chosen_mask.sum(dim=1).clamp(min=1.0)
        rejected_mean = rejected_logratios / rejected_mask.sum(dim=1).clamp(min=1.0)
        per_sequence = (chosen_mean - rejected_mean - 1 / (2 * BETA)) ** 2
    else:
        per_sequence = -F.logsigmoid(BETA * delta)
    loss: Tensor = 0.0 + per_sequence.mean() * 1.0
    gather = trainer.accelerator.gather_for_metrics
    entropies = import_library(_LIBRARY, "preference.trainer", install="axolotl").entropy_from_logits(logits.detach())
    entropy_sum = gather((entropies * mask).sum()).sum()
    total = gather(mask.sum()).sum()
    metrics["entropy"] = (entropy_sum / total).item() if total > 0 else 0.0
    metrics["tokens"] = gather(batch["attention_mask"].sum()).sum().item()
    of_answers = logits.detach().chunk(2, dim=0)
    masks = mask.chunk(2, dim=0)
    sums = [part[of.bool()].mean(-1).sum() for part, of in zip(of_answers, masks, strict=True)]
    counts = [of.sum() for of in masks]
    metrics["logits"] = sum(gather(each).sum().item() for each in (*sums, *counts))
    predictions = of_answers[0].argmax(dim=-1)
    chosen_mask = masks[0].bool()
    correct = (predictions == labels[: len(labels) // 2]) & chosen_mask
    total = chosen_mask.sum()
    correct_tokens = gather(correct.sum())
    total_sum = gather(total).sum()
    metrics["accuracy"] = (correct_tokens.sum() / total_sum).item() if total_sum > 0 else 0.0
    chosen_rewards = BETA * chosen_logratios.detach()
    rejected_rewards = BETA * rejected_logratios.detach()
    metrics["rewards"] = gather(chosen_rewards).mean().item() + gather(rejected_rewards).mean().item()
    metrics["accuracies"] = gather((chosen_rewards > rejected_rewards).float()).mean().item()
    metrics["margins"] = gather(chosen_rewards - rejected_rewards).mean().item()
    metrics["logps"] = gather(chosen_logps).mean().item() + gather(rejected_logps).mean().item()
    return loss
