"""The card of a workload: one of the list, or one with some facts changed."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, Tag
from pydantic_core import PydanticCustomError

from trainatomy.catalog.gpus import GPU, find_gpu, gpu_from_mapping
from trainatomy.errors import WorkloadError
from trainatomy.workload.section import Count, Index, Problem, Section, Text

_UNITS = {"": 1, "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)")


def _bytes(value: Any) -> Any:
    """``80 GiB`` in bytes; a number without a unit is bytes already."""
    if not isinstance(value, str):
        return value
    found = _SIZE.fullmatch(value.strip().replace("_", ""))
    if found is None or found[2] not in _UNITS or (not found[2] and "." in found[1]):
        raise PydanticCustomError("size", 'must be bytes, or a size such as "80 GiB" (KiB, MiB, GiB or TiB)')
    return round(float(found[1]) * _UNITS[found[2]]) if found[2] else int(found[1])


def _capability(value: Any) -> Any:
    """``9.0``, which YAML reads as a number, is the text ``9.0``."""
    text = str(value) if isinstance(value, float) else value
    if not isinstance(text, str) or not re.fullmatch(r"\d+\.\d", text):
        raise PydanticCustomError("capability", "must be a compute capability such as 9.0")
    return text


def _known(name: str) -> str:
    """Refuse the name of a card that is not in the list, with the nearest names."""
    try:
        find_gpu(name)
    except WorkloadError as error:
        raise PydanticCustomError("card", "{reason}", {"reason": str(error)}) from None
    return name


GPUName = Annotated[Text, AfterValidator(_known)]
"""The id or an alias of a card that ships as data."""


class GPUOverride(Section):
    """A card of the list with some facts changed; what is left out is the card's own."""

    base: GPUName = Field(default="h200", description="the card to start from")
    memory_bytes: Annotated[Count, BeforeValidator(_bytes)] | None = Field(
        default=None, description='memory that CUDA offers: bytes, or a text such as `"80 GiB"`'
    )
    context_bytes: Annotated[Index, BeforeValidator(_bytes)] | None = Field(
        default=None, description="what the process holds outside PyTorch's allocator: bytes or a text"
    )
    multiprocessors: Count | None = Field(default=None, description="number of streaming multiprocessors")
    capability: Annotated[str, BeforeValidator(_capability)] | None = Field(
        default=None, description="compute capability, such as `9.0`"
    )

    def contradictions(self) -> list[Problem]:
        """A context that fills the card leaves no room for anything."""
        if self.memory_bytes is not None and (self.context_bytes or 0) >= self.memory_bytes:
            return [Problem(("context_bytes",), "is as large as the card's memory")]
        return []

    def resolve_gpu(self) -> GPU:
        """The card with these changes."""
        changes = self.model_dump(exclude_none=True, exclude={"base", "context_bytes"})
        if self.context_bytes is not None:
            changes["context"] = {era: _context(self.context_bytes) for era in find_gpu(self.base).contexts}
        return gpu_from_mapping(changes, self.base)


def _context(size: int) -> dict[str, Any]:
    """A context that does not grow while kernels load."""
    return {"first_tensor_bytes": size, "loads_bytes": {}, "environment": "given by the user"}


def _kind(value: Any) -> str:
    return "changed" if isinstance(value, Mapping | GPUOverride) else "named"


GPUChoice = Annotated[Annotated[GPUName, Tag("named")] | Annotated[GPUOverride, Tag("changed")], Discriminator(_kind)]
"""A card by name, or a mapping that changes one."""
