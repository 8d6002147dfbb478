"""``trainatomy app``: the page in the browser, or the files of a Space that shows it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from trainatomy.cli.options import Debug, in_output, in_run, time_limit_option
from trainatomy.cli.output import note

Host = Annotated[str, in_run("--host", "Address to serve on; 0.0.0.0 for other machines too.", metavar="ADDRESS")]
Port = Annotated[int | None, in_run("--port", "Port to serve on (default: a free one from 7860).", min=1, max=65535)]
Browser = Annotated[bool, in_output("--open", "Open the page in the browser.")]
Space = Annotated[
    Path | None,
    in_output("--space", "Write the files of a Hugging Face Space into this folder, and serve nothing.", metavar="DIR"),
]
TimeLimit = Annotated[int, time_limit_option("Time limit for one request (default: 120).", min=1)]
Memory = Annotated[int, in_run("--memory-limit", "Maximum host memory of a process, in GiB (default: 8).", min=1)]


def app(
    host: Host = "127.0.0.1",
    port: Port = None,
    time_limit: TimeLimit = 120,
    memory_limit: Memory = 8,
    open_page: Browser = False,
    space: Space = None,
    debug: Debug = False,
) -> None:
    """Predict in the browser: choose a model, settings and a GPU; see memory, time and what fits.

    Needs `pip install 'trainatomy[app]'`. The page runs no code of the hub and reads no folders of the server.
    """
    if space is not None:
        from trainatomy.app.space import write_space

        for path in write_space(space):
            note(f"wrote {path}")
        return
    from trainatomy.app.page import launch
    from trainatomy.app.worker import Limits

    launch(host=host, port=port, is_opened=open_page, limits=Limits(float(time_limit), memory_limit * 1024**3))
