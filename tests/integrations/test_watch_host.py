"""A watched training says what it takes of the host, without a GPU too."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import Trainer, TrainingArguments

import trainatomy
from trainatomy.measurement.proc import resident

pytestmark = [
    pytest.mark.filterwarnings("ignore:trainatomy finds no GPU"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="watches the GPU, too"),
    pytest.mark.skipif(resident(os.getpid()) is None, reason="needs Linux's /proc"),
]


def test_a_watch_has_the_phases_that_it_was_told(capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Linear(4, 4)
    with trainatomy.watch(model) as anatomy:
        model(torch.zeros(1, 4))
        anatomy.phase("saving")
    assert anatomy.measurement is None
    assert anatomy.host_bill is not None
    assert [phase.name for phase in anatomy.host_bill.phases] == ["training", "saving"]
    anatomy.print()
    assert "Memory of the host" in capsys.readouterr().out


class _Scalar(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.layer(x).mean()}


def test_the_callback_follows_the_trainer_through_evaluation_and_saving(tmp_path: Path) -> None:
    arguments = TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=4,
        eval_strategy="steps",
        eval_steps=2,
        save_strategy="steps",
        save_steps=2,
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
    )
    samples = [{"x": torch.ones(2)} for _ in range(64)]
    callback = trainatomy.AnatomyCallback(print=False)
    Trainer(_Scalar(), arguments, train_dataset=samples, eval_dataset=samples[:8], callbacks=[callback]).train()
    assert callback.host_bill is not None
    assert [phase.name for phase in callback.host_bill.phases] == ["training", "evaluation", "saving"]
    assert all(phase.needed_bytes > 2**27 for phase in callback.host_bill.phases)
