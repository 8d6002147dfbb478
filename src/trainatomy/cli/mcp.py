"""``trainatomy mcp``: answers for coding agents, by the Model Context Protocol."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from trainatomy.agents.server import serve
from trainatomy.cli.options import Debug, command
from trainatomy.option import Option
from trainatomy.requests.measuring import time_limit
from trainatomy.runs.worker import Limits


@dataclass(frozen=True, slots=True)
class McpCommand:
    """A server for an agent."""

    time_limit: Annotated[int, time_limit("Time limit for one answer (default: 300).", 1)] = 300
    memory_limit: Annotated[
        int, Option("--memory-limit", "Maximum host memory of the process, in GiB (default: 16).", min=1)
    ] = 16
    debug: Debug = False


@command
def mcp(request: McpCommand) -> None:
    """Serve `predict`, `fit`, `why_out_of_memory` and `run` to a coding agent, on standard input and output.

    Needs `pip install 'trainatomy[mcp]'`. For example: `claude mcp add trainatomy -- trainatomy mcp`.
    """
    serve(Limits(float(request.time_limit), request.memory_limit * 1024**3))
