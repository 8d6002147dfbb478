"""The examples run unchanged without a GPU, each in a separate process, and print the expected output."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
SAYS = {
    "trainer_callback.py": ("Samples/second:",),
    "accelerate_loop.py": ("Loss:",),
    "pytorch_loop.py": ("predicted for an H200, in fp16:", "Loss:"),
    "fit_batch_size.py": ("trainatomy: batch 32", "Trainer: 1 x 32 samples", "Loop: 1 x 32 samples"),
}
WATCHES = set(SAYS) - {"fit_batch_size.py"}


@pytest.mark.parametrize("name", SAYS)
def test_an_example_runs_without_a_gpu(name: str) -> None:
    ran = subprocess.run([sys.executable, EXAMPLES / name], capture_output=True, text=True, timeout=120, check=False)
    assert ran.returncode == 0, ran.stderr
    for part in SAYS[name]:
        assert part in ran.stdout
    import torch

    if not torch.cuda.is_available():
        assert ran.stderr.count("finds no GPU") == (name in WATCHES)


def test_every_example_is_tested_and_listed() -> None:
    scripts = {path.name for path in EXAMPLES.glob("*.py")}
    assert scripts == set(SAYS)
    listed = (EXAMPLES / "README.md").read_text("utf-8")
    assert all(f"]({name})" in listed for name in scripts)
