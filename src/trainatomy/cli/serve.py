"""``trainatomy app``: the page in the browser, or the files of a Space that shows it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from trainatomy.app.page import launch
from trainatomy.app.space import write_space
from trainatomy.cli.options import DEBUG, command
from trainatomy.cli.output import note
from trainatomy.option import in_output, option
from trainatomy.runs.worker import Limits


@dataclass(frozen=True, slots=True)
class AppCommand:
    """A page to serve, or to write the files of."""

    host: str = option("127.0.0.1", "Address to serve on; 0.0.0.0 for other machines too.", metavar="ADDRESS")
    port: int | None = option(None, "Port to serve on (default: a free one from 7860).", min=1, max=65535)
    time_limit: int = option(120, "Time limit for one request (default: 120).", metavar="SECONDS", min=1)
    memory_limit: int = option(8, "Maximum host memory of a process, in GiB (default: 8).", min=1)
    open_page: bool = in_output(False, "Open the page in the browser.", name="--open")
    space: Path | None = in_output(
        None, "Write the files of a Hugging Face Space into this folder, and serve nothing.", metavar="DIR"
    )
    debug: bool = option(False, DEBUG)


@command
def app(request: AppCommand) -> None:
    """Predict in the browser: choose a model, settings and a GPU; see memory, time and what fits.

    Needs `pip install 'trainatomy[app]'`. The page runs no code of the hub and reads no folders of the server.
    """
    if request.space is not None:
        for path in write_space(request.space):
            note(f"wrote {path}")
        return
    limits = Limits(float(request.time_limit), request.memory_limit * 1024**3)
    launch(host=request.host, port=request.port, is_opened=request.open_page, limits=limits)
