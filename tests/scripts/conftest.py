"""Fixtures: run the text of a script in this process, on a simulated H100."""

from __future__ import annotations

import contextlib
from importlib import import_module
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
from script_types import RunScript

from trainatomy.scripts.command import read_command, with_gpus
from trainatomy.scripts.imports import preload
from trainatomy.scripts.job import Job, Outcome
from trainatomy.scripts.run import run_job
from trainatomy.training.process import forget_device

GPU = "h100-sxm"


@pytest.fixture
def run_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunScript:
    """Run the text of a script, with arguments and keywords of ``Job``.

    ``before`` are the words of a launcher, ``eager`` why nothing is compiled.
    """
    monkeypatch.chdir(tmp_path)
    with contextlib.suppress(ImportError):  # as in the process of a script; else the hub is asked again and again
        monkeypatch.setattr(import_module("huggingface_hub.constants"), "HF_HUB_OFFLINE", True)

    forget_device()  # what accelerate remembers of another test's training

    def run(
        text: str,
        *arguments: str,
        before: tuple[str, ...] = (),
        gpus: int | None = None,
        eager: str = "",
        **options: Any,
    ) -> Outcome:
        file = tmp_path / "train.py"
        file.write_text(dedent(text))
        preload()
        command = with_gpus(read_command([*before, "train.py", *arguments]), gpus)
        return run_job(Job(command, (GPU,), **options), GPU, eager=eager)

    return run
