"""The examples run unchanged without a GPU, and print the expected output."""

from __future__ import annotations

import runpy
import sys
import warnings
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
def test_an_example_runs_without_a_gpu(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [name])
    monkeypatch.setattr("trainatomy.integrations.watch._has_warned", False)  # as in a new process
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    said = capsys.readouterr().out
    for part in SAYS[name]:
        assert part in said
    import torch

    if not torch.cuda.is_available():
        assert sum("finds no GPU" in str(one.message) for one in caught) == (name in WATCHES)


def test_every_example_is_tested_and_listed() -> None:
    scripts = {path.name for path in EXAMPLES.glob("*.py")}
    assert scripts == set(SAYS)
    listed = (EXAMPLES / "README.md").read_text("utf-8")
    assert all(f"]({name})" in listed for name in scripts)
