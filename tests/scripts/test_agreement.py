"""A script and the workload that says the same agree to the byte, and in the GPU's work."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from script_types import RunScript

import trainatomy
from trainatomy.results.prediction import Prediction

pytestmark = pytest.mark.usefixtures("kept_workspaces")

PLAIN = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Dropout(0.1), nn.Linear(1024, 10))

    def forward(self, x, y):
        return nn.functional.cross_entropy(self.layers(x), y)

def groups(model):
    weights = [p for p in model.parameters() if p.dim() > 1]
    return [{"params": weights}, {"params": [p for p in model.parameters() if p.dim() == 1]}]

if __name__ == "__main__":
    model = Net().to("cuda")
    optimizer = torch.optim.AdamW(groups(model), lr=1e-4, weight_decay=0.0)
    for step in range(10):
        batch = {"x": torch.randn(64, 256), "y": torch.zeros(64, dtype=torch.long)}
        batch = {name: tensor.to("cuda") for name, tensor in batch.items()}
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = model(**batch)
        (loss / 1).backward()
        optimizer.step()
        optimizer.zero_grad()
"""

TRAINER = """
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification, Trainer, TrainingArguments

class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        ids = torch.full((32,), 7)
        return {"input_ids": ids, "labels": torch.tensor(0)}

config = AutoConfig.for_model("bert", hidden_size=64, num_hidden_layers=2, num_attention_heads=2, intermediate_size=128,
                              vocab_size=1000)
model = AutoModelForSequenceClassification.from_config(config)
arguments = TrainingArguments("out", per_device_train_batch_size=4, bf16=True, logging_steps=1, report_to="none")
Trainer(model, arguments, train_dataset=Rows()).train()
"""


def components(prediction: Prediction) -> dict[str, int]:
    return prediction.memory.components.as_dict()


@pytest.mark.parametrize("kind", [None, "pinned", "pageable"])
def test_a_plain_loop_and_its_workload(run_script: RunScript, tmp_path: Path, kind: str | None) -> None:
    autocast = 'with torch.autocast("cuda", dtype=torch.bfloat16)'
    offloading = f"{autocast}, torch.autograd.graph.save_on_cpu(pin_memory={kind == 'pinned'})"
    found = run_script(PLAIN.replace(autocast, offloading if kind else autocast)).prediction
    assert found is not None
    spec: Any = importlib.util.spec_from_file_location("net_of_the_script", tmp_path / "train.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    batch = {"x": torch.randn(64, 256), "y": torch.zeros(64, dtype=torch.long)}
    expected = trainatomy.predict(
        module.Net(),
        batch=batch,
        optimizer=torch.optim.AdamW,
        bf16=True,
        max_grad_norm=0,
        activation_offloading=kind,
        gpu="h100",
    )
    assert found.memory == expected.memory
    assert found.modules == expected.modules
    assert [each for each in found.notes if "host memory" in each] == [
        each for each in expected.notes if "host memory" in each
    ]
    assert found.time is not None
    assert expected.time is not None
    assert found.time.gpu_seconds == pytest.approx(expected.time.gpu_seconds)
    assert found.time.launches == expected.time.launches
    assert found.time.step_seconds == pytest.approx(expected.time.step_seconds, rel=0.02)


def test_a_trainer_and_its_workload(run_script: RunScript) -> None:
    found = run_script(TRAINER).prediction
    assert found is not None
    model = {
        "config": {
            "model_type": "bert",
            "hidden_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "intermediate_size": 128,
            "vocab_size": 1000,
        },
        "class": "BertForSequenceClassification",
    }
    expected = trainatomy.predict(
        trainatomy.Workload.from_mapping(
            {
                "model": model,
                "loop": "trainer",
                "gpu": "h100",
                "data": {"sequence_length": 32},
                "train": {"per_device_train_batch_size": 4, "bf16": True},
            }
        )
    )
    assert components(found) == components(expected)
    assert found.memory.peak_reserved_bytes == expected.memory.peak_reserved_bytes
    assert found.time is not None
    assert expected.time is not None
    assert found.time.step_seconds == pytest.approx(expected.time.step_seconds, rel=0.02)
