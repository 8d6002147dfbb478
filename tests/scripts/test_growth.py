"""Memory that grows with each step: what fills the GPU later does not fit, and what stops growing is no growth."""

from __future__ import annotations

from pathlib import Path

import pytest
from script_types import RunScript

from trainatomy.cli import main
from trainatomy.reporters.script_sentences import script_sentences
from trainatomy.reporters.text.prediction import verdict_line
from trainatomy.results.prediction import Prediction
from trainatomy.scripts import launch

LOOP = """
import collections, copy, gc, torch
from torch import nn
model = nn.Sequential(nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 64)).cuda()
optimizer = torch.optim.AdamW(model.parameters())
kept = []

def step(x, **backward):
    loss = model(x).square().mean()
    loss.backward(**backward)
    optimizer.step()
    optimizer.zero_grad()
    return loss

def batches(depth, at_once=True):
    queue, stream = collections.deque(), torch.cuda.Stream()
    for _ in range(99):
        for _ in range(depth if at_once else 2):
            if len(queue) < depth:
                with torch.cuda.stream(stream):
                    queue.append(torch.ones(512, 1024).cuda(non_blocking=True).sub_(0.5))
        torch.cuda.current_stream().wait_stream(stream)
        yield queue.popleft()

"""
GROWS = {
    "graphs": "for x in batches(1): kept.append(step(x, retain_graph=True))\n",
    "outputs": "for x in batches(2):\n    step(x)\n    kept.append(model(x).detach())\n",
    "batches": "for x in batches(1):\n    step(x)\n    kept.append(x)\n",
    "queue too long": "kept = collections.deque(maxlen=99999)\nfor x in batches(1):\n    step(x)\n    kept.append(x)\n",
    "queue and list": "queue = collections.deque(maxlen=300)\nfor x in batches(2):\n"
    "    queue.append(step(x).detach())\n    kept.append(model(x).detach())\n",
    "scalars": "for x in batches(1): kept.append(step(x).detach())\n",
}
STAYS = {
    **{f"ahead {depth}": f"for x in batches({depth}): step(x)\n" for depth in (1, 2, 3, 4)},
    **{f"ahead slowly {depth}": f"for x in batches({depth}, at_once=False): step(x)\n" for depth in (2, 3, 4)},
    "schedule": "schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=99)\n"
    "for x in batches(1):\n    step(x)\n    schedule.step()\n",
    "average": "average = None\nfor number, x in enumerate(batches(1)):\n    step(x)\n"
    "    if number == 1: average = torch.optim.swa_utils.AveragedModel(model)\n"
    "    if average: average.update_parameters(model)\n",
    "cycles": "for x in batches(1):\n    loop = [step(x), x]\n    loop.append(loop)\n",
    "pool": "for x in batches(1):\n    step(x)\n    kept[:] = [*kept, x][-20:]\n",
    "queue": "kept = collections.deque(maxlen=300)\nfor x in batches(1): kept.append((step(x).detach(), x))\n",
    "last": "kept = collections.deque(maxlen=2)\nfor x in batches(1):\n    step(x)\n    kept.append(model(x))\n",
}


def predicted(run_script: RunScript, text: str) -> Prediction:
    found = run_script(LOOP + text)
    assert found.message == ""
    assert found.prediction is not None and found.prediction.script is not None
    return found.prediction


@pytest.mark.parametrize("name", STAYS)
def test_what_stops_growing_is_no_growth(run_script: RunScript, name: str) -> None:
    found = predicted(run_script, STAYS[name])
    assert found.script is not None and found.script.growth is None
    assert found.fits and found.verdict == "fits"


@pytest.mark.parametrize(
    ("name", "least"),
    [
        ("graphs", 512 * 1024 * 4),
        ("outputs", 512 * 64 * 4),
        ("batches", 512 * 1024 * 4),
        ("queue too long", 512 * 1024 * 4),
        ("queue and list", 512 * 64 * 4),
    ],
)
def test_a_training_that_fills_the_gpu_later_does_not_fit(run_script: RunScript, name: str, least: int) -> None:
    found = predicted(run_script, GROWS[name])
    assert found.script is not None and found.script.growth is not None
    growth, steps = found.script.growth, found.script.steps
    assert least <= growth.bytes_per_step < 3 * least
    assert growth.steps == steps + found.room_bytes // growth.bytes_per_step
    assert not found.fits and found.out_of_memory is None
    assert steps > 3
    assert f"fits for the first {steps} steps" in verdict_line(found).plain
    assert f"full after about {growth.steps:,} steps; how many it trains is not known" in verdict_line(found).plain


def test_a_list_of_numbers_grows_and_fits(run_script: RunScript) -> None:
    found = predicted(run_script, GROWS["scalars"])
    assert found.script is not None and found.script.growth is not None
    assert found.script.growth.bytes_per_step == 512 and found.fits
    assert "memory grows by 512 B with each step" in "\n".join(script_sentences(found.script))


def test_the_time_is_that_of_the_steps_that_were_asked_for(run_script: RunScript) -> None:
    text = (
        "for number, x in enumerate(batches(1)):\n    step(x if number < 3 else x.repeat(9, 1))\n    kept.append(x)\n"
    )
    longer, plain = predicted(run_script, text), predicted(run_script, STAYS["ahead 1"])
    assert longer.time is not None and plain.time is not None
    assert longer.time.step_seconds == pytest.approx(plain.time.step_seconds, rel=0.05)


def test_growth_fails_a_check(
    run_script: RunScript, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    outcome = run_script(LOOP + GROWS["graphs"])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(launch, "run_script", lambda job, output: (outcome,))
    assert main(["run", "--check", "train.py"]) == 8
    assert "then memory grows by" in capsys.readouterr().err
