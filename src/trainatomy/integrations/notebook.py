"""The notebook magic ``%%trainatomy --gpu t4``: run a cell without a GPU.  Load it by ``%load_ext trainatomy``."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from trainatomy.api.scripts import dry_run
from trainatomy.integrations.printing import print_summary


def load_ipython_extension(shell: Any) -> None:
    """Register the magic."""
    shell.register_magic_function(lambda line, cell: run_cell(shell, line, cell), "cell", "trainatomy")


def run_cell(shell: Any, line: str, cell: str) -> None:
    """Run a cell in a simulated process, and print its prediction; variables that it made are not kept."""
    parser = argparse.ArgumentParser("%%trainatomy", description="Run this cell without a GPU.")
    parser.add_argument("--gpu", default="h200")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--network", action="store_true")
    given = parser.parse_args(line.split())
    variables = dict(shell.user_ns)
    with dry_run(gpu=given.gpu, steps=given.steps, network=given.network, name="this cell") as dry:
        exec(compile(shell.transform_cell(cell), "<cell>", "exec"), variables)
    sys.stdout.flush()
    print_summary(dry.prediction)
