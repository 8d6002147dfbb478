"""Keep the libraries quiet while they work for us: what they say is about their own running, not about the training."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout

_QUIET = {
    "TRANSFORMERS_VERBOSITY": "error",
    "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "BITSANDBYTES_NOWELCOME": "1",
}


@contextmanager
def quiet_libraries(*, debug: bool) -> Iterator[None]:
    """While this is entered, stdout is only ours: what others print goes to stderr, and warnings and logs are dropped
    unless ``debug``.

    What a user's factory prints is kept: it reaches stderr.
    """
    with redirect_stdout(sys.stderr):
        if debug:
            yield
            return
        for name, value in _QUIET.items():
            os.environ.setdefault(name, value)
        logging.disable(logging.ERROR)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                yield
        finally:
            logging.disable(logging.NOTSET)
