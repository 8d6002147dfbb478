"""Decide whether a script is simulated compiled, before the simulated GPU appears."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

from trainatomy.errors import SimulationError, TrainatomyError
from trainatomy.scripts.job import Job
from trainatomy.scripts.notebook import source_of
from trainatomy.scripts.preload import files_of

_NAMED = re.compile(r"(?<!\bre)\.compile\b|torch_?compile|dynamo", re.IGNORECASE)
"""Names of the compiler in a script or a command: ``torch.compile``, ``torch_compile=True``, ``--dynamo_backend``."""
_DISABLED = "TORCHDYNAMO_DISABLE"


def compiling(job: Job, file: Path) -> tuple[Job, str]:
    """Import the compiler where a job wants it, and return the job with ``compiled`` decided.

    Returns:
        The job, and the reason why it is simulated eagerly where the script may compile; "" without one.

    Raises:
        TrainatomyError: It was asked for, and cannot be simulated here.
    """
    wanted = names_compiler(job, file) if job.compiled is None else job.compiled
    if not wanted:
        reason = "" if job.compiled is None else "--no-compile: torch.compile was left out, as asked"
        return replace(job, compiled=False), reason
    from trainatomy.simulator.compiled import preload_compiler

    launch = job.command.launch
    try:
        if launch is not None and launch.gpus * launch.nodes > 1:
            raise SimulationError("torch.compile on several GPUs is not simulated: leave it out with --no-compile")
        preload_compiler("torch.compile")
    except TrainatomyError as error:
        if job.compiled:
            raise
        return replace(job, compiled=False), str(error).partition("\n")[0]
    os.environ.pop(_DISABLED, None)
    settings: Any = import_module("torch._dynamo.config")
    settings.disable = False
    return replace(job, compiled=True), ""


def names_compiler(job: Job, file: Path) -> bool:
    """Return whether a script's files, its arguments or accelerate's variables name the compiler."""
    if os.environ.get("ACCELERATE_DYNAMO_BACKEND", "NO").upper() != "NO":
        return True
    texts = [*job.command.arguments, *map(source_of, files_of(file))]
    return any(_NAMED.search(text) for text in texts)
