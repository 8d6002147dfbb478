"""Operators that launch no kernel, and values that the CPU reads."""

from __future__ import annotations

from trainatomy.operators.operator import Operator
from trainatomy.operators.table.family import family, row

WITHOUT_KERNEL = family(
    Operator("", kernel=False),
    row("empty empty_like empty_strided empty_permuted new_empty resize set lift_fresh detach"),
    # autograd's, for a gradient that is written in part; the costs of batch norms and of quantised layers contain their
    # empty tensors, priced like pointwise operations
    row("new_empty_strided", launch="view"),
    row("alias view _unsafe_view _reshape_alias expand t transpose permute select slice unsqueeze squeeze"),
    row("as_strided split split_with_sizes unbind chunk diagonal unfold view_as_real view_as_complex"),
    row("record_stream is_same_size is_pinned sym_size _version _has_compatible_shallow_copy_type item"),
    row("fsdp::record_grad_output_stream", launch="view"),  # since torch 2.15; does nothing on a GPU with CUDA
)

READ_BY_CPU = family(
    Operator("", sync="value"),
    row("_local_scalar_dense", cost="elementwise:transfer"),
    row("equal is_nonzero"),
    row("_assert_async", group="elementwise", flop=0, why="a check", sync=""),
)

PYTHON = family(Operator("", kernel=False, launch="view"), row("python::replicate numpy::concatenate numpy::convert"))
"""Python of PyTorch's, and work on arrays in host memory, between operations; ``timing.launch`` knows what it costs."""

HOST = (*PYTHON, *WITHOUT_KERNEL, *READ_BY_CPU)
