"""``predict`` for a live module, and invariants of every prediction."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import trainatomy
from trainatomy.analysis.memory import COMPONENTS
from trainatomy.errors import FactoryError, SimulationError, WorkloadError
from trainatomy.results.prediction import Prediction
from trainatomy.workload import Workload

SOURCE = """
import torch
import torch.nn.functional as F
from torch import nn


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(1000, 64)
        self.body = nn.ModuleList([nn.TransformerEncoderLayer(64, 4, 128, batch_first=True) for _ in range(2)])
        self.norm = nn.LayerNorm(64)
        self.head = nn.Linear(64, 1000, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.ones(64))

    def forward(self, ids, labels):
        hidden = self.embedding(ids) * self.scale
        for layer in self.body:
            hidden = layer(hidden)
        return F.cross_entropy(self.head(self.norm(hidden)).flatten(0, 1), labels.flatten())


def model():
    return Tagger()


def batch(size):
    ids = torch.arange(size * 32).reshape(size, 32) % 1000
    return {"ids": ids, "labels": ids}
"""
BATCH_SIZE = 4


@pytest.fixture
def source(tmp_path: Path) -> Path:
    file = tmp_path / "tagger.py"
    file.write_text(SOURCE)
    return file


@pytest.fixture
def space(source: Path) -> dict[str, Any]:
    """Execute the file and return its names, as live objects."""
    names: dict[str, Any] = {"__name__": "tagger"}
    exec(compile(SOURCE, str(source), "exec"), names)
    return names


@pytest.fixture
def tagger(space: dict[str, Any]) -> nn.Module:
    torch.manual_seed(0)
    made: nn.Module = space["model"]()
    return made


@pytest.fixture
def batch(space: dict[str, Any]) -> Mapping[str, torch.Tensor]:
    made: Mapping[str, torch.Tensor] = space["batch"](BATCH_SIZE)
    return made


def consistent(found: Prediction) -> None:
    """Check the invariants of every prediction."""
    memory = found.memory
    parts = memory.components.as_dict()
    assert sum(parts.values()) == memory.components.total_bytes == memory.device_bytes
    assert sum(parts[name] for name in COMPONENTS) == memory.peak_allocated_bytes
    assert memory.device_bytes == memory.peak_reserved_bytes + memory.components.context
    assert memory.peak_requested_bytes <= memory.peak_allocated_bytes <= memory.peak_reserved_bytes
    assert found.room_bytes == found.gpu.memory_bytes - memory.device_bytes
    assert found.fits == (found.out_of_memory is None) == (found.verdict != "does not fit")
    assert sum(line.bytes for line in memory.lines) == memory.peak_allocated_bytes
    assert sum(share.activation_bytes for share in found.modules) == memory.components.activations
    assert {fact.basis for fact in found.facts} <= {"measured", "computed", "assumed"}
    assert found.versions["torch"] == metadata.version("torch")


@pytest.mark.parametrize(
    ("optimizer", "settings"),
    [
        ("adamw_torch_fused", {"bf16": True}),
        ("adamw_torch", {"fp16": True, "gradient_accumulation_steps": 2}),
        ("adafactor", {}),
        (torch.optim.SGD, {"max_grad_norm": 0.0}),
    ],
)
def test_a_live_module_is_predicted_as_from_a_factory(
    tagger: nn.Module, batch: Any, source: Path, optimizer: Any, settings: dict[str, Any]
) -> None:
    live = trainatomy.predict(tagger, batch=batch, optimizer=optimizer, gpu="a100-80gb", **settings)
    name = optimizer if isinstance(optimizer, str) else "torch.optim.SGD"
    workload = Workload.from_mapping({
        "loop": "pytorch",
        "model": {"factory": f"{source}:model"},
        "data": {"factory": f"{source}:batch"},
        "train": {"per_device_train_batch_size": BATCH_SIZE, "optim": name, **settings},
        "gpu": "a100-80gb",
    })  # fmt: skip
    built = trainatomy.predict(workload)
    assert live.memory == built.memory
    assert live.modules == built.modules
    consistent(live)


def seen(module: nn.Module) -> list[tuple[Any, ...]]:
    tensors = [*module.named_parameters(remove_duplicate=False), *module.named_buffers()]
    return [(name, id(t), t.device, t.dtype, t.requires_grad, t.grad, t.data_ptr(), t._version) for name, t in tensors]


def test_the_module_is_not_touched(tagger: nn.Module, batch: Any) -> None:
    tagger.eval()
    tagger.body[0].requires_grad_(False)  # type: ignore[index]
    before, values = seen(tagger), copy.deepcopy(tagger.state_dict())
    copies = {name: tensor.clone() for name, tensor in batch.items()}
    trainatomy.predict(tagger, batch=batch, optimizer="adamw_torch", gpu="h100-sxm", bf16=True)
    assert seen(tagger) == before
    assert all(torch.equal(values[name], value) for name, value in tagger.state_dict().items())
    assert all(torch.equal(copies[name], tensor) for name, tensor in batch.items())
    assert not any(module.training for module in tagger.modules())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in tagger.modules())
    assert tagger(**batch).isfinite()
    assert not torch.cuda.is_initialized()


def test_tied_weights_are_counted_once(tagger: nn.Module, batch: Any) -> None:
    found = trainatomy.predict(tagger, batch=batch)
    assert found.bytes_per_parameter.parameters == sum(p.numel() for p in tagger.parameters())
    untied = copy.deepcopy(tagger)
    untied.head.weight = nn.Parameter(untied.head.weight.detach().clone())  # type: ignore[union-attr]
    apart = trainatomy.predict(untied, batch=batch)
    assert apart.memory.model_bytes - found.memory.model_bytes == 1000 * 64 * 4


def test_frozen_weights_have_no_gradients_and_no_states(tagger: nn.Module, batch: Any) -> None:
    tagger.requires_grad_(False)
    tagger.norm.requires_grad_(True)  # type: ignore[union-attr, operator]
    found = trainatomy.predict(tagger, batch=batch, timeline=True)
    assert found.bytes_per_parameter.trainable_parameters == 128
    assert max(point.components["gradients"] for point in found.timeline) == 2 * 512
    assert found.memory.components.gradients <= 2 * 512


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_of_16_bits_are_described_as_such(tagger: nn.Module, batch: Any, dtype: torch.dtype) -> None:
    found = trainatomy.predict(tagger.to(dtype), batch=batch)
    assert found.workload["model"] == {"class": "Tagger", "dtype": str(dtype).removeprefix("torch.")}
    assert found.bytes_per_parameter.rule is None
    assert 0.5 < found.memory.model_bytes / (2 * sum(p.numel() for p in tagger.parameters())) < 1.1


def test_a_batch_may_be_made_by_a_function_or_lie_on_meta(tagger: nn.Module, batch: Any, space: Any) -> None:
    expected = trainatomy.predict(tagger, batch=batch).memory
    by_function = trainatomy.predict(tagger, batch=space["batch"], per_device_train_batch_size=BATCH_SIZE)
    on_meta = trainatomy.predict(tagger, batch={name: tensor.to("meta") for name, tensor in batch.items()})
    assert by_function.memory == on_meta.memory == expected
    assert by_function.workload["train"] == {"per_device_train_batch_size": BATCH_SIZE}


def test_a_batch_on_meta_has_tokens_of_every_vocabulary_and_masks_no_position() -> None:
    from trainatomy.simulator.live import batches_of

    whole, mask, sound = (torch.empty(2, 3, dtype=dtype, device="meta") for dtype in (torch.int64, torch.bool, None))
    make, rows = batches_of({"ids": whole, "mask": mask, "sound": sound})
    made = make(2)
    assert rows == 2 and bool(made["mask"].all())
    assert bool((made["ids"] == 1).all()) and not made["sound"].any()


def test_a_model_of_transformers_needs_no_batch() -> None:
    from transformers import BertConfig, BertForSequenceClassification

    config = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    live = BertForSequenceClassification(BertConfig(vocab_size=200, **config))
    settings = {"per_device_train_batch_size": 2, "fp16": True}
    found = trainatomy.predict(live, data={"sequence_length": 16}, loop="trainer", **settings)
    described = Workload.from_mapping({
        "model": {"class": "BertForSequenceClassification", "config": {**config, "vocab_size": 200}},
        "data": {"sequence_length": 16},
        "train": settings,
    })  # fmt: skip
    assert found.memory == trainatomy.predict(described).memory
    consistent(found)


def test_a_module_that_needs_a_batch_is_reported(tagger: nn.Module) -> None:
    with pytest.raises(WorkloadError, match="a batch is needed to train Tagger"):
        trainatomy.predict(tagger)


def test_a_batch_without_a_size(tagger: nn.Module) -> None:
    with pytest.raises(WorkloadError, match="no tensor with a first dimension"):
        trainatomy.predict(tagger, batch={"ids": torch.tensor(1), "labels": 3})


def test_an_unknown_setting_is_refused(tagger: nn.Module, batch: Any) -> None:
    with pytest.raises(WorkloadError, match="bf61"):
        trainatomy.predict(tagger, batch=batch, bf61=True)


class Counting(nn.Module):
    """Module that counts computed values."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.linear(x)
        return hidden.sum() + torch.bincount((hidden > 0).long().flatten()).sum()


