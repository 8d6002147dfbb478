"""Which setting to change so that a dimension becomes one that tensor cores take whole, and what the products gain.

A size is looked up among what decides sizes: the vocabulary (rows of an embedding's table), lengths of samples (alone,
or times the batch: the rows of most products), the widths of the model's configuration, the batch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from trainatomy.analysis.operation_table import Step
from trainatomy.analysis.shapes import calls_by_shape, padded_call
from trainatomy.catalog.architectures import architecture
from trainatomy.results.operation_breakdown import Padding, WastefulShape
from trainatomy.results.operations import Call
from trainatomy.workload.train import TrainSpec

_NEEDED, _BEST = "alignment", "best alignment"
_WIDTHS = (
    "hidden_size n_embd d_model dim hidden_dim intermediate_size n_inner d_ff ffn_dim encoder_ffn_dim decoder_ffn_dim "
    "moe_intermediate_size head_dim d_kv".split()
)
_NEARLY = 0.95
"""The best multiple is taken where it gains so much of what the least one does: cuBLAS likes it more than the clock
knows."""
_HOW = {
    "vocab": "a checkpoint: model.resize_token_embeddings(pad_to_multiple_of={multiple})",
    "length": "tokenizer(..., padding=True, pad_to_multiple_of={multiple}), or the collator's pad_to_multiple_of",
    "batch": "a batch of {padded} samples",
    "width": "a model that is trained from scratch: another width; a checkpoint's is what it is",
    "rows": "rows are {factor} x {value}: pad the {value}",
}


class _Role(NamedTuple):
    """``value`` is what the setting ``key`` has; a dimension is ``factor`` times that."""

    key: str
    value: int
    kind: str
    factor: int = 1


def paddings(
    shapes: Sequence[WastefulShape],
    step: Step,
    workload: Mapping[str, Any],
    price: Callable[[Call], float] | None = None,
) -> tuple[Padding, ...]:
    """One line for each size among ``shapes`` that is no good multiple, the largest gain first; without those that
    would gain nothing by the clock's ``price`` (GPU seconds of a call)."""
    calls = calls_by_shape(step)
    roles = list(_roles(workload, step))
    by_size: dict[int, list[WastefulShape]] = defaultdict(list)
    for shape in shapes:
        if shape.kind in (_NEEDED, _BEST):
            by_size[shape.size].append(shape)
    found = []
    for size, rows in by_size.items():
        role = next((role for role in roles if role.value * role.factor == size), None)
        choices = [_padding(size, rows, role, multiple, calls, price) for multiple in _multiples(rows)]
        most = max(choice.gain_seconds or 0.0 for choice in choices)
        if price is None or most > 0:
            found.append([choice for choice in choices if (choice.gain_seconds or 0.0) >= _NEARLY * most][-1])
    return tuple(sorted(found, key=lambda one: (-(one.gain_seconds or 0.0), -one.products)))


def _padding(
    size: int,
    rows: Sequence[WastefulShape],
    role: _Role | None,
    multiple: int,
    calls: Mapping[tuple[str, tuple[int, int, int, int]], Call],
    price: Callable[[Call], float] | None,
) -> Padding:
    value, factor = (role.value, role.factor) if role is not None else (size, 1)
    padded = -(-value // multiple) * multiple
    gain = None
    if price is not None:
        gain = 0.0
        for row in rows:
            call = calls[row.operation, row.shape]
            gain += (price(call) - price(padded_call(call, row.dimension, padded * factor))) * row.calls
    modules = tuple(dict.fromkeys(row.module for row in rows))
    how = "no setting of the description is this size"
    if role is not None:
        how = _HOW[role.kind].format(multiple=multiple, padded=padded)
        if factor > 1:
            how = f"{_HOW['rows'].format(factor=factor, value=value)}; {how}"
    return Padding(
        size,
        padded * factor,
        multiple,
        sum(row.calls for row in rows),
        modules,
        role.key if role is not None else "",
        value,
        padded,
        how,
        gain,
    )


def _multiples(rows: Sequence[WastefulShape]) -> list[int]:
    """What the size should be a multiple of at least, and what is best; the latter alone where the first is given."""
    return sorted({row.multiple for row in rows} | {8 * row.multiple for row in rows if row.kind == _NEEDED})


def _roles(workload: Mapping[str, Any], step: Step) -> Iterator[_Role]:
    """What decides sizes, the most particular first."""
    model, data, train = (workload.get(section) or {} for section in ("model", "data", "train"))
    for call in step.operations.calls:
        if call.name == "aten::embedding":
            yield _Role("" if model.get("factory") else "model.config.vocab_size", call.inputs[0].shape[0], "vocab")
    sized_by = "per_device_train_batch_size"
    if workload.get("mode") == "inference" and train.get("per_device_eval_batch_size"):
        sized_by = "per_device_eval_batch_size"
    batch = train.get(sized_by) or TrainSpec().per_device_train_batch_size
    for key in ("sequence_length", "target_length"):
        if data.get(key):
            yield _Role(f"data.{key}", data[key], "length")
            yield _Role(f"data.{key}", data[key], "length", batch)
    known = architecture(str(model.get("id") or ""))
    config = {**(known.config if known is not None else {}), **(model.get("config") or {})}
    for key in _WIDTHS:
        if isinstance(config.get(key), int):
            yield _Role(f"model.config.{key}", config[key], "width")
    yield _Role(f"train.{sized_by}", batch, "batch")
