"""The published layer: "Data Movement Is All You Need" (arXiv 2007.00072)."""

from __future__ import annotations

import pytest
import torch

from trainatomy.analysis.operations import Analyzed, analyze_operations
from trainatomy.analysis.published import SCOPE, published_notes, published_shares, shares_as_published
from trainatomy.results.operations import OperationBreakdown, Operations
from trainatomy.simulator.simulate import simulate
from trainatomy.training import encoder_layer as layers
from trainatomy.workload.builtin import encoder_layer, is_encoder_layer


@pytest.fixture(scope="module")
def operations() -> Operations:
    return simulate(encoder_layer(), encoder_layer().resolve_gpu()).operations


@pytest.fixture(scope="module")
def anatomy(operations: Operations) -> OperationBreakdown:
    training = Analyzed("layer", {}, encoder_layer().resolve_gpu(), scope=SCOPE, published=published_shares())
    return analyze_operations(training, operations)


def test_flop_shares_match_the_paper_within_a_tenth_of_a_percent(anatomy: OperationBreakdown) -> None:
    assert anatomy.published is not None
    for row in anatomy.groups:
        if row.phase == "step":
            assert 100 * row.flop_share == pytest.approx(anatomy.published.flop_percent[row.group], abs=0.1)


def test_flop_shares_match_when_grouped_as_the_paper_fuses_operators(operations: Operations) -> None:
    assert list(shares_as_published(operations).values()) == pytest.approx([99.80, 0.17, 0.03], abs=0.02)
    assert "99.79 / 0.17 / 0.05" in " ".join(published_notes(operations))


def test_products_match_the_paper(anatomy: OperationBreakdown) -> None:
    """2·b·m·n·k of its 6 products, and twice that in backward."""
    tokens, hidden, inner, scores = 8 * 512, 1024, 4096, 8 * 16 * 512 * 512
    forward = 2 * tokens * (4 * hidden * hidden + 2 * hidden * inner) + 2 * 2 * scores * 64
    found = {row.phase: row for row in anatomy.groups if row.group == "contraction"}
    assert (found["forward"].operations, found["forward"].flop) == (6, forward)
    assert (found["backward"].operations, found["backward"].flop) == (12, 2 * forward)
    assert anatomy.claims[0].ratio == pytest.approx(2, abs=0.01)
    assert not anatomy.unformulated and not anatomy.by_rule


def test_all_operations_belong_to_the_layer(operations: Operations) -> None:
    """Only the loss, which provides the gradient, and views are outside."""
    outside = [
        o for o in operations.operations if o.phase in ("forward", "backward") and not o.module.startswith("layer")
    ]
    kernels = [operations.calls[o.call].name for o in outside if not operations.calls[o.call].is_view]
    assert sorted(kernels) == ["aten::div", "aten::mul", "aten::mul", "aten::sum"]


def test_it_matches_torchs_encoder_layer() -> None:
    """Compare with ``torch.nn.TransformerEncoderLayer`` with the same weights, without dropout."""
    torch.manual_seed(0)
    ours = layers.EncoderLayer().eval()
    theirs = torch.nn.TransformerEncoderLayer(layers.HIDDEN, layers.HEADS, layers.INNER, batch_first=True).eval()
    pairs = {
        "self_attn.in_proj_weight": ours.attention.projected.weight.t(),
        "self_attn.in_proj_bias": ours.attention.projected.bias,
        "self_attn.out_proj.weight": ours.attention.out.weight.t(),
        "self_attn.out_proj.bias": ours.attention.out.bias,
        "linear1.weight": ours.inner.weight.t(),
        "linear1.bias": ours.inner.bias,
        "linear2.weight": ours.outer.weight.t(),
        "linear2.bias": ours.outer.bias,
        "norm1.weight": ours.attention_norm.weight,
        "norm1.bias": ours.attention_norm.bias,
        "norm2.weight": ours.norm.weight,
        "norm2.bias": ours.norm.bias,
    }
    theirs.load_state_dict(pairs)
    data = torch.randn(1, 16, layers.HIDDEN)
    with torch.no_grad():
        torch.testing.assert_close(ours(data), theirs(data), atol=1e-4, rtol=1e-4)


def test_the_gradient_arrives_at_the_layers_output() -> None:
    torch.manual_seed(0)
    model = layers.WithGradient().eval()
    data, gradient = torch.randn(1, 4, layers.HIDDEN), torch.randn(1, 4, layers.HIDDEN)
    seen: list[torch.Tensor] = []
    model.layer.register_full_backward_hook(lambda module, inputs, outputs: seen.append(outputs[0]))
    model(data, gradient)["loss"].backward()
    torch.testing.assert_close(seen[0], gradient)


def test_it_runs_on_other_gpus() -> None:
    other = encoder_layer().model_copy(update={"gpu": "h200"})
    assert is_encoder_layer(other)
