"""Random numbers of the host in a dry run: those that a run draws, too."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from script_types import RunScript

BUILD = """
import random
import torch
from torch import nn

SEED = {seed}
if SEED is not None:
    torch.manual_seed(SEED)
model = nn.Sequential(nn.Linear(300, 500), nn.Linear(500, 3), nn.LSTM(10, 33), nn.Embedding(1001, 77))
nn.init.orthogonal_(model[0].weight)
nn.init.trunc_normal_(model[1].weight, std=0.02)
nn.init.normal_(nn.Parameter(torch.empty(17)))
drawn = torch.rand(2).tolist()
"""

TRAIN = """
layer = nn.Linear(4, 4).cuda()
optimizer = torch.optim.SGD(layer.parameters(), 0.1)
for step in range(3):
    if not DRAWS or random.random() < 2:
        layer(torch.ones(2, 4, device="cuda")).sum().backward()
    optimizer.step()
print("drawn", drawn)
"""


@pytest.mark.parametrize("seed", [3, None])
def test_weights_draw_as_many_numbers_as_in_a_run(
    run_script: RunScript, capsys: pytest.CaptureFixture[str], seed: int | None
) -> None:
    text = BUILD.format(seed=seed)
    torch.default_generator.manual_seed(67280421310721)  # as in a new process
    run: dict[str, object] = {}
    exec(text, run)
    torch.rand(5)  # what this process draws before is of no interest
    assert run_script(text + TRAIN.replace("DRAWS", "False"), steps=9).exit_code == 0
    assert f"drawn {run['drawn']}" in capsys.readouterr().out


LOAD = """
import torch
from transformers import DistilBertForMaskedLM, DistilBertForSequenceClassification

torch.manual_seed(1)
DistilBertForMaskedLM.from_pretrained({folder!r})
drawn = torch.rand(1).tolist()
DistilBertForSequenceClassification.from_pretrained({folder!r})
drawn += torch.rand(1).tolist()
"""


def test_a_checkpoint_draws_the_head_that_it_lacks(
    run_script: RunScript, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    from transformers import DistilBertConfig, DistilBertForMaskedLM

    config = DistilBertConfig(dim=32, n_layers=1, n_heads=2, hidden_dim=32, vocab_size=99)
    DistilBertForMaskedLM(config).save_pretrained(tmp_path / "model")
    text, run = LOAD.format(folder=str(tmp_path / "model")), dict[str, object]()
    exec(text, run)
    head = "import random\nfrom torch import nn\n"
    assert run_script(head + text + TRAIN.replace("DRAWS", "False"), steps=9).exit_code == 0
    assert f"drawn {run['drawn']}" in capsys.readouterr().out


DROPS = """
import random
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(256, 256) for _ in range(8))

    def forward(self, x):
        for layer in self.layers:
            if random.random() < 0.5:
                x = layer(x).relu()
        return x

{seed}
model = Net().cuda()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for step in range(3):
    (model(torch.ones(64, 256, device="cuda", requires_grad=True)).sum()).backward()
    optimizer.step()
"""


@pytest.mark.parametrize("seed", ["", "random.seed(1)"])
def test_layers_that_are_left_out_are_always_the_same(run_script: RunScript, seed: str) -> None:
    found = [run_script(DROPS.format(seed=seed)).prediction for _ in range(2)]
    assert found[0] is not None and found[1] is not None
    assert found[0].memory == found[1].memory
    assert any("random numbers of random, which the script does not seed" in note for note in found[0].notes) is (
        not seed
    )
