"""Configurations of well-known models, so that they can be built without a network.

Each file in ``architectures/`` holds the fields of the hub's config.json that shape the model.  ``index.json`` lists
them with class, number of parameters and source, and is all that a listing reads.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from trainatomy.catalog.files import close_names, read_text, read_yaml


@dataclass(frozen=True, slots=True)
class ArchitectureEntry:
    """An entry of the index.

    Attributes:
        class_name: The transformers class of the checkpoint.
        parameters: Parameters of that class built from the configuration; shared tensors count once.
        parameters_published: The hub's figure, where there is one.
        stored_dtype: Dtype of the checkpoint's weights where its configuration names none.
        also: Hub ids of the same architecture (chat versions, old names).
    """

    hub_id: str
    class_name: str
    model_type: str
    parameters: int
    parameters_published: int | None
    source: str
    stored_dtype: str | None = None
    also: tuple[str, ...] = ()
    note: str = ""


@dataclass(frozen=True, slots=True)
class Architecture:
    """An entry with its configuration, as the hub's config.json names the fields, and the dtype of the checkpoint."""

    entry: ArchitectureEntry
    config: Mapping[str, Any]

    @property
    def hub_id(self) -> str:
        return self.entry.hub_id

    @property
    def class_name(self) -> str:
        return self.entry.class_name

    @property
    def parameters(self) -> int:
        return self.entry.parameters

    @property
    def source(self) -> str:
        return self.entry.source


def architecture(name: str) -> Architecture | None:
    """Return the architecture with a hub id or its last part ("gpt2"), ignoring case; None if none ships."""
    hub_id = _ids_by_name().get(original_name(name).strip().lower())
    if hub_id is None:
        return None
    config: dict[str, Any] = json.loads(read_text("architectures", f"{hub_id.replace('/', '--')}.json"))
    entry = _entries()[hub_id]
    return Architecture(entry, config if entry.stored_dtype is None else {**config, "dtype": entry.stored_dtype})


def original_name(name: str) -> str:
    """Return the name of the model of which another is a copy, perhaps with quantised weights; else the name itself."""
    copies = read_yaml("copies.yaml")["owners"]
    owner, _, rest = name.strip().partition("/")
    return name if owner.lower() not in copies else re.sub(copies[owner.lower()], "", rest, flags=re.IGNORECASE)


def quantization_of_copy(name: str) -> dict[str, Any] | None:
    """Return how a copy's weights are stored, by its name; None where they are not quantised."""
    known = read_yaml("copies.yaml")
    is_copy = name.partition("/")[0].lower() in known["owners"]
    found = (content for ending, content in known["endings"].items() if is_copy and name.lower().endswith(ending))
    return next((dict(content) for content in found), None)


def architectures() -> tuple[ArchitectureEntry, ...]:
    """Return all architectures that ship, by family and size, from the index alone."""
    return tuple(_entries().values())


def nearest(name: str, count: int = 4) -> list[str]:
    """Return hub ids whose names resemble ``name``, nearest first."""
    found = close_names(name.strip().lower(), _ids_by_name(), 3 * count)
    return list(dict.fromkeys(_ids_by_name()[key] for key in found))[:count]


def has_chat_template(name: str) -> bool:
    """Return whether the tokenizer of a model on the hub has a chat template, as far as its name says."""
    known = read_yaml("tokenizers.yaml")["chat_template"]
    words = re.split(r"[^a-z]+", name.lower().rpartition("/")[2])
    return not {*words}.isdisjoint(known["words"]) or name.lower().startswith(tuple(known["beginnings"]))


def conversation_markers() -> list[str]:
    """Return the markers of conversations that vocabularies have."""
    markers: list[str] = read_yaml("tokenizers.yaml")["markers"]
    return markers


@lru_cache(maxsize=1)
def _entries() -> dict[str, ArchitectureEntry]:
    def entry(hub_id: str, fields: dict[str, Any]) -> ArchitectureEntry:
        also = tuple(fields.pop("also"))
        return ArchitectureEntry(hub_id, class_name=fields.pop("class"), also=also, **fields)

    index = json.loads(read_text("architectures", "index.json"))["architectures"]
    return {hub_id: entry(hub_id, fields) for hub_id, fields in index.items()}


@lru_cache(maxsize=1)
def _ids_by_name() -> dict[str, str]:
    full = {name.lower(): entry.hub_id for entry in _entries().values() for name in (entry.hub_id, *entry.also)}
    return {name.partition("/")[2]: hub_id for name, hub_id in full.items()} | full
