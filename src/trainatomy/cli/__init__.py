"""The command line: one small file per command, between ``trainatomy.api`` and ``faces.text`` or ``faces.json``."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import NoReturn

DEBUG = "--debug"


def main(arguments: Sequence[str]) -> int:
    """Run one command and say what went wrong, if anything did; returns the exit code (docs/exit-codes.md)."""
    try:
        from trainatomy.cli.app import app

        outcome = app()(list(arguments), prog_name="trainatomy", standalone_mode=False)
        sys.stdout.flush()
    except BaseException as error:
        from trainatomy.cli.exits import report

        return report(error, debug=DEBUG in arguments)
    from trainatomy.cli.exits import explain_exit

    return explain_exit(outcome if isinstance(outcome, int) else 0)


def run() -> NoReturn:
    """The entry point of the ``trainatomy`` command."""
    sys.exit(main(sys.argv[1:]))
