"""The server of the Model Context Protocol, by its official SDK (``pip install 'trainatomy[mcp]'``)."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial, wraps
from threading import Lock
from typing import Annotated, Any, Literal

import anyio
from pydantic import Field

from trainatomy.agents.answers import Found, Oracle, Predicted, Question, predicted
from trainatomy.api.scripts import run_script
from trainatomy.errors import TrainatomyError
from trainatomy.libraries import import_library
from trainatomy.results.fit import Permission
from trainatomy.runs.worker import Limits, Worker

INSTRUCTIONS = (
    "Predicts GPU memory and step time of PyTorch and Hugging Face trainings without a GPU. Ask `predict` before a "
    "training is started; where it does not fit, `why_out_of_memory` lists the changes that help, and `fit` finds the "
    "fastest settings that fit. `run` executes a training script without a GPU, network or written files."
)
Text = Annotated[
    str,
    Field(
        description="A workload or a configuration of LLaMA-Factory, axolotl, TRL or ms-swift: its text, or the name "
        "of its file; or a command such as `trl sft --config sft.yaml`. Empty if `settings` describe the training."
    ),
]
Gpu = Annotated[str, Field(description="The GPU, such as `h100`, `rtx-4090`, `a100-80gb`.")]
Gpus = Annotated[int, Field(description="GPUs that train.", ge=1)]
Settings = Annotated[
    dict[str, Any],
    Field(
        description="Settings over the training, with the names of TrainingArguments, and `model`, `sequence_length`, "
        "`dtype`, `lora_r`, `load_in_4bit`, `instance` …, as options of `trainatomy predict`."
    ),
]
Allow = Annotated[
    list[Literal["precision", "optimizer", "lora", "quantization", "sequence-length", "evaluation"]],
    Field(description="What may change of what is trained; nothing by default."),
]


class Server:
    """The tools, with a process that answers one question after the other.

    Args:
        limits: Limits of each answer.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._worker = Worker[Any](Oracle, limits)
        self._turn = Lock()

    def start(self) -> None:
        """Start the process that answers."""
        self._worker.start()

    def close(self) -> None:
        """End it."""
        self._worker.close()

    async def predict(
        self, training: Text = "", gpu: Gpu = "", gpus: Gpus = 1, settings: Settings | None = None
    ) -> Predicted:
        """Predict whether a training fits a GPU, what holds its memory, and how long a step takes."""
        found: Predicted = await self._ask("predict", training, gpu, gpus, settings)
        return found

    async def fit(
        self,
        training: Text = "",
        gpu: Gpu = "",
        gpus: Gpus = 1,
        settings: Settings | None = None,
        allow: Allow | None = None,
    ) -> Found:
        """Find the settings that fit a GPU and train fastest with the same effective batch size; takes 10 to 60 s."""
        found: Found = await self._ask("fit", training, gpu, gpus, settings, tuple(allow or ()))
        return found

    async def why_out_of_memory(
        self, training: Text = "", gpu: Gpu = "", gpus: Gpus = 1, settings: Settings | None = None
    ) -> Found:
        """List the changes that would make a training fit, the first to try first; takes 10 to 60 s."""
        found: Found = await self._ask("why_out_of_memory", training, gpu, gpus, settings)
        return found

    async def run(
        self,
        command: Annotated[
            str, Field(description="The command, such as `torchrun --nproc-per-node 2 train.py --lr 1e-4`.")
        ],
        gpu: Gpu,
        gpus: Gpus = 1,
    ) -> Predicted:
        """Execute a training script without a GPU, network or written files, and predict its memory and time."""
        asked = partial(
            run_script,
            shlex.split(command),
            gpu=gpu,
            gpus=gpus if gpus > 1 else None,
            time_limit=self._limits.seconds,
        )
        return await anyio.to_thread.run_sync(lambda: predicted(asked()))

    async def _ask(
        self,
        task: Literal["predict", "fit", "why_out_of_memory"],
        training: str,
        gpu: str,
        gpus: int,
        settings: dict[str, Any] | None,
        allow: tuple[Permission, ...] = (),
    ) -> Any:
        named = {"gpu": gpu or None, "gpus": gpus if gpus > 1 else None}
        question = Question(task, training, {**(settings or {}), **named}, allow)
        return await anyio.to_thread.run_sync(self._answered, question)

    def _answered(self, question: Question) -> Any:
        with self._turn:
            return self._worker.compute(question)


def _saying_errors(tool: Callable[..., Awaitable[Any]], refused: type[Exception]) -> Callable[..., Awaitable[Any]]:
    """Return a tool whose errors reach the agent in their own words."""

    @wraps(tool)
    async def called(**arguments: Any) -> Any:
        try:
            return await tool(**arguments)
        except TrainatomyError as error:
            raise refused(str(error)) from None

    return called


def serve(limits: Limits) -> None:
    """Serve the tools on standard input and output until that ends.

    Raises:
        MissingLibrary: The SDK is not installed.
    """
    sdk = import_library("mcp.server.mcpserver", "trainatomy mcp", install="'trainatomy[mcp]'")
    server = Server(limits)
    with suppress(TrainatomyError):
        server.start()
    tools = sdk.MCPServer("trainatomy", instructions=INSTRUCTIONS, log_level="WARNING")
    refused = import_library("mcp.server.mcpserver.exceptions", "trainatomy mcp").ToolError
    for tool in (server.predict, server.fit, server.why_out_of_memory, server.run):
        tools.tool()(_saying_errors(tool, refused))
    try:
        tools.run("stdio")
    finally:
        server.close()
        sys.stdout = sys.stderr  # the client has gone; nothing may be written to it
