"""Which products of unaligned sizes Inductor pads on a simulated GPU."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import fx

from trainatomy.catalog.gpus import find_gpu
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


@pytest.mark.parametrize(
    ("shapes", "dtype", "make", "padded"),
    [
        # Attention of 197 tokens is bound by memory: it is padded where that costs nothing.
        (((6144, 197, 64), (6144, 64, 197)), torch.bfloat16, computed, True),
        (((6144, 197, 64), (6144, 64, 197)), torch.bfloat16, saved, False),
        # The logits of GPT-2 are bound by computation: copying the weights pays.
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
    assert pads(NAME, match_of(make, first, second), first, second, aten.bmm) is padded
