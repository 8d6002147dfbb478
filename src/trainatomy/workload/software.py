"""The software that a workload runs on: PyTorch's version and its allocator's settings."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field
from pydantic_core import PydanticCustomError

from trainatomy.workload.section import Section

_VERSION = re.compile(r"\d+\.\d+(\.\d+)?([a-z+.-]\S*)?")
_SETTING = re.compile(r"\s*\w+\s*:\s*(\[[^\[\]]*\]|[^,\[\]\s]+)\s*")


def _version(value: Any) -> Any:
    """A version must be quoted in YAML, which reads 2.10 as the number 2.1."""
    if isinstance(value, int | float):
        raise PydanticCustomError("version", 'is read as a number: put it in quotes, as in torch: "2.10"')
    if isinstance(value, str) and not _VERSION.fullmatch(value):
        raise PydanticCustomError("version", 'must be a version such as "2.11" or "2.11.0"')
    return value


def _settings(text: str) -> str:
    """Only the form is checked: which settings exist depends on PyTorch's version, which the allocator twin knows."""
    for setting in re.split(r",(?![^\[]*\])", text.rstrip(", ")) if text.strip() else ():
        if not _SETTING.fullmatch(setting):
            message = 'must look like "expandable_segments:True,max_split_size_mb:128", found {setting}'
            raise PydanticCustomError("settings", message, {"setting": repr(setting.strip())})
    return text


AllocatorSettings = Annotated[str, AfterValidator(_settings)]
"""A text as in ``PYTORCH_ALLOC_CONF``."""


class SoftwareSpec(Section):
    """The software whose rules are simulated."""

    torch: Annotated[str, BeforeValidator(_version)] | None = Field(
        default=None,
        description='version of PyTorch whose allocator is simulated, such as `"2.11"`; without it, the installed',
    )
