"""Rows by index: embeddings, gathers, scatters, losses by class; zeros with a part written."""

from __future__ import annotations

from math import ceil, log2

from trainatomy.operators.cost.reach import reach_of
from trainatomy.operators.cost.traffic import moved, name_of, sized
from trainatomy.operators.cost.work import NOTHING, Chip, Work, distinct, number, on_device
from trainatomy.results.operations import Call

_SMALL_EMBEDDING = 3072
"""Up to so many tokens, embedding's backward is one kernel without a sort (aten/src/ATen/native/cuda/Embedding.cu)."""
_SAME_ROW_SECONDS = 6.3e-8
"""In that kernel, tokens that hit the same row are added one after the other: what each takes on an H200, by the trace
of a BERT, whose table of two token types is hit by all."""


def embedding(call: Call, chip: Chip) -> Work:
    """Reads as many rows as it writes."""
    out = call.outputs[0].bytes
    return sized("table.embedding", chip, 2 * out + call.inputs[-1].bytes)


def embedding_backward(call: Call, chip: Chip) -> Work:
    """Zeros for the whole table, then rows added: with a sort of the tokens where there are many."""
    gradient, ids = call.inputs[:2]
    sort = ids.elements > _SMALL_EMBEDDING
    traffic = call.outputs[0].bytes + 2 * gradient.bytes
    family = f"table.embedding_backward.{'sorted' if sort else 'direct'}"
    rows = max(call.outputs[0].shape[0], 1)
    work = sized(family, chip, traffic, 31 if sort else 2, log2(max(ids.elements, 1)), log2(rows) / 2)
    if sort:
        return work
    reach = reach_of(family)
    together = ids.elements * _SAME_ROW_SECONDS * min(1.0, 2 / rows)
    return work._replace(seconds=reach.kernel_seconds + traffic / (chip.bandwidth * reach.share) + together)


def gathered(call: Call, chip: Chip) -> Work:
    """``index``, ``gather``, ``index_select``: what is taken is read and written, and the indices read."""
    ids = sum(distinct(t) for t in on_device(call.inputs[1:]))
    out = sum(t.bytes for t in on_device(call.outputs))
    return sized(f"table.{name_of(call)}", chip, 2 * out + ids) if out else NOTHING


def scattered(call: Call, chip: Chip) -> Work:
    """``index_put``, ``scatter``, ``index_add``: values and indices are read, and what they hit is read and written; a
    copy of the target first where it is not in place."""
    tensors = on_device(call.inputs)
    if not tensors:
        return NOTHING
    target, others = tensors[0], tensors[1:]
    values = max((t.bytes for t in others), default=0)
    copied = 0 if call.written else 2 * target.bytes
    sorts = number(call, "accumulate") == "True"
    launches = 1 + (not call.written) + (20 if sorts else 0)
    return sized(f"table.{name_of(call)}", chip, sum(distinct(t) for t in others) + 2 * values + copied, launches)


def part_of_zeros(call: Call, chip: Chip) -> Work:
    """``slice_backward``, ``select_backward``, ``constant_pad_nd``: a result that is filled, then partly written."""
    part, out = call.inputs[0].bytes, call.outputs[0].bytes
    wide = part * 8 > out
    return sized(f"table.part_of_zeros.{'wide' if wide else 'narrow'}", chip, out + 2 * part, 2)


def negative_log_likelihood(call: Call, chip: Chip) -> Work:
    """Forward is one block of threads over the rows; backward fills the gradient and writes one number in each row."""
    rows = max(call.inputs[2 if "backward" in call.name else 1].elements, 1)  # a target for each, of places too
    if "backward" in call.name:
        return sized("table.nll_loss_backward", chip, call.outputs[0].bytes + rows * 64, 2)
    return Work("table.nll_loss_forward", (log2(rows),), 0.0, "fp32", rows * 40.0, 1, 3e-6 + rows * 1.2e-8)


def sorted_values(call: Call, chip: Chip) -> Work:
    """Radix sort: a histogram and eight passes for each 8 bytes of a key; ``topk`` reads a few times."""
    source = call.inputs[0]
    passes = 2 * source.itemsize if name_of(call) in ("sort", "argsort") else 3
    launches = passes + 2 if name_of(call) in ("sort", "argsort") else 2
    return sized(f"sort.{name_of(call)}", chip, moved(call) * ceil(passes / 2), launches)
