"""Find the setting to change so that a dimension suits tensor cores, and predict what its products gain.

A dimension is traced to a setting of the same size: the vocabulary (rows of an embedding table), the length of a
sample (alone, or times the batch: the rows of most products), a width in the model's configuration, or the batch size.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from trainatomy.analysis.matmul_shapes import calls_by_shape, padded_call
from trainatomy.analysis.operation_table import OperationTable
from trainatomy.catalog.architectures import architecture
from trainatomy.results.operation_breakdown import Padding, WastefulShape
from trainatomy.results.operations import Call
from trainatomy.workload.train import TrainSpec

_NEEDED, _BEST = "alignment", "best alignment"
_WIDTHS = (
    "hidden_size n_embd d_model dim hidden_dim intermediate_size n_inner d_ff ffn_dim encoder_ffn_dim decoder_ffn_dim "
    "moe_intermediate_size head_dim d_kv".split()
)
_PREFER_LARGER = 0.95
"""A larger multiple is preferred if it gains at least this share of the best gain: cuBLAS benefits from it more than
the timing model knows."""


class _Role(NamedTuple):
    """A setting that decides a dimension: ``factor`` times the ``value`` of the setting ``key``.

    ``kind``: vocab, length, width or batch.
    """

    key: str
    value: int
    kind: str
    factor: int = 1


def paddings(
    shapes: Sequence[WastefulShape],
    table: OperationTable,
    workload: Mapping[str, Any],
    gpu_seconds: Callable[[Call], float] | None = None,
) -> tuple[Padding, ...]:
    """Suggest a padded size for each misaligned size among ``shapes``, the largest gain first.

    Args:
        shapes: The wasteful shapes of the step.
        table: The step's operations.
        workload: The description, whose settings are searched for the sizes.
        gpu_seconds: Predicts the GPU seconds of a call; suggestions that gain nothing are left out.
    """
    calls = calls_by_shape(table)
    roles = list(_roles(workload, table))
    by_size: dict[int, list[WastefulShape]] = defaultdict(list)
    for shape in shapes:
        if shape.kind in (_NEEDED, _BEST):
            by_size[shape.size].append(shape)
    found = []
    for size, rows in by_size.items():
        role = next((role for role in roles if role.value * role.factor == size), None)
        choices = [_padding(size, rows, role, multiple, calls, gpu_seconds) for multiple in _multiples(rows)]
        most = max(choice.gain_seconds or 0.0 for choice in choices)
        if gpu_seconds is None or most > 0:
            found.append([choice for choice in choices if (choice.gain_seconds or 0.0) >= _PREFER_LARGER * most][-1])
    return tuple(sorted(found, key=lambda one: (-(one.gain_seconds or 0.0), -one.products)))


def _padding(
    size: int,
    rows: Sequence[WastefulShape],
    role: _Role | None,
    multiple: int,
    calls: Mapping[tuple[str, tuple[int, int, int, int]], Call],
    gpu_seconds: Callable[[Call], float] | None,
) -> Padding:
    value, factor = (role.value, role.factor) if role is not None else (size, 1)
    padded = -(-value // multiple) * multiple
    gain = None
    if gpu_seconds is not None:
        gain = 0.0
        for row in rows:
            call = calls[row.operation, row.shape]
            gain += (gpu_seconds(call) - gpu_seconds(padded_call(call, row.dimension, padded * factor))) * row.calls
    modules = tuple(dict.fromkeys(row.module for row in rows))
    return Padding(
        size,
        padded * factor,
        multiple,
        sum(row.calls for row in rows),
        modules,
        role.key if role is not None else "",
        value,
        padded,
        role.kind if role is not None else "",
        factor,
        gain,
    )


def _multiples(rows: Sequence[WastefulShape]) -> list[int]:
    """Return the multiples to try: the required one, and the best one for every row that misses the required one."""
    return sorted({row.multiple for row in rows} | {8 * row.multiple for row in rows if row.kind == _NEEDED})


def _roles(workload: Mapping[str, Any], table: OperationTable) -> Iterator[_Role]:
    """Yield the settings that decide dimensions, the most specific first."""
    model, data, train = (workload.get(section) or {} for section in ("model", "data", "train"))
    for call in table.operations.calls:
        if call.name == "aten::embedding":
            yield _Role("" if model.get("factory") else "model.config.vocab_size", call.inputs[0].shape[0], "vocab")
    sized_by = "per_device_train_batch_size"
    if workload.get("mode", "training") != "training" and train.get("per_device_eval_batch_size"):
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
