"""A step beside what others published: bytes per parameter, and shares of an encoder layer.

Compare the bytes per parameter that a training holds with the rules of thumb of Hugging Face's guides.

Source of the rules: Hugging Face, "Model training anatomy".  Bytes per parameter: weights 4 (6 in mixed precision),
gradients 4, states of AdamW 8, of 8-bit AdamW 2, of SGD with momentum 4.  With AdamW that is 16 in fp32 and 18 in
mixed precision; inference in mixed precision takes 6.

Compare an encoder layer with the shares that Ivanov et al. published (arXiv 2007.00072).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from trainatomy.analysis.operation_table import OperationTable, PredictedTime
from trainatomy.analysis.operations import Scope
from trainatomy.catalog.published import operator_shares
from trainatomy.operators.operator import GROUPS
from trainatomy.results.memory import Memory
from trainatomy.results.operations import Operations, PublishedShares
from trainatomy.results.prediction import BytesPerParameter, ReasonCode
from trainatomy.workload.builtin import MODULE, PHASES
from trainatomy.workload.schema import Workload

_COUNTED = ("weights", "optimizer_states", "gradients")


def bytes_per_parameter(workload: Workload, parameters: int, trainable: int, memory: Memory) -> BytesPerParameter:
    """Return weights, optimizer states and gradients at the peak per parameter, beside the rule of thumb if any.

    Args:
        workload: The training.
        parameters: Number of the model's parameters.
        trainable: Number of those that are trained.
        memory: The predicted memory.
    """
    parts = {name: memory.components[name] / max(parameters, 1) for name in _COUNTED}
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


def _is_mixed_precision(workload: Workload) -> bool:
    return workload.train.fp16 or workload.train.bf16


_SINGLE = ("float32", "auto")
"""Values of ``model.dtype`` for weights in float32; a prediction passes the dtype that ``auto`` stands for."""


def _rule(workload: Workload) -> tuple[float | None, str]:
    """Return the rule's bytes per parameter and its name (``None`` and empty if there is none)."""
    if workload.model.dtype not in _SINGLE or workload.model.is_quantised:
        return None, ""
    weights = 6.0 if _is_mixed_precision(workload) else 4.0
    kind = "mixed precision" if _is_mixed_precision(workload) else "fp32"
    if workload.mode != "training":
        return weights, f"inference in {kind}"
    states = _optimizer_rule(workload)
    if states is None:
        return None, ""
    size, label = states
    return weights + 4.0 + size, f"{kind} with {label}"


def _optimizer_rule(workload: Workload) -> tuple[float, str] | None:
    """Return the rule's bytes of optimizer state per parameter and the optimizer's name."""
    optim = workload.train.optim.rpartition(".")[2].lower()  # TrainingArguments.optim, or the path of a class
    if "8bit" in optim and "adam" in optim:
        return 2.0, "8-bit AdamW"
    if optim.startswith("adam") and "4bit" not in optim and optim != "adamax":
        return 8.0, "AdamW"
    if optim == "sgd":
        momentum = "momentum" in (workload.train.optim_args or "")
        return (4.0, "SGD with momentum") if momentum else (0.0, "SGD")
    return None


def _is_sharded(workload: Workload) -> bool:
    """Return whether a GPU holds only a part of the weights or of the optimizer states."""
    parallel = workload.parallel
    shards = parallel.strategy in ("fsdp1", "fsdp2", "zero1") or bool(workload.train.fsdp or workload.train.deepspeed)
    return parallel.world_size > 1 and (shards or parallel.tp_size > 1)


def _reasons(
    workload: Workload, parameters: int, trainable: int, memory: Memory, copies: int, rule: float | None
) -> Iterator[ReasonCode]:
    """Yield why the bytes per parameter differ from the rule."""
    training, single = workload.mode == "training", workload.model.dtype in _SINGLE
    autocasts = _is_mixed_precision(workload) and workload.train.deepspeed is None  # its weights are in 16 bits
    if autocasts and rule is not None and copies < 1.9 * parameters:
        yield "autocast_copies_not_at_peak"
    if trainable < parameters:
        yield "frozen_parameters"
    if training and single and memory.components.gradients < 3.9 * trainable:
        yield "gradients_not_at_peak"
    if workload.model.is_quantised:
        yield "quantised_parameters"
    elif not single:
        yield "low_precision_parameters"
    if _is_sharded(workload):
        yield "sharded"
    if training and memory.components.optimizer_states == 0 and memory.peak.step == 0:
        yield "optimizer_states_not_created"


SCOPE = Scope(PHASES, MODULE)
_ATTENTION = f"{MODULE}.attention"
_FUSED_WITH_SOFTMAX = frozenset({"aten::mul", "aten::native_dropout", "aten::native_dropout_backward"})


def published_shares() -> PublishedShares:
    """Return the published shares of the three groups (``GROUPS`` is in the paper's order)."""
    source, shares = operator_shares()
    named = dict(zip(GROUPS, shares, strict=True))
    return PublishedShares(
        source,
        {group: share.flop_percent for group, share in named.items()},
        {group: share.time_percent for group, share in named.items()},
    )


def shares_as_published(
    operations: Operations, times: Sequence[PredictedTime | None] | None = None
) -> dict[str, float]:
    """Return percent of FLOP (or of ``times``, if given) by group, with operators grouped as the paper fuses them.

    There the attention's scaling and dropout belong to its softmax.
    """
    table = OperationTable(operations, keep=SCOPE.selects(operations))
    parts = dict.fromkeys(GROUPS, 0.0)
    for index, operation, work in table.kernels():
        moved = operation.module == _ATTENTION and operations.calls[operation.call].name in _FUSED_WITH_SOFTMAX
        group = "normalisation" if moved else work.group
        assert group is not None
        timed = times[index] if times is not None else None
        amount = float(work.flop or 0) if times is None else timed.seconds if timed is not None else 0.0
        parts[group] += amount * operation.repeats
    whole = sum(parts.values())
    return {group: 100 * part / whole for group, part in parts.items()}


def published_notes(operations: Operations, times: Sequence[PredictedTime | None] | None = None) -> tuple[str, ...]:
    """Explain why the shares differ from the published ones."""
    flop = " / ".join(f"{share:.2f}" for share in shares_as_published(operations).values())
    counted = (
        "the paper counts the attention's scaling and dropout as part of its softmax; counted that way, FLOP are "
        f"{flop} %"
    )
    if times is not None:
        shares = " / ".join(f"{share:.1f}" for share in shares_as_published(operations, times).values())
        counted += f" and predicted times {shares} %"
    return (
        "forward and backward of the layer alone: the loss, the copy of the batch and the optimizer, which are not in "
        "the paper, are left out",
        counted,
        "copies that reorder attention heads for a batched product count as element-wise operators here; the paper's "
        "list of operators has none",
        "the published times are of PyTorch in 2020 on a V100; today's kernels and other GPUs differ",
    )
