"""The anatomy of a step's operations as JSON (``ops --json``), and the schema of that."""

from __future__ import annotations

from typing import Any

from trainatomy.records.document import to_plain
from trainatomy.reporters.schema import _document, _tagged
from trainatomy.results.operation_breakdown import OperationBreakdown

ANATOMY = "trainatomy/operations/1"


def anatomy_to_json(anatomy: OperationBreakdown) -> dict[str, Any]:
    """An object of plain JSON types; the keys are those of the dataclass."""
    return {"schema": ANATOMY, **to_plain(anatomy)}


def anatomy_schema() -> dict[str, Any]:
    """Of ``ops --json``."""
    definitions: dict[str, Any] = {}
    return _document("The operations of a step", _tagged(OperationBreakdown, ANATOMY, definitions), definitions)
