"""Sentences about result values, as plain text: what the text pages, JSON version 1 and the charts say."""

from __future__ import annotations

from trainatomy.reporters.labels import FACTS
from trainatomy.results.operation_breakdown import Claim, Padding
from trainatomy.results.prediction import Fact, Prediction
from trainatomy.units import human_bytes, many


def fact_value(fact: Fact) -> str:
    """Return ``751 MiB``, ``3 steps``, or a setting as it is."""
    if fact.amount is None:
        return fact.value
    return human_bytes(fact.amount) if fact.unit == "bytes" else many(fact.amount, fact.unit.removesuffix("s"))


def fact_name(fact: Fact) -> str:
    """Return the title of a fact; a fact that an earlier version recorded has its title for a name."""
    return FACTS.get(fact.name, fact.name)


def fact_source(fact: Fact) -> str:
    """Return how the value was obtained."""
    if fact.source == "meta tensors":
        return "the real step, run on meta tensors (no data)"
    if fact.name == "allocator" and fact.source.startswith("PyTorch "):
        return f"simulated CUDA caching allocator of {fact.source}"
    return fact.source


def reasons(prediction: Prediction) -> list[str]:
    """Return why the bytes per parameter differ from the rule of thumb, one sentence each."""
    return [_reason(code, prediction) for code in prediction.bytes_per_parameter.reasons]


def _reason(code: str, prediction: Prediction) -> str:
    """Return the sentence for a code; anything else is a sentence that an earlier version recorded."""
    figures, memory = prediction.bytes_per_parameter, prediction.memory
    match code:
        case "autocast_copies_not_at_peak":
            copies = sum(line.bytes for line in memory.lines if line.name == "16-bit copies kept by autocast")
            return (
                "the rule counts a 16-bit copy of all weights (2 bytes per parameter); autocast holds "
                f"{copies / max(figures.parameters, 1):.2f} at the peak, because it copies matrix "
                "weights when they are first used and frees the copies when the forward pass ends"
            )
        case "frozen_parameters":
            return (
                f"only {figures.trainable_parameters:,} of {figures.parameters:,} parameters are trained; "
                "the others have no gradients and no optimizer states"
            )
        case "gradients_not_at_peak":
            step = memory.peak.step + 1
            return f"not all gradients exist at the peak, which is in the {memory.peak.phase} phase of step {step}"
        case "low_precision_parameters":
            model = prediction.workload.get("model")
            dtype = model.get("dtype") if isinstance(model, dict) else None
            return f"weights, gradients and optimizer states are kept in {dtype or '16 bits'}: 2 bytes each, not 4"
        case "optimizer_states_not_created":
            return "the peak is in the first step, before the optimizer has created its states"
    return code


def claim_sentence(claim: Claim) -> str:
    """Return what the guides claim of every training, with the figures of this one."""
    if claim.name == "backward_to_forward_flop":
        recompute = (
            "" if claim.recompute is None else f"; recomputation adds {claim.recompute / claim.forward:.2f} forwards"
        )
        return (
            f"Backward takes {claim.ratio:.2f} times the FLOP of forward{recompute} "
            "(the guides: twice, one gradient of the data and one of the weights for each product)."
        )
    return (
        f"Activation functions ({', '.join(claim.operators)}): for each tensor written, forward reads "
        f"{claim.forward_reads_per_write:.2g} and backward {claim.backward_reads_per_write:.2g}; "
        f"backward moves {claim.ratio:.2f} times the bytes "
        "(the guides: forward reads one and writes one, backward reads two and writes one: 1.5 times)."
    )


def padding_advice(padding: Padding) -> str:
    """Return what to change in a training script so that a size is padded."""
    advice = {
        "vocab": f"a checkpoint: model.resize_token_embeddings(pad_to_multiple_of={padding.multiple})",
        "length": (
            f"tokenizer(..., padding=True, pad_to_multiple_of={padding.multiple}), or the collator's pad_to_multiple_of"
        ),
        "batch": f"a batch of {padding.padded_value} samples",
        "width": "possible only for a model trained from scratch: a checkpoint's width is fixed",
    }.get(padding.kind, "no setting of the workload has this size")
    if padding.factor > 1:
        return f"rows are {padding.factor} x {padding.value}: pad the {padding.value}; {advice}"
    return advice
