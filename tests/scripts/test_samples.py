"""Samples of a step: by what loaders fetch, else by shapes; batches where neither says."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from script_types import RunScript

from trainatomy.reporters.text.prediction import prediction_page
from trainatomy.reporters.text.rendering import render
from trainatomy.results.prediction import Prediction
from trainatomy.scripts.longest import batch_size


def zeros(*shape: int) -> torch.Tensor:
    return torch.zeros(shape)


def ids(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.long)


class Graph:
    """A graph as PyTorch Geometric has it: no container."""

    def __init__(self) -> None:
        self.x, self.edge_index = zeros(2708, 1433), ids(2, 10556)


@pytest.mark.parametrize(
    ("arguments", "keywords", "expected"),
    [
        ((zeros(16, 3, 64, 64),), {}, (16, None)),
        ((zeros(16, 128), ids(16)), {}, (16, None)),
        (({"bboxes": zeros(64, 4), "img": zeros(16, 3, 64, 64), "cls": zeros(64, 1)},), {}, (16, None)),
        (({"boxes": zeros(64, 4), "x": zeros(16, 9), "y": zeros(16, 2)},), {}, (16, None)),
        (({"video": {"frames": [zeros(4, 8, 3, 32, 32)]}, "text": ids(4, 77)},), {}, (4, None)),
        ((UserDict({"pixel_values": zeros(8, 3, 32, 32), "labels": ids(8)}),), {}, (8, None)),
        (([{"image": zeros(3, 60, 80), "boxes": zeros(5, 4)}, {"image": zeros(3, 50, 90)}],), {}, (2, None)),
        (([zeros(3, 60, 80), zeros(3, 50, 90), zeros(3, 9, 9)], [{"boxes": zeros(5, 4)}] * 3), {}, (3, None)),
        ((ids(12, 1024), ids(12, 1024)), {}, (12, 1024 * 12)),
        ((ids(12, 128), zeros(1, 1, 128, 128)), {}, (12, 128 * 12)),
        ((), {"input_ids": ids(4, 512), "pixel_values": zeros(9, 3, 24, 24)}, (4, 4 * 512)),
        ((), {"input_ids": ids(1, 4096), "position_ids": ids(1, 4096), "cu_seqlens": ids(9)}, (1, 4096)),
        ((ids(35, 20), (zeros(2, 20, 200), zeros(2, 20, 200))), {}, (20, 35 * 20)),
        ((zeros(2708, 1433), ids(2, 10556)), {}, (None, None)),
        ((zeros(64, 4), zeros(16, 9)), {}, (None, None)),
        ((Graph(),), {}, (None, None)),
        ((zeros(),), {}, (None, None)),
        ((), {}, (None, None)),
    ],
)
def test_the_shapes_of_inputs_tell_the_samples(
    arguments: tuple[Any, ...], keywords: Mapping[str, Any], expected: tuple[int | None, int | None]
) -> None:
    assert batch_size(arguments, keywords) == expected


LOOP = """
import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, SequentialSampler, TensorDataset
model = nn.Sequential(nn.Linear(16, 64), nn.Linear(64, 4)).cuda()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
rows = TensorDataset(torch.zeros(999, 16))

def step(*batches):
    for batch in batches:
        model(batch.cuda()).sum().backward()
    optimizer.step()
    optimizer.zero_grad()

def ahead(loader):
    following = iter(loader)
    batch = next(following)
    for later in following:
        yield batch
        batch = later
    yield batch

def joined(rows):
    return torch.cat([x for x, in rows]).reshape(1, -1, 16)

class Stream(IterableDataset):
    def __iter__(self):
        return iter([(torch.zeros(16),)] * 99)

