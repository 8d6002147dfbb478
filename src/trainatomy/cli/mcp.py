"""``trainatomy mcp``: answers for coding agents, by the Model Context Protocol."""

from __future__ import annotations

from dataclasses import dataclass

from trainatomy.agents.server import serve
from trainatomy.cli.options import DEBUG, command
from trainatomy.option import option
from trainatomy.runs.worker import Limits


@dataclass(frozen=True, slots=True)
class McpCommand:
    """A server for an agent."""

    time_limit: int = option(300, "Time limit for one answer (default: 300).", metavar="SECONDS", min=1)
    memory_limit: int = option(16, "Maximum host memory of the process, in GiB (default: 16).", min=1)
    debug: bool = option(False, DEBUG)


@command
def mcp(request: McpCommand) -> None:
    """Serve `predict`, `fit`, `why_out_of_memory` and `run` to a coding agent, on standard input and output.

    Needs `pip install 'trainatomy[mcp]'`. For example: `claude mcp add trainatomy -- trainatomy mcp`.
    """
    serve(Limits(float(request.time_limit), request.memory_limit * 1024**3))
