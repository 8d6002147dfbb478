"""Bytes per parameter: the guides' rules of thumb beside what a training really holds.

Source of the rules: Hugging Face, "Model training anatomy": weights 4 (6 in mixed precision), gradients 4, AdamW's
states 8, 8-bit AdamW's 2, SGD's with momentum 4: 16 in fp32 and 18 in mixed precision with AdamW; inference in mixed
precision 6.
"""

from __future__ import annotations

from collections.abc import Iterator

from trainatomy.results.memory import Memory
from trainatomy.results.prediction import BytesPerParameter, ReasonCode
from trainatomy.workload.schema import Workload

_KEPT = ("weights", "optimizer_states", "gradients")


def bytes_per_parameter(workload: Workload, parameters: int, trainable: int, memory: Memory) -> BytesPerParameter:
    """Weights, optimizer states and gradients at the peak, per parameter, beside the guides' rule where they have
    one."""
    parts = {name: memory.components[name] / max(parameters, 1) for name in _KEPT}
    copies = sum(line.bytes for line in memory.lines if line.name == "16-bit copies kept by autocast")
    rule, name = _rule(workload)
    return BytesPerParameter(
        parameters,
        trainable,
        sum(parts.values()),
        parts,
        rule,
        name,
        tuple(_reasons(workload, parameters, trainable, memory, copies, rule)),
    )


def _mixed(workload: Workload) -> bool:
    return workload.train.fp16 or workload.train.bf16


def _rule(workload: Workload) -> tuple[float | None, str]:
    if workload.model.dtype != "float32":
        return None, ""
    weights = 6.0 if _mixed(workload) else 4.0
    kind = "mixed precision" if _mixed(workload) else "fp32"
    if workload.mode == "inference":
        return weights, f"inference in {kind}"
    states = _states(workload)
    if states is None:
        return None, ""
    size, label = states
    return weights + 4.0 + size, f"{kind} with {label}"


def _states(workload: Workload) -> tuple[float, str] | None:
    optim = workload.train.optim.rpartition(".")[2].lower()  # a name of TrainingArguments, or that of a class
    if "8bit" in optim and "adam" in optim:
        return 2.0, "8-bit AdamW"
    if optim.startswith("adam") and "4bit" not in optim and optim != "adamax":
        return 8.0, "AdamW"
    if optim == "sgd":
        momentum = "momentum" in (workload.train.optim_args or "")
        return (4.0, "SGD with momentum") if momentum else (0.0, "SGD")
    return None


def _reasons(
    workload: Workload, parameters: int, trainable: int, memory: Memory, copies: int, rule: float | None
) -> Iterator[ReasonCode]:
    """Yield why the bytes per parameter differ from the rule."""
    training, single = workload.mode == "training", workload.model.dtype == "float32"
    if _mixed(workload) and rule is not None and copies < 1.9 * parameters:
        yield "autocast_copies_not_at_peak"
    if trainable < parameters:
        yield "frozen_parameters"
    if training and single and memory.components.gradients < 3.9 * trainable:
        yield "gradients_not_at_peak"
    if not single:
        yield "low_precision_parameters"
    if training and memory.components.optimizer_states == 0 and memory.peak.step == 0:
        yield "optimizer_states_not_created"
