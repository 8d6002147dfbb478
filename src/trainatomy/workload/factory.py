"""References to the user's code: ``package.module:build`` or ``path/to/file.py:build``.

Only the syntax is checked here; ``training/`` imports and calls the function.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator
from pydantic_core import PydanticCustomError

_MODULE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
_FORMS = '"package.module:function" or "path/to/file.py:function"'


def _check(reference: str) -> str:
    place, colon, name = reference.rpartition(":")
    if not colon or not place or not name:
        raise PydanticCustomError("factory", "must look like {forms}", {"forms": _FORMS})
    if not _MODULE.fullmatch(name):
        raise PydanticCustomError("factory", "{name} is not the name of a function", {"name": repr(name)})
    if not is_file(place) and not _MODULE.fullmatch(place):
        raise PydanticCustomError("factory", "must look like {forms}", {"forms": _FORMS})
    return reference


Factory = Annotated[str, AfterValidator(_check)]
"""A reference to a function in the user's code."""


REFERENCES = ("factory", "compute_metrics", "preprocess_logits_for_metrics")
"""Keys whose value may be a reference to a function in the user's code."""


def is_file(place: str) -> bool:
    """Return whether the part before the colon is a file rather than a module."""
    return place.endswith(".py")


def resolve(reference: str, folder: Path) -> str:
    """Return a reference with its file as an absolute path, starting from ``folder``; modules are unchanged."""
    place, colon, name = reference.rpartition(":")
    if not colon or not is_file(place):
        return reference
    return f"{(folder / Path(place).expanduser()).resolve()}:{name}"
