"""Validation and checkpoints that Lightning's configuration plans."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
from script_types import RunScript

from trainatomy.scripts.tasks.lightning import first_validation, steps_of, whole


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, 100),
        ({"val_check_batch": 25}, 25),
        ({"val_check_batch": 25, "accumulate_grad_batches": 4}, 7),
        ({"check_val_every_n_epoch": 3}, 300),
        ({"check_val_every_n_epoch": 3, "val_check_batch": 50}, 250),
        ({"check_val_every_n_epoch": None, "val_check_batch": 130}, 130),
        ({"num_training_batches": math.inf}, None),
        ({"num_training_batches": math.inf, "val_check_batch": 40}, 40),
    ],
)
def test_the_first_validation_follows_from_the_configuration(settings: dict[str, Any], expected: int | None) -> None:
    given = {"num_training_batches": 100, "val_check_batch": math.inf, "accumulate_grad_batches": 1}
    trainer = SimpleNamespace(**{**given, "check_val_every_n_epoch": 1, **settings})
    assert first_validation(trainer, steps_of(trainer, trainer.num_training_batches)) == expected


def test_no_limit_of_steps_is_none_that_is_known() -> None:
    assert [whole(number) for number in (-1, math.inf, 12.0)] == [None, None, 12]


SCRIPT = """
import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

class Lit(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(64, 8)
        self.kept = []
    def training_step(self, batch, _):
        return self.net(batch[0]).square().mean()
    def validation_step(self, batch, _):
        self.kept.append(self.net(batch[0]))
    def on_validation_epoch_end(self):
        self.kept.clear()
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())

rows = DataLoader(TensorDataset(torch.zeros(64, 64)), batch_size=8)
more = DataLoader(TensorDataset(torch.zeros(4096, 64)), batch_size=1024)
L.Trainer(max_epochs=2, accelerator="gpu", devices=1, enable_progress_bar=False).fit(Lit(), rows, more)
"""


def test_lightning_validates_and_saves_after_the_last_step(run_script: RunScript) -> None:
    pytest.importorskip("lightning")
    found = [run_script(SCRIPT, steps=steps) for steps in (3, 8, 9)]
    peaks = set()
    for outcome in found:
        assert outcome.message == "" and outcome.prediction is not None and outcome.prediction.script is not None
        assert [(task.kind, task.after) for task in outcome.prediction.script.tasks] == [
            ("evaluation", 8),
            ("saving", 8),
        ]
        assert outcome.prediction.script.total_steps == 16
        assert outcome.prediction.time is not None and outcome.prediction.time.phases["optimizer"] > 0
        peaks.add(outcome.prediction.memory.peak_reserved_bytes)
    assert len(peaks) == 1
