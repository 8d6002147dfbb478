"""Tensors that older software saved: the input of softmax before PyTorch 1.11, and fp32 scores under autocast."""

from __future__ import annotations

import pytest
import torch
from executed import predicted
from torch import nn

from trainatomy.simulator.releases import attention_of_2022, functions_of, software_of
from trainatomy.training.adamw_hf import AdamW
from trainatomy.workload.builtin import notebook
from trainatomy.workload.schema import Workload


def saved(function: object, *arguments: object) -> list[tuple[torch.Size, torch.dtype]]:
    """Return shapes and dtypes of the tensors that a function saves for backward."""
    kept: list[tuple[torch.Size, torch.dtype]] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append((tensor.shape, tensor.dtype))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        function(*arguments)  # type: ignore[operator]
    return kept


@pytest.mark.parametrize("builtin", [torch.softmax, torch.log_softmax])
def test_softmax_kept_its_input_until_1_11(builtin: object) -> None:
    assert functions_of((1, 11)) == functions_of((2, 13)) == {}
    old = functions_of((1, 10))[builtin]
    scores = torch.randn(3, 5, requires_grad=True)
    assert len(saved(builtin, scores, -1)) == 1
    assert saved(old, scores, -1) == [(scores.shape, torch.float32)] * 2


@pytest.mark.parametrize("builtin", [torch.softmax, torch.log_softmax])
@pytest.mark.parametrize("dtype", [None, torch.float64])
def test_values_and_gradients_match_current_releases(builtin: object, dtype: torch.dtype | None) -> None:
    scores, weights = torch.randn(3, 5, requires_grad=True), torch.randn(3, 5)
    results = []
    for function in (builtin, functions_of((1, 10))[builtin]):
        output = function(scores, 1, dtype=dtype)  # type: ignore[operator]
        (gradient,) = torch.autograd.grad((output * weights).sum(), scores)
        results.append((output, gradient))
    torch.testing.assert_close(results[0], results[1])


def test_half_to_float_saves_the_half_input() -> None:
    scores = torch.empty(2, 4, dtype=torch.float16, device="meta", requires_grad=True)
    kept = saved(functions_of((1, 10))[torch.softmax], scores, -1, torch.float32)
    assert [dtype for _, dtype in kept] == [torch.float16, torch.float32]


def test_attention_of_2022_is_attention() -> None:
    query, key, value = torch.randn(3, 2, 4, 6, 8).unbind()
    output, probabilities = attention_of_2022(nn.Identity(), query, key, value, None)
    expected = nn.functional.scaled_dot_product_attention(query, key, value)
    torch.testing.assert_close(output, expected.transpose(1, 2))
    assert probabilities.shape == (2, 4, 6, 6)


def test_a_mask_of_fp32_lifts_half_scores() -> None:
    query, key, value = torch.randn(3, 1, 1, 6, 8, dtype=torch.bfloat16).unbind()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert attention_of_2022(nn.Identity(), query, key, value, None)[1].dtype == torch.float32


def test_transformers_is_restored() -> None:
    mapping = pytest.importorskip("transformers.modeling_utils").ALL_ATTENTION_FUNCTIONS._global_mapping
    before = dict(mapping)
    with software_of("2022"):
        assert mapping["eager"] is attention_of_2022
    with software_of(None):
        assert mapping == before
    assert mapping == before


def test_adamw_of_transformers_steps_as_adamw_does() -> None:
    """Compare both without weight decay and with negligible epsilon, where the formulas are equal."""
    start = torch.randn(4, 3)
    ends = []
    for kind in (AdamW, torch.optim.AdamW):
        parameter = nn.Parameter(start.clone())
        optimizer = kind([parameter], lr=0.1, eps=1e-30, weight_decay=0.0)
        for step in range(3):
            parameter.grad = start.cos() * (step + 1)
            optimizer.step()
        ends.append(parameter.detach())
    torch.testing.assert_close(ends[0], ends[1])


def test_adamw_of_transformers_decays_after_its_step() -> None:
    parameter = nn.Parameter(torch.ones(1))
    parameter.grad = torch.zeros(1)
    AdamW([parameter], lr=0.1, weight_decay=0.5).step()
    assert parameter.item() == pytest.approx(1 - 0.1 * 0.5)


def test_the_option_alone_predicts_what_the_comparison_does() -> None:
    alone = Workload.from_mapping({**notebook()[0].to_mapping(), "era": "2022", "gpu": "v100-16gb"})
    found, compared = predicted(alone), predicted(notebook("2022")[0])
    assert found.memory == compared.memory
    assert found.leading_notes == compared.leading_notes and "era 2022" in found.leading_notes[0]
