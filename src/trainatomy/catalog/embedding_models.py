"""How embedding models on the hub make one embedding of those of the tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from trainatomy.catalog.files import read_yaml


@dataclass(frozen=True, slots=True)
class EmbeddingModel:
    """What the files of sentence-transformers beside a checkpoint say.

    Attributes:
        pooling: Mode of its ``Pooling``.
        normalize: Whether ``Normalize`` follows.
        max_seq_length: Tokens to which texts are cut unless a script sets another number.
    """

    pooling: str
    normalize: bool
    max_seq_length: int


def embedding_model(hub_id: str | None) -> EmbeddingModel | None:
    """Return what is known of a model on the hub, None for others."""
    return _models().get((hub_id or "").strip().lower())


@cache
def _models() -> Mapping[str, EmbeddingModel]:
    found = read_yaml("embedding_models.yaml")["models"]
    return {name.lower(): EmbeddingModel(**fields) for name, fields in found.items()}
