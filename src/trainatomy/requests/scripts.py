"""The request of a dry run of a script."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from trainatomy.option import option
from trainatomy.requests.predicting import DATASET_MEMORY, HOST_MEMORY, TIMELINE


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptRequest:
    """How to run a script on a simulated GPU.

    Attributes:
        steps: Optimizer steps after which it is stopped.
        time_limit: Seconds after which it is stopped.
        network: Let it use the network.
        data: A local file whose rows take the place of data sets of a hub.
        samples: Rows of made-up data sets.
        lengths: Words of made-up texts.
        torch: Version of PyTorch to simulate; by default the installed one.
        compiles: Simulate ``torch.compile``; None: where the script names it and its compiler is installed.
        look_ahead: Also execute what comes after the steps: the evaluation and the checkpoint that a trainer's
            configuration plans, the longest sample, further steps where memory grows.
        timeline: Include memory by component over the step.
        host_memory: See ``predict``.
        dataset_memory: See ``predict``.
    """

    steps: int = option(3, "Optimizer steps after which the script is stopped (default: 3).", metavar="N", min=1)
    time_limit: float = option(
        300.0, "Stop the script after this many seconds (default: 300).", metavar="SECONDS", min=1
    )
    network: bool = option(False, "Let the script use the network, for example to download a data set.")
    data: str | None = option(
        None,
        "Use the rows of this file (jsonl, csv, parquet, txt) for data sets of the hub.",
        metavar="FILE",
        exists=True,
        words=Path | None,
        read=str,
    )
    samples: int = option(512, "Rows of made-up data sets (default: 512).", metavar="N", min=1)
    lengths: int = option(256, "Words of made-up texts (default: 256).", metavar="N", min=1)
    torch: str | None = option(None, "Version of PyTorch to simulate (default: the installed one).", metavar="VERSION")
    compiles: bool | None = option(
        None,
        "Simulate torch.compile (experimental; default: if the script names it and its compiler is installed).",
        name="--compile/--no-compile",
    )
    look_ahead: bool = option(
        True,
        "After the last step, also execute what the script would do later (default): the evaluation and the "
        "checkpoint that its trainer's configuration plans, a batch with the longest sample, further steps where "
        "memory grows. With --measure, only the steps are executed.",
    )
    timeline: bool = option(False, TIMELINE)
    host_memory: int | str | None = option(None, HOST_MEMORY)
    dataset_memory: int | None = option(None, DATASET_MEMORY)
