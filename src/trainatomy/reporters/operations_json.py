"""The operation breakdown of a step as JSON (``ops --json``), and its schema."""

from __future__ import annotations

from typing import Any

from trainatomy.records.document import to_plain
from trainatomy.reporters.schema import _document, _tagged
from trainatomy.reporters.sentences import claim_sentence, padding_advice
from trainatomy.results.operation_breakdown import OperationBreakdown

ANATOMY = "trainatomy/operations/1"


def anatomy_to_json(anatomy: OperationBreakdown) -> dict[str, Any]:
    """Return an object of plain JSON types with the dataclass's keys, and sentences for claims and paddings."""
    plain = {"schema": ANATOMY, **to_plain(anatomy)}
    plain["claims"] = [
        {**entry, "sentence": claim_sentence(claim)}
        for entry, claim in zip(plain["claims"], anatomy.claims, strict=True)
    ]
    plain["paddings"] = [
        {**entry, "how": padding_advice(padding)}
        for entry, padding in zip(plain["paddings"], anatomy.paddings, strict=True)
    ]
    return plain


def anatomy_schema() -> dict[str, Any]:
    """Return the JSON Schema of ``ops --json``."""
    definitions: dict[str, Any] = {}
    document = _document("The operations of a step", _tagged(OperationBreakdown, ANATOMY, definitions), definitions)
    for name, key in (("Claim", "sentence"), ("Padding", "how")):
        definitions[name]["properties"][key] = {"type": "string"}
        definitions[name]["required"].append(key)
    return document
