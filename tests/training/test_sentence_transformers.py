"""sentence-transformers' trainer on the CPU: real steps of a tiny model."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

import pytest
import torch
from packaging.version import parse as parse_version
from transformers.integrations.peft import MIN_PEFT_VERSION

from trainatomy.errors import WorkloadError
from trainatomy.training.model import build_model
from trainatomy.training.observer import Observer
from trainatomy.training.run import run
from trainatomy.workload import Workload

pytest.importorskip("sentence_transformers")
pytest.importorskip("datasets")

BERT = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 500,
    "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
}  # fmt: skip
CACHED = {"loss": "CachedMultipleNegativesRankingLoss", "mini_batch_size": 2}


class Events(Observer):
    def __init__(self) -> None:
        self.entries: list[str] = []
        self.losses: list[float] = []

    def loaded(self, model: Any) -> None:
        self.entries.append("loaded")
        self.model = model

    def ready(self, model: Any, optimizer: Any) -> None:
        self.entries.append("ready")

    def forward_end(self) -> None:
        self.entries.append("forward end")

    def loss_kept(self, loss: torch.Tensor) -> None:
        self.losses.append(float(loss))

    def optimizer_begin(self) -> None:
        self.entries.append("optimizer")


def described(train: dict[str, Any] | None = None, model: dict[str, Any] | None = None, **spec: Any) -> Workload:
    return Workload.from_mapping(
        {
            "model": {"class": "BertModel", "config": BERT, **(model or {})},
            "loop": "sentence_transformers",
            "sentence_transformers": spec,
            "data": {"sequence_length": 8},
            "train": {"per_device_train_batch_size": 4, **(train or {})},
        }
    )


def trained(**described_as: Any) -> Events:
    """Train two steps of batches of four samples."""
    workload, events = described(**described_as), Events()
    torch.manual_seed(0)
    run(workload, build_model(workload), device="cpu", steps=2, observer=events)
    return events


@pytest.mark.parametrize(
    "spec",
    [
        {"negatives": 1, "normalize": True},
        {"loss": "CoSENTLoss", "pooling": "cls"},
        {"loss": "ContrastiveLoss", "pooling": "lasttoken"},
        {**CACHED, "matryoshka_dims": [32, 8]},
    ],
    ids=lambda spec: str(spec.get("loss", "default")),
)
def test_a_loss_trains_with_all_events_in_order(spec: dict[str, Any]) -> None:
    events = trained(train={"gradient_accumulation_steps": 2}, **spec)
    step = ["forward end", "forward end", "optimizer"]
    assert events.entries == ["loaded", "ready", *step, *step]
    assert len(events.losses) == 4
    assert all(torch.tensor(events.losses).isfinite())


def test_mini_batches_of_a_cached_loss_train_the_same() -> None:
    whole, divided = trained(normalize=True), trained(normalize=True, **CACHED)
    assert divided.losses == pytest.approx(whole.losses, rel=1e-4)
    for one, other in zip(whole.model.parameters(), divided.model.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


@pytest.mark.skipif(
    parse_version(MIN_PEFT_VERSION) > parse_version(version("peft")),
    reason=f"this transformers adds adapters with peft {MIN_PEFT_VERSION}",
)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_adapters_have_the_dtype_of_the_weights(device: str) -> None:
    with torch.device(device):
        model = build_model(described(model={"lora": {"r": 2}, "dtype": "bfloat16"}))
    dtypes = {parameter.dtype for name, parameter in model.named_parameters() if "lora_" in name}
    assert dtypes == {torch.bfloat16}


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"loss_kwargs": {"scal": 1}}, r"loss_kwargs\.scal: .*did you mean scale"),
        ({"loss_kwargs": {"scale": -1}}, "Scale must be a positive value"),
        ({"loss_kwargs": {"similarity_fct": "dot_score"}}, "is a function"),
        ({"matryoshka_dims": [64]}, "cannot exceed the model's embedding dimension of 32"),
    ],
)
def test_arguments_that_a_loss_refuses_are_named(spec: dict[str, Any], message: str) -> None:
    with pytest.raises(WorkloadError, match=message):
        trained(**spec)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"class": "BertForMaskedLM"}, "BertForMaskedLM has a head"),
        ({"class": None, "config": {}, "id": "google-t5/t5-small"}, "set model.class: T5EncoderModel"),
    ],
)
def test_a_model_that_gives_no_embeddings_is_refused(model: dict[str, Any], message: str) -> None:
    with pytest.raises(WorkloadError, match=message):
        trained(model=model)
