"""The request of a dry run of a script."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from trainatomy.option import Option
from trainatomy.requests.measuring import time_limit
from trainatomy.requests.predicting import DatasetMemory, HostMemory, Timeline


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

    steps: Annotated[
        int,
        Option("--steps", "Optimizer steps after which the script is stopped (default: 3).", metavar="N", min=1),
    ] = 3
    time_limit: Annotated[float, time_limit("Stop the script after this many seconds (default: 300).", 1)] = 300.0
    network: Annotated[
        bool, Option("--network", "Let the script use the network, for example to download a data set.")
    ] = False
    data: Annotated[
        str | None,
        Option(
            "--data",
            "Use the rows of this file (jsonl, csv, parquet, txt) for data sets of the hub.",
            metavar="FILE",
            exists=True,
            words=Path | None,
            read=str,
        ),
    ] = None
    samples: Annotated[int, Option("--samples", "Rows of made-up data sets (default: 512).", metavar="N", min=1)] = 512
    lengths: Annotated[int, Option("--lengths", "Words of made-up texts (default: 256).", metavar="N", min=1)] = 256
    torch: Annotated[
        str | None,
        Option("--torch", "Version of PyTorch to simulate (default: the installed one).", metavar="VERSION"),
    ] = None
    compiles: Annotated[
        bool | None,
        Option(
            "--compile/--no-compile",
            "Simulate torch.compile (experimental; default: if the script names it and its compiler is installed).",
        ),
    ] = None
    look_ahead: Annotated[
        bool,
        Option(
            "--look-ahead/--no-look-ahead",
            "After the last step, also execute what the script would do later (default): the evaluation and the "
            "checkpoint that its trainer's configuration plans, a batch with the longest sample, further steps where "
            "memory grows. With --measure, only the steps are executed.",
        ),
    ] = True
    timeline: Timeline = False
    host_memory: HostMemory = None
    dataset_memory: DatasetMemory = None
