"""``trainatomy fit --script``: search over the flags of the user's own script."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Any

import typer

from trainatomy.cli.output import progress, show, show_json
from trainatomy.cli.script_words import DEFAULT_GPU
from trainatomy.cli.values import several_gpus
from trainatomy.errors import DoesNotFit, TrainatomyError
from trainatomy.reporters.json import to_json
from trainatomy.reporters.text.script import script_fit_page
from trainatomy.results.script_fit import ScriptFit
from trainatomy.scripts.command import Command, check_gpu, read_command
from trainatomy.scripts.fitting import read_flags, search_flags
from trainatomy.scripts.job import Job, Outcome

SCHEMA = "trainatomy/script-fit/1"


def fit_script(script: str, flags: Sequence[str], gpu: str | None, *, json: bool, check: bool) -> None:
    """Run a script with each combination of the values of its flags, and show which fit."""
    if several_gpus({"gpu": gpu}, None) is not None:
        raise typer.BadParameter(f"--gpu {gpu}: the flags of a script are searched for one GPU")
    from trainatomy.catalog.gpus import find_gpu
    from trainatomy.scripts.launch import run_script

    command, wanted = read_command(shlex.split(script)), read_flags(flags)
    if gpu is None:
        check_gpu(command, DEFAULT_GPU, "trainatomy fit --gpu {gpu} --script '{script}'")
    card = find_gpu(gpu or DEFAULT_GPU)

    def run(one: Command) -> Outcome:
        return run_script(Job(one, (card.id,)))[0]

    with progress(f"running {command.name} without a GPU") as tell:
        found = search_flags(command, wanted, card.id, run, tell)
    if json:
        show_json(script_fit_to_json(found))
    else:
        show(script_fit_page(found))
    if found.candidates and len(found.failed) == len(found.candidates):
        error = TrainatomyError(found.failed[0].message)
        error.exit_code = found.failed[0].exit_code
        raise error
    if check and found.best is None:
        raise DoesNotFit(f"nothing fits for {command.name}")


def script_fit_to_json(found: ScriptFit) -> dict[str, Any]:
    """Return a search over flags as JSON."""
    candidates = [
        {
            "flags": dict(each.flags),
            "command": list(each.command),
            "message": each.message,
            "failed": each.failed,
            "prediction": each.prediction and to_json(each.prediction),
        }
        for each in found.candidates
    ]
    best = None if found.best is None else found.candidates.index(found.best)
    return {"schema": SCHEMA, "name": found.name, "gpu": found.gpu, "best": best, "candidates": candidates}