class Failing(Counting):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.linear.weight[:, :3])


@pytest.mark.parametrize(("make", "error"), [(Counting, SimulationError), (Failing, FactoryError)])
def test_errors_of_a_live_module_are_reported(make: Callable[[], nn.Module], error: type[Exception]) -> None:
    with pytest.raises(error):
        trainatomy.predict(make(), batch={"x": torch.ones(2, 8)})


def test_a_training_that_does_not_fit_has_a_breakdown(tagger: nn.Module, space: Any) -> None:
    size = 30_000  # [30000, 32] tokens with 1000 logits each: 3.8 GB for one copy of the logits
    found = trainatomy.predict(tagger, batch=space["batch"], per_device_train_batch_size=size, gpu="t4")
    assert (found.fits, found.verdict) == (False, "does not fit")
    assert found.room_bytes < 0
    assert found.out_of_memory is not None
    assert found.out_of_memory.instant.phase in ("forward", "backward")
    assert found.out_of_memory.requested_bytes > 0
    consistent(found)


def test_a_timeline_reaches_the_peak(tagger: nn.Module, batch: Any) -> None:
    found = trainatomy.predict(tagger, batch=batch, timeline=True)
    assert max(sum(point.components.values()) for point in found.timeline) == found.memory.peak_allocated_bytes
    assert trainatomy.predict(tagger, batch=batch).timeline == ()


def test_memory_alone_is_the_same_memory(tagger: nn.Module, batch: Any) -> None:
    both = trainatomy.predict(tagger, batch=batch, optimizer="adamw_torch")
    alone = trainatomy.predict(tagger, batch=batch, optimizer="adamw_torch", timed=False)
    assert both.time is not None and alone.time is None
    assert alone.memory == both.memory


def test_predictions_are_repeatable(tagger: nn.Module, batch: Any) -> None:
    first, second = (trainatomy.predict(tagger, batch=batch, bf16=True) for _ in range(2))
    assert first.memory == second.memory


def test_compare_keeps_the_order() -> None:
    config = {"n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 200}
    model = {"class": "GPT2LMHeadModel", "config": config}
    rows = [
        Workload.from_mapping({"model": model, "name": name, "data": {"sequence_length": 16}}) for name in ("b", "a")
    ]
    found = trainatomy.compare(rows).predictions
    assert [prediction.name for prediction in found] == ["b", "a"]
    for prediction in found:
        consistent(prediction)
