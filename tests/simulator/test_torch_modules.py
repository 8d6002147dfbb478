"""Predictions of PyTorch's own modules, not transformers'."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import trainatomy
from trainatomy.errors import FactoryError, SimulationError, WorkloadError
from trainatomy.results.prediction import Prediction


class Net(nn.Module):
    """Module with a layer ``part`` whose forward is ``loss(part, batch)``."""

    def __init__(self, part: nn.Module, loss: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.part = part
        self.loss = loss

    def forward(self, **batch: torch.Tensor) -> torch.Tensor:
        return self.loss(self.part, **batch).float().mean()


def predicted(part: nn.Module, loss: Callable[..., torch.Tensor], **arguments: Any) -> Prediction:
    """Predict the training of ``part``; tensors among ``arguments`` are the batch, the others settings."""
    batch = {name: value for name, value in arguments.items() if isinstance(value, torch.Tensor)}
    settings = {name: value for name, value in arguments.items() if name not in batch}
    return trainatomy.predict(Net(part, loss), batch=batch, gpu="h200", **{"optimizer": "adamw_torch", **settings})


@pytest.mark.usefixtures("kept_workspaces")
def test_ctc_accepts_cpu_tensors_as_lengths() -> None:
    def loss(part: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        frames, labels = torch.full((2,), 6), torch.tensor([3, 2])
        return functional.ctc_loss(part(x).log_softmax(-1).transpose(0, 1), y, frames, labels)

    made = predicted(nn.Linear(8, 5), loss, x=torch.randn(2, 6, 8), y=torch.randint(1, 5, (2, 3)))
    assert made.memory.peak.operation == "aten::_ctc_loss_backward"


@pytest.mark.parametrize(("length", "noted"), [(6, False), (7, True)])
def test_a_transcript_longer_than_its_sound_is_noted(length: int, noted: bool) -> None:
    def loss(part: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        frames, labels = torch.full((2,), 6), torch.tensor([3, length])
        return functional.ctc_loss(part(x).log_softmax(-1).transpose(0, 1), y, frames, labels)

    made = predicted(nn.Linear(8, 5), loss, x=torch.randn(2, 6, 8), y=torch.randint(1, 5, (2, 7)))
    found = [note for note in made.notes if "CTC is infinite" in note]
    assert bool(found) is noted and all("has 7 labels and its sound 6 frames" in note for note in found)


@pytest.mark.usefixtures("kept_workspaces")
def test_ctc_takes_one_sample_without_a_batch() -> None:
    def loss(part: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return functional.ctc_loss(part(x[0]).log_softmax(-1), y[0], torch.tensor(6), torch.tensor(3))

    made = predicted(nn.Linear(8, 5), loss, x=torch.randn(2, 6, 8), y=torch.randint(1, 5, (2, 3)))
    assert made.memory.peak.operation == "aten::_ctc_loss_backward"


def test_ctc_refuses_lengths_of_another_number_of_samples_in_pytorchs_words() -> None:
    def loss(part: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        scores = part(x).log_softmax(-1).transpose(0, 1)
        return functional.ctc_loss(scores, y, torch.full((2,), 6), torch.full((3,), 3))

    with pytest.raises(FactoryError, match="target_lengths must be of size batch_size"):
        predicted(nn.Linear(8, 5), loss, x=torch.randn(2, 6, 8), y=torch.randint(1, 5, (2, 3)))


def test_a_mean_over_all_batches_divides_by_their_number() -> None:
    part = nn.BatchNorm2d(8, momentum=None)
    made = predicted(part, lambda part, x: part(x), x=torch.randn(2, 8, 4, 4))
    assert made.memory.components.optimizer_states == 2 * 2 * 512


def test_weights_that_are_computed_before_each_forward() -> None:
    part = nn.utils.weight_norm(nn.Linear(64, 64))
    made = predicted(part, lambda part, x: part(x), x=torch.randn(2, 64))
    assert made.memory.components.weights == 64 * 64 * 4 + 2 * 512  # directions, lengths, bias
    assert not part.weight.is_meta


def test_a_lazy_module_must_run_once_first() -> None:
    with pytest.raises(WorkloadError, match="lazy modules"):
        predicted(nn.LazyLinear(4), lambda part, x: part(x), x=torch.randn(2, 64))


def test_nothing_to_train_is_reported() -> None:
    with pytest.raises(WorkloadError, match="no parameter of Net is trained"):
        predicted(nn.Linear(4, 4).requires_grad_(False), lambda part, x: part(x), x=torch.randn(2, 4))


def test_sparse_gradients_contain_rows_and_indices() -> None:
    part, settings = nn.Embedding(1000, 64, sparse=True), {"optimizer": torch.optim.SparseAdam, "max_grad_norm": 0}
    made = predicted(part, lambda part, x: part(x), x=torch.randint(0, 1000, (2, 64)), **settings)
    assert made.memory.components.optimizer_states == 2 * 1000 * 64 * 4
    assert made.time is not None and 0 < made.time.step_seconds < 0.1


def test_an_encoder_infers_with_padding() -> None:
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    mask = torch.arange(8).expand(2, 8) > 5
    encoder = nn.TransformerEncoder(layer, 2)
    made = predicted(
        encoder, lambda part, x, m: part(x, src_key_padding_mask=m), x=torch.randn(2, 8, 32), m=mask, mode="inference"
    )
    assert made.memory.peak.module == "part.layers.1.self_attn"


@pytest.mark.parametrize(
    "loss",
    [
        lambda h: functional.gaussian_nll_loss(h, h, h.abs()),
        lambda h: functional.multi_margin_loss(h, torch.zeros(4, dtype=torch.long, device=h.device)),
        lambda h: functional.multilabel_margin_loss(h, torch.zeros(4, 16, dtype=torch.long, device=h.device)),
        lambda h: torch.fake_quantize_per_tensor_affine(h, 0.1, 0, 0, 255),
        lambda h: h.repeat_interleave(torch.tensor([1, 2, 3, 1], device=h.device), 0),
        lambda h: h if torch.allclose(h, h + 1) else h * 2,
        lambda h: h * float(h.detach().cpu().numpy().sum()) * sum(h.detach()[0].tolist()) * len(f"{h!r}{h}"),
    ],
    ids=["gaussian", "margin", "margins", "quantised", "repeated", "close", "read"],
)
def test_operations_that_look_at_values(loss: Callable[[torch.Tensor], torch.Tensor]) -> None:
    made = predicted(nn.Linear(16, 16), lambda part, x: loss(part(x)), x=torch.randn(4, 16))
    assert made.memory.components.optimizer_states == 2 * (16 * 16 * 4 + 512)


def test_a_loop_that_waits_for_a_value_is_ended() -> None:
    def until_small(part: nn.Module, x: torch.Tensor) -> torch.Tensor:
        h = part(x)
        with torch.no_grad():
            left = h.detach().sum()
            while left > 0:
                pass
        return h

    with pytest.raises(SimulationError, match="does not end here"):
        predicted(nn.Linear(4, 4), until_small, x=torch.randn(2, 4))
