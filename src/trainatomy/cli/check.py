"""``trainatomy check``: a gate before a launcher, which says in one sentence whether the training fits."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import Any

from trainatomy import api
from trainatomy.api.scripts import run_script
from trainatomy.cli.exits import UsageError
from trainatomy.cli.options import DEBUG, JSON, command
from trainatomy.cli.output import progress, quiet_libraries, show, show_json
from trainatomy.cli.unused_imports import skip_collections
from trainatomy.errors import DoesNotFit, NotSimulated, WorkloadError
from trainatomy.option import option, required
from trainatomy.reporters.json import to_json
from trainatomy.reporters.text.prediction import verdict_line
from trainatomy.reporters.text.rendering import render
from trainatomy.requests.predicting import PredictRequest, Training
from trainatomy.results.prediction import Prediction
from trainatomy.scripts.batch_jobs import BatchJob, read_job
from trainatomy.scripts.command import read_command
from trainatomy.workload.dialects.recognise import command_in
from trainatomy.workload.reading import read


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckCommand:
    """A training that is about to be started."""

    words: tuple[str, ...] = required(
        "The command that would start the training: `sbatch`, `srun`, `sky launch`, `torchrun`, `accelerate "
        "launch`, `python`, or that of a framework.",
        name="",
        metavar="-- COMMAND…",
    )
    gpu: str | None = option(None, "The GPU (default: the one that the job asks for).", metavar="GPU")
    gpus: int | None = option(None, "GPUs of each machine (default: as the job asks for).", metavar="N", min=1)
    json: bool = option(False, JSON)
    debug: bool = option(False, DEBUG)


@command
def check(request: CheckCommand) -> None:
    """Say in one sentence whether a training fits its GPUs, before a launcher starts it.

    For example `trainatomy check -- sbatch job.sh && sbatch job.sh`. The exit code is 8 where it does not fit. A
    framework's configuration is predicted; another script is executed without a GPU, without the network, and without
    writing files.
    """
    skip_collections()
    job = read_job(request.words)
    gpu = request.gpu or job.gpu
    if gpu is None:
        where = f"{job.source} does not say which GPU it asks for" if job.source else "the command names no GPU"
        raise UsageError(f"{where}: give --gpu, such as --gpu h100")
    with progress(f"checking {job.command[0]}"), quiet_libraries(debug=request.debug):
        prediction = _predicted(job, gpu, request.gpus or job.gpus)
    sentence = render(verdict_line(prediction), width=1000).strip()
    if request.json:
        show_json(to_json(prediction))
    elif prediction.fits:
        show(verdict_line(prediction))
    if not all(rank.fits for rank in prediction.ranks.values()):
        raise DoesNotFit(sentence)


def _predicted(job: BatchJob, gpu: str, gpus: int | None) -> Prediction:
    """Return the prediction of a command: of a framework's configuration, or of the script that it runs."""
    text = shlex.join(job.command)
    if command_in(text) is not None:
        flags: dict[str, Any] = {"gpu": gpu, "gpus": gpus if (gpus or 1) > 1 else None}
        flags["nodes"] = job.nodes if job.nodes > 1 else None
        try:
            workload = read(text, flags)
        except NotSimulated:  # the framework itself is executed
            pass
        else:
            return api.predict_training(Training(workload), PredictRequest())
    if job.nodes > 1:
        raise WorkloadError(f"{job.source}: a script is checked on one machine, and the job asks for {job.nodes}")
    is_launched = read_command(job.command).launch is not None  # the launcher says how many GPUs
    return run_script(list(job.command), gpu=gpu, gpus=gpus if (gpus or 1) > 1 and not is_launched else None)
