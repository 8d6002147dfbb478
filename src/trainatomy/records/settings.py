"""A workload's settings by dotted key: ``{"model.id": "gpt2", "train.bf16": False, ...}``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from trainatomy.errors import WorkloadError
from trainatomy.workload.schema import Workload


def settings(workload: Mapping[str, object]) -> dict[str, object] | None:
    """Every setting that has a value, those left at their default included; ``None`` for a workload that this version
    does not know how to read."""
    try:
        whole = Workload.from_mapping(workload).model_dump(mode="json", by_alias=True)
    except WorkloadError:
        return None
    return stated(whole)


def stated(workload: Mapping[str, object]) -> dict[str, object]:
    """The settings that ``workload`` itself states; an absent one and ``None`` are the same."""
    return {key: value for key, value in _flat(workload, "") if value is not None}


def _flat(mapping: Mapping[str, object], prefix: str) -> Iterator[tuple[str, object]]:
    for key, value in mapping.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
