from pathlib import Path

import pytest
import torch
from torch import nn

from trainatomy.api import predict
from trainatomy.errors import FactoryError
from trainatomy.training.model import build_model
from trainatomy.workload.schema import Workload

SOURCE = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self, widths):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(a, b, bias=False) for a, b in zip(widths, widths[1:]))
        self.last = nn.Linear(widths[-1], widths[-1], bias=False)
        self.last.weight = self.layers[-1].weight
        self.register_buffer("scale", torch.ones(3, dtype=torch.bfloat16))

    def forward(self, x, labels):
        for layer in self.layers:
            x = layer(x)
        return (self.last(x) * self.scale.sum()).square().mean()


def reads():
    return Net((torch.linspace(8, 64, 4).int() // 8 * 8).tolist()[:3] + [40])


def written():
    return Net([8, 24, 40, 40])


def fails():
    raise ValueError("no such width")


def batch(size):
    return {"x": torch.rand(size, 8), "labels": torch.zeros(size)}
"""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "nets.py"
    path.write_text(SOURCE)
    return path


def workload(source: Path, name: str) -> Workload:
    return Workload.from_mapping(
        {
            "model": {"factory": f"{source}:{name}"},
            "data": {"factory": f"{source}:batch"},
            "loop": "pytorch",
            "train": {"per_device_train_batch_size": 4},
            "gpu": "h200",
        }
    )


def test_a_builder_that_reads_values_builds_on_meta_tensors(source: Path) -> None:
    with torch.device("meta"):
        model = build_model(workload(source, "reads"))
    assert [tuple(p.shape) for p in model.parameters()] == [(24, 8), (40, 24), (40, 40)]
    assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    assert isinstance(model.last, nn.Linear) and model.last.weight is model.layers[-1].weight  # type: ignore[index]
    assert model.scale.dtype == torch.bfloat16


def test_reading_values_changes_no_prediction(source: Path) -> None:
    reads, written = (predict(workload(source, name)) for name in ("reads", "written"))
    assert reads.memory == written.memory
    assert reads.time == written.time


def test_other_errors_of_a_builder_are_its_own(source: Path) -> None:
    with torch.device("meta"), pytest.raises(FactoryError, match="no such width"):
        build_model(workload(source, "fails"))


LINEAR_ALGEBRA = """
import torch
from torch import nn
from torch.nn.utils.parametrizations import orthogonal
from transformers import LlamaConfig, LlamaForCausalLM


class Turned(nn.Module):
    def __init__(self):
        super().__init__()
        self.wide, self.square = orthogonal(nn.Linear(64, 16)), orthogonal(nn.Linear(16, 16))

    def forward(self, x, labels):
        return self.square(self.wide(x)).square().mean()


def resized():
    config = LlamaConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=2, vocab_size=1000
    )
    model = LlamaForCausalLM(config)
    model.resize_token_embeddings(1010, pad_to_multiple_of=64)
    return model


def batch(size):
    return {"x": torch.zeros(size, 64), "labels": torch.zeros(size)}
"""


def test_a_vocabulary_that_grows_asks_for_values_of_weights(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(LINEAR_ALGEBRA)
    with torch.device("meta"):
        built = build_model(Workload.from_mapping({"model": {"factory": f"{tmp_path}/mine.py:resized"}}))
    shapes = {name: tuple(each.shape) for name, each in built.named_parameters() if 1024 in each.shape}
    assert shapes == {"model.embed_tokens.weight": (1024, 64), "lm_head.weight": (1024, 64)}
    assert all(each.is_meta for each in built.parameters())


def test_a_parametrisation_needs_linear_algebra(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(LINEAR_ALGEBRA)
    described = {
        "model": {"factory": f"{tmp_path}/mine.py:Turned"},
        "data": {"factory": f"{tmp_path}/mine.py:batch"},
        "loop": "pytorch",
    }
    prediction = predict(Workload.from_mapping(described))
    # Besides the parameters (64 * 16 + 16 and 16 * 16 + 16 numbers), each parametrisation has a square base.
    assert prediction.memory.components.weights == sum(4 * n for n in (64 * 16, 128, 16 * 16, 128, 64 * 64, 16 * 16))
