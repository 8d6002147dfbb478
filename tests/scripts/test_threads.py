"""Training in a thread of the script's is followed."""

from __future__ import annotations

from pathlib import Path

import pytest
from script_types import RunScript

from trainatomy.errors import FactoryError, SimulationError

LOOP = """
import queue, threading, time, torch
from concurrent.futures import ThreadPoolExecutor
model = torch.nn.Linear(64, 64)

def train(steps=99, move=True):
    if move: model.cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(steps):
        model(torch.ones(8, 64, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

class Own(threading.Thread):
    def run(self):
        train()

"""
WAYS = {
    "plain": "train()",
    "joined": "t = threading.Thread(target=train)\nt.start()\nt.join()",
    "a class": "t = Own(daemon=True)\nt.start()\nt.join()",
    "a timeout": "t = Own()\nt.start()\nwhile t.is_alive(): t.join(0.1)",
    "polled": "t = Own(daemon=True)\nt.start()\nwhile True: time.sleep(0.05)",
    "a queue": "t = Own(daemon=True)\nt.start()\nqueue.Queue().get()",
    "an executor": "with ThreadPoolExecutor(1) as pool: pool.submit(train).result()",
}


@pytest.mark.parametrize("name", WAYS)
def test_a_training_in_a_thread_is_followed(run_script: RunScript, name: str) -> None:
    plain, found = (run_script(LOOP + text + "\n", time_limit=20.0) for text in (WAYS["plain"], WAYS[name]))
    assert (found.message, found.exit_code) == ("", 0)
    assert found.prediction is not None and found.prediction.script is not None and plain.prediction is not None
    assert (found.prediction.script.ending, found.prediction.script.steps) == ("steps", 3)
    assert found.prediction.memory.peak_allocated_bytes == plain.prediction.memory.peak_allocated_bytes


def test_a_loader_in_a_thread_moves_its_batches(
    run_script: RunScript, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loader is a framework's, and the batches are the script's."""
    package = tmp_path / "site-packages"
    package.mkdir()
    package.joinpath("framework_with_threads.py").write_text(
        "import threading\n"
        "def loading(load, batches):\n"
        "    def loads():\n"
        "        while True: batches.put(load().cuda())\n"
        "    threading.Thread(target=loads, daemon=True).start()\n"
    )
    monkeypatch.syspath_prepend(package)
    text = """
import framework_with_threads
batches = queue.Queue(2)
framework_with_threads.loading(lambda: torch.ones(8, 64), batches)
model.cuda()
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(9):
    model(batches.get()).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
    found = run_script(LOOP + text, time_limit=20.0)
    assert found.message == ""
    assert found.prediction is not None and found.prediction.script is not None
    assert found.prediction.script.steps == 3 and found.prediction.script.growth is None


@pytest.mark.parametrize(
    ("text", "message", "code"),
    [
        ("t = threading.Thread(target=lambda: {}['x'])\nt.start()\nt.join()", "KeyError: 'x'", FactoryError.exit_code),
        (
            "t = threading.Thread(target=train, args=(9, False))\nt.start()\nt.join()",
            "Linear is trained on the CPU",
            SimulationError.exit_code,
        ),
    ],
)
def test_what_a_thread_raises_is_the_answer(run_script: RunScript, text: str, message: str, code: int) -> None:
    found = run_script(LOOP + text + "\n")
    assert found.prediction is None and found.exit_code == code
    assert message in found.message and "train.py:" in found.message
