"""A card that differs from one that ships as data."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from trainatomy.workload.section import Count, Index, Problem, Section, Text

_UNITS = {"": 1, "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)")


def _bytes(value: Any) -> Any:
    """``80 GiB`` in bytes; a plain number is bytes already."""
    if not isinstance(value, str):
        return value
    found = _SIZE.fullmatch(value.strip().replace("_", ""))
    if found is None or found[2] not in _UNITS:
        units = ", ".join(list(_UNITS)[2:])
        message = 'must be bytes, or a size such as "80 GiB" (units: {units})'
        raise PydanticCustomError("size", message, {"units": units})
    return round(float(found[1]) * _UNITS[found[2]]) if found[2] else int(float(found[1]))


def _capability(value: Any) -> Any:
    if isinstance(value, str) and not re.fullmatch(r"\d+\.\d", value) or isinstance(value, bool | int):
        raise PydanticCustomError("capability", "must be a compute capability such as 9.0")
    return f"{value:.1f}" if isinstance(value, float) else value


class CardOverride(Section):
    """A card of the list with some facts changed; what is left out is the card's own."""

    base: Text = Field("h200", description="the card to start from")
    memory_bytes: Annotated[Count, BeforeValidator(_bytes)] | None = Field(
        None, description='memory that CUDA can use: bytes, or a text such as `"80 GiB"`'
    )
    context_bytes: Annotated[Index, BeforeValidator(_bytes)] | None = Field(
        None, description="what the process holds outside PyTorch's allocator: bytes or a text"
    )
    multiprocessors: Count | None = Field(None, description="number of streaming multiprocessors")
    compute_capability: Annotated[str, BeforeValidator(_capability)] | None = Field(
        None, description="compute capability, such as `9.0`"
    )

    def contradictions(self) -> list[Problem]:
        """A context that fills the card leaves no room for anything."""
        if self.memory_bytes is not None and (self.context_bytes or 0) >= self.memory_bytes:
            return [Problem(("context_bytes",), "is as large as the card's memory")]
        return []