"""
LOADERS = {
    "batches": ("for x, in DataLoader(rows, 8): step(x)", 8),
    "ahead": ("for x, in ahead(DataLoader(rows, 8)): step(x)", 8),
    "epochs of two batches, ahead": (
        "few = TensorDataset(torch.zeros(16, 16))\nwhile True:\n    for x, in ahead(DataLoader(few, 8)): step(x)",
        8,
    ),
    "accumulation": ("loader = iter(DataLoader(rows, 8))\nwhile True: step(*(next(loader)[0] for _ in range(3)))", 24),
    "parts of a batch": ("for x, in DataLoader(rows, 8): step(*x.split(2))", 8),
    "packed": ("for x in DataLoader(rows, 8, collate_fn=joined): step(x)", 8),
    "views": ("for x, in DataLoader(rows, 8): step(torch.cat([x, x]))", 8),
    "stream": ("for x, in DataLoader(Stream(), 8): step(x)", 8),
    "two loaders": ("for (x,), (y,) in zip(DataLoader(rows, 8), DataLoader(rows, 24)): step(torch.cat([x, y]))", 32),
    "own sampler": (
        "for x, in DataLoader(rows, None, sampler=BatchSampler(SequentialSampler(rows), 8, False)): step(x)",
        8,
    ),
    "evaluation between": (
        "for x, in DataLoader(rows, 8):\n    step(x)\n    model.eval()\n    with torch.no_grad():\n"
        "        for y, in DataLoader(rows, 333): model(y.cuda())\n    model.train()",
        8,
    ),
    "no loader": ("while True: step(torch.zeros(7, 16))", 7),
    "a buffer": ("data = next(iter(DataLoader(rows, 900)))[0]\nfor at in range(0, 900, 9): step(data[at : at + 9])", 9),
}


def predicted(run_script: RunScript, text: str, **options: Any) -> Prediction:
    found = run_script(LOOP + text + "\n", **options)
    assert found.message == ""
    assert found.prediction is not None and found.prediction.time is not None
    return found.prediction


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("name", LOADERS)
def test_loaders_tell_the_samples_of_a_step(run_script: RunScript, name: str, steps: int) -> None:
    text, expected = LOADERS[name]
    if steps == 1 and name in ("two loaders", "a buffer", "parts of a batch"):
        pytest.skip("one step shows not how much a loader fetches for each")
    found = predicted(run_script, text, steps=steps)
    assert found.time is not None and found.script is not None and found.script.counted == "samples"
    assert found.time.samples_per_second * found.time.step_seconds == pytest.approx(expected)


PASSES = {
    "two losses": ("for x, in DataLoader(rows, 8):\n    (model(x.cuda()).sum() * 2).backward()\n    step(x)", 8, 1),
    "sharpness-aware": (
        "for x, in DataLoader(rows, 8):\n    model(x.cuda()).sum().backward()\n    model.zero_grad()\n    step(x)",
        8,
        1,
    ),
    "sharpness-aware without a loader": (
        "x = torch.zeros(8, 16)\nwhile True:\n    model(x.cuda()).sum().backward()\n    model.zero_grad()\n    step(x)",
        8,
        1,
    ),
    "adversarial": (
        "critic = nn.Linear(4, 1).cuda()\nof_critic = torch.optim.SGD(critic.parameters(), 0.1)\n"
        "while True:\n    x = torch.zeros(8, 16).cuda()\n    critic(model(x).detach()).sum().backward()\n"
        "    of_critic.step()\n    of_critic.zero_grad()\n    critic(model(x)).sum().backward()\n"
        "    optimizer.step()\n    optimizer.zero_grad()",
        8,
        1,
    ),
    "accumulation": ("while True: step(*torch.zeros(3, 8, 16))", 24, 3),
}


@pytest.mark.parametrize("name", PASSES)
def test_only_passes_whose_gradients_are_accumulated_are_micro_batches(run_script: RunScript, name: str) -> None:
    text, samples, micro_batches = PASSES[name]
    found = predicted(run_script, text)
    assert found.time is not None
    assert found.workload["train"].get("gradient_accumulation_steps", 1) == micro_batches
    assert found.time.samples_per_second * found.time.step_seconds == pytest.approx(samples)


def test_batches_are_counted_where_nobody_knows_their_samples(run_script: RunScript) -> None:
    text = """
class Pairs(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(4, 4), nn.Linear(9, 4)
    def forward(self, left, right):
        return self.left(left).sum() + self.right(right).sum()

model = Pairs().cuda()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
while True:
    for _ in range(2): model(torch.zeros(64, 4).cuda(), torch.zeros(16, 9).cuda()).backward()
    optimizer.step()
    optimizer.zero_grad()
"""
    found = predicted(run_script, text)
    assert found.time is not None and found.script is not None and found.script.counted == "batches"
    assert found.time.samples_per_second * found.time.step_seconds == pytest.approx(2)
    page = " ".join(render(prediction_page(found), width=200).split())
    assert " batches/s; " in page and "how many samples a step has is not known" in page


def test_samples_are_those_of_the_script_where_a_workload_refuses_its_precision(run_script: RunScript) -> None:
    text = """
import torch
model = torch.nn.Linear(64, 64).cuda().half()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for step in range(5):
    with torch.autocast("cuda", torch.float16):
        model(torch.ones(3, 64, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
    found = run_script(text).prediction
    assert found is not None and found.subject is not None
    assert (found.subject.batch_size, found.subject.optimizer) == (3, "SGD")
