"""References to the user's own code: ``package.module:build`` or ``path/to/file.py:build``.

Only the form is checked here; ``training/`` imports and calls it.
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
"""A reference to a function of the user's."""


def is_file(place: str) -> bool:
    """Whether the part before the colon names a file rather than a module."""
    return place.endswith(".py")


def resolve(reference: str, folder: Path) -> str:
    """Make a relative file of a reference absolute, starting from ``folder``; a module stays as it is."""
    place, colon, name = reference.rpartition(":")
    if not colon or not is_file(place):
        return reference
    return f"{(folder / Path(place).expanduser()).resolve()}:{name}"
