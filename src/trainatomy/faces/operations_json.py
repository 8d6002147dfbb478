"""The anatomy of a step's operations as JSON (``ops --json``), and the schema of that."""

from __future__ import annotations

from typing import Any

from trainatomy.faces.json import _plain
from trainatomy.faces.schema import _document, _tagged
from trainatomy.results.anatomy import Anatomy

ANATOMY = "trainatomy/operations/1"


def anatomy_to_json(anatomy: Anatomy) -> dict[str, Any]:
    """An object of plain JSON types; the keys are those of the dataclass."""
    return {"schema": ANATOMY, **_plain(anatomy)}


def anatomy_schema() -> dict[str, Any]:
    """Of ``ops --json``."""
    definitions: dict[str, Any] = {}
    return _document("The operations of a step", _tagged(Anatomy, ANATOMY, definitions), definitions)
