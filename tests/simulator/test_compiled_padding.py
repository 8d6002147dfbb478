"""Which products of unaligned sizes Inductor pads on a simulated GPU."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import fx

from trainatomy.catalog.gpus import find_gpu
from trainatomy.operators.cost.kernel import chip_of
from trainatomy.operators.cost.padding import padding_pays
from trainatomy.results.operations import Array
from trainatomy.simulator.compiled.device import pads

NAME = find_gpu("h200").device_name
aten = torch.ops.aten


def match_of(make: Callable[[fx.Graph], tuple[fx.Node, fx.Node]], *operands: torch.Tensor) -> Any:
    """Return what Inductor hands over: the nodes of a product's operands."""
    nodes = make(fx.Graph())
    for node, operand in zip(nodes, operands, strict=True):
        node.meta["val"] = operand
    return SimpleNamespace(kwargs=dict(zip(("mat1", "mat2"), nodes, strict=True)))


def saved(graph: fx.Graph) -> tuple[fx.Node, fx.Node]:
    return graph.placeholder("first"), graph.placeholder("second")


def computed(graph: fx.Graph) -> tuple[fx.Node, fx.Node]:
    first, second = saved(graph)
    return graph.call_function(aten.sin.default, (first,)), graph.call_function(aten.sin.default, (second,))


@contextlib.contextmanager
def tf32() -> Iterator[None]:
    """Let products of float32 use TF32."""
    matmul: Any = torch.backends.cuda.matmul
    before, matmul.fp32_precision = matmul.fp32_precision, "tf32"
    try:
        yield
    finally:
        matmul.fp32_precision = before


@pytest.mark.parametrize(
    ("shapes", "dtype", "make", "padded"),
    [
        # Attention of 197 tokens: copying both operands takes longer than padding saves.
        (((1536, 197, 64), (1536, 64, 197)), torch.float32, computed, True),
        (((1536, 197, 64), (1536, 64, 197)), torch.float32, saved, False),
        # The logits of GPT-2: copying the weights pays.
        (((8192, 768), (768, 50257)), torch.bfloat16, saved, True),
        (((8192, 768), (768, 50257)), torch.bfloat16, computed, True),
    ],
)
def test_a_product_is_padded_where_that_pays(
    shapes: tuple[tuple[int, ...], tuple[int, ...]],
    dtype: torch.dtype,
    make: Callable[[fx.Graph], tuple[fx.Node, fx.Node]],
    padded: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("triton")
    from torch._inductor.fx_passes import pad_mm

    monkeypatch.setattr(pad_mm, "is_mm_compute_bound", lambda *sizes: True)  # as on a GPU without a data sheet
    first, second = (torch.empty(shape, dtype=dtype, device="meta") for shape in shapes)
    operator = aten.bmm if first.dim() == 3 else aten.mm
    with tf32():
        assert pads(NAME, match_of(make, first, second), first, second, operator) is padded


def test_a_gradient_that_is_read_across_its_rows_is_not_copied_to_be_padded() -> None:
    """Check for BERT's logits: on an H200, Inductor pads the two products with the weights, not their gradient."""
    chip, rows, classes, width = chip_of(find_gpu("h200"), tf32=True), 8192, 30522, 768

    def array(shape: tuple[int, int], strides: tuple[int, int], storage: int) -> Array:
        return Array(shape, strides, "float32", 4, storage)

    hidden, weight = array((rows, width), (width, 1), 0), array((width, classes), (1, width), 1)
    shapes = [(rows, width), (width, classes + 2)]
    assert padding_pays(chip, "aten::mm", (hidden, weight), shapes, (True, False))
    gradient = array((classes, rows), (1, classes), 2)
    shapes = [(classes + 2, rows), (rows, width)]
    assert not padding_pays(chip, "aten::mm", (gradient, hidden), shapes, (False, True))
