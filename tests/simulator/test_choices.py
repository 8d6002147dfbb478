"""Masks of choices among computed scores: an equal share for each choice."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional as F

from trainatomy.results.operations import CHOSEN_ROWS, SAME_ROW
from trainatomy.simulator.process import SimulatedProcess

TOKENS, CHOICES, EACH = 96, 8, 2
ROWS = TOKENS * EACH // CHOICES


@pytest.fixture
def noted(process: SimulatedProcess) -> list[str]:
    """Return the operations that select by values of which nothing is assumed."""
    found: list[str] = []
    process.recorder.sizes.assumes = found.append
    return found


def scores() -> torch.Tensor:
    return torch.randn(TOKENS, CHOICES, device="cuda")


def marked(chosen: torch.Tensor) -> torch.Tensor:
    return torch.zeros(TOKENS, CHOICES, device="cuda").scatter(1, chosen, 1.0)


@pytest.mark.parametrize(
    ("select", "rows"),
    [
        (lambda: torch.where(scores().topk(EACH).indices == 3)[0], ROWS),
        (lambda: (scores().topk(EACH, dim=-1)[1].reshape(-1) == 0).nonzero(), ROWS),
        (lambda: scores()[scores().argmax(dim=1) == 1], TOKENS // CHOICES),
        (lambda: scores()[scores().max(1)[1].to(torch.int32) == 1], TOKENS // CHOICES),
        (lambda: scores()[(scores().topk(EACH).indices == 5).any(dim=-1)], ROWS),
        (lambda: torch.where(F.one_hot(scores().topk(EACH)[1], CHOICES).permute(2, 1, 0)[4])[0], ROWS),
        (lambda: scores()[torch.multinomial(scores().softmax(-1), 1)[:, 0] == 2], TOKENS // CHOICES),
        (lambda: marked(scores().topk(EACH).indices).nonzero(), TOKENS * EACH),
    ],
    ids=["topk", "rows of topk", "argmax", "max", "any", "one_hot", "multinomial", "scatter"],
)  # fmt: skip
def test_an_equal_share_is_selected(
    process: SimulatedProcess, noted: list[str], select: Callable[[], torch.Tensor], rows: int
) -> None:
    assert len(select()) == rows
    assert "choice" in process.recorder.values.deciding
    assert not noted


@pytest.mark.parametrize(
    "select",
    [
        lambda: scores()[scores()[:, 0] > 0],
        lambda: scores()[scores().topk(EACH).values[:, 0] == 3],
        lambda: scores()[scores().argsort(dim=0)[:, 0] == 3],
    ],
    ids=["values", "values of topk", "order"],
)
def test_everything_is_selected_by_other_masks(noted: list[str], select: Callable[[], torch.Tensor]) -> None:
    assert len(select()) == TOKENS
    assert noted == ["aten::index"]


def test_gradients_of_chosen_rows_say_so(process: SimulatedProcess) -> None:
    """As in GptOss: biases are picked by sorted experts, tokens by where the sort found them."""
    biases = torch.zeros(CHOICES, 64, device="cuda", requires_grad=True)
    tokens = torch.randn(TOKENS, 64, device="cuda", requires_grad=True)
    others = torch.zeros(CHOICES, 64, device="cuda", requires_grad=True)
    experts = scores().topk(EACH).indices.reshape(-1)
    order = experts.argsort()
    known = torch.arange(TOKENS * EACH).remainder(CHOICES).to("cuda")
    operations = process.recorder.operations
    operations.start(1)
    (biases[experts[order]] + tokens[order // EACH] + others[known]).sum().backward()
    calls = [call for call in operations.operations.calls if call.name.startswith("aten::index_put")]
    found = sorted((call.inputs[0].shape[0], CHOSEN_ROWS in call.numbers) for call in calls)
    assert found == [(CHOICES, False), (CHOICES, True), (TOKENS, False)]


def test_gradients_of_one_row_say_so(process: SimulatedProcess) -> None:
    biases = torch.zeros(CHOICES, 64, device="cuda", requires_grad=True)
    same, single, apart = (torch.tensor(rows).to("cuda") for rows in ([3] * TOKENS, [3], [3, 4, 3]))
    operations = process.recorder.operations
    operations.start(1)
    for rows in (same, single, apart):
        biases[rows].sum().backward()
    calls = [call for call in operations.operations.calls if call.name.startswith("aten::index_put")]
    assert [SAME_ROW in call.numbers for call in calls] == [True, False, False]
