"""The software of a workload: PyTorch's version, the settings of its allocator, the source of cuDNN's workspaces."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field
from pydantic_core import PydanticCustomError

from trainatomy.catalog.versions import parse_version, version_note
from trainatomy.errors import WorkloadError
from trainatomy.workload.section import Section

_VERSION = re.compile(r"\d+\.\d+(\.\d+)?([a-z+.-]\S*)?")
_SETTING = re.compile(r"\s*\w+\s*:\s*(\[[^\[\]]*\]|[^,\[\]\s]+)\s*")


def _version(value: Any) -> Any:
    """Refuse numbers (YAML reads 2.10 as 2.1), malformed versions, and releases whose rules are not known."""
    if isinstance(value, int | float):
        raise PydanticCustomError("version", 'is read as a number: put it in quotes, as in torch: "2.10"')
    if isinstance(value, str) and not _VERSION.fullmatch(value):
        raise PydanticCustomError("version", 'must be a version such as "2.11" or "2.11.0"')
    if isinstance(value, str):
        try:
            version_note("torch", parse_version(value))
        except WorkloadError as error:
            raise PydanticCustomError("version", "{reason}", {"reason": str(error)}) from None
    return value


def _settings(text: str) -> str:
    """Check the syntax; which settings exist depends on PyTorch's version and is checked by the simulated allocator."""
    for setting in re.split(r",(?![^\[]*\])", text.rstrip(", ")) if text.strip() else ():
        if not _SETTING.fullmatch(setting):
            message = 'must look like "expandable_segments:True,max_split_size_mb:128", found {setting}'
            raise PydanticCustomError("settings", message, {"setting": repr(setting.strip())})
    return text


AllocatorSettings = Annotated[str, AfterValidator(_settings)]
"""Allocator settings in the syntax of ``PYTORCH_ALLOC_CONF``."""


class SoftwareSpec(Section):
    """The software that is simulated: PyTorch's version, and where cuDNN's choices come from."""

    torch: Annotated[str, BeforeValidator(_version)] | None = Field(
        default=None,
        description='version of PyTorch to simulate, such as `"2.11"` (default: the installed one)',
    )
    cudnn: Literal["auto", "library", "rules"] = Field(
        default="auto",
        description="workspaces of convolutions: `library`: as cuDNN's own library chooses (9.8 or newer, it needs no "
        "GPU), `rules`: by rules, `auto`: `library` where it is installed",
    )
