"""The command line: one file per command, between ``trainatomy.api`` and the reporters."""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False  # importing little keeps the moment short in which Ctrl-C shows a traceback
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import NoReturn

DEBUG = "--debug"
owns_process = False
"""True if this process runs one command and ends; False where ``main`` is called from Python."""
has_shown_json = False
"""True if the command has printed its JSON object; an error after that is told by its exit code and on stderr."""


def main(arguments: Sequence[str]) -> int:
    """Run one command, report any error on stderr, and return the exit code (docs/exit-codes.md)."""
    global has_shown_json
    has_shown_json, json = False, wants_json(arguments)
    from trainatomy.cli import exits

    try:
        from trainatomy.cli.app import app

        outcome = app()(list(arguments), prog_name="trainatomy", standalone_mode=False)
        sys.stdout.flush()
    except BaseException as error:
        return exits.report(error, debug=DEBUG in arguments, json=json)
    return exits.explain_exit(outcome if isinstance(outcome, int) else 0, json=json)


def wants_json(arguments: Sequence[str]) -> bool:
    """Return whether ``--json`` is among the options of a command, and not among those of a script that it runs."""
    own = list(arguments[: arguments.index("--")] if "--" in arguments else arguments)
    if own[:1] == ["run"]:
        script = next((place for place, word in enumerate(own) if word == "-m" or word.endswith(".py")), None)
        own = own[:script]
    return "--json" in own


def run() -> NoReturn:
    """Run the ``trainatomy`` command: the entry point of the console script."""
    import signal

    global owns_process
    owns_process = True
    signal.signal(signal.SIGINT, _exit_quietly)
    if sys.stdout is None:  # closed by `>&-`; the exit code may still be of interest
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: PTH123, SIM115
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: PTH123, SIM115
    from trainatomy.cli import app, exits  # noqa: F401

    exits.listen()
    if _needs_workers(sys.argv[1:]):
        from trainatomy.runs.pools import start_early

        start_early()
    code = main(sys.argv[1:])
    exits.end(code, silently=exits.exit_code() is not None and DEBUG not in sys.argv)


_ALONE = ("-h", "--help", "--jobs", "--executor", "--script", "--measure")
"""Options with which ``fit`` and ``gpus --for`` may need no processes of their own."""


def _needs_workers(arguments: Sequence[str]) -> bool:
    """Return whether a command predicts in processes, which takes long to import what they need."""
    predicts = arguments[:1] == ["fit"] or (arguments[:1] == ["gpus"] and "--for" in arguments)
    return predicts and (os.cpu_count() or 1) > 1 and not any(word.startswith(_ALONE) for word in arguments)


def _exit_quietly(*_: object) -> NoReturn:
    """End without a traceback on Ctrl-C while modules are imported."""
    os.write(2, b"interrupted\n")
    os._exit(130)
