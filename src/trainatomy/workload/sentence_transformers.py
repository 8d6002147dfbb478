"""The ``sentence_transformers`` section: the loss, the samples and the pooling of ``loop: sentence_transformers``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

from trainatomy.catalog.embedding_models import EmbeddingModel, embedding_model
from trainatomy.catalog.files import parse_yaml
from trainatomy.workload.document import suggestion
from trainatomy.workload.loops import loop_of
from trainatomy.workload.preference import is_of_preferences
from trainatomy.workload.section import Count, Index, Problem, Section, Settings, Text

if TYPE_CHECKING:
    from trainatomy.workload.schema import Workload

LOOP = "sentence_transformers"
DEFAULT_MINI_BATCH_SIZE = 32
"""Default of ``mini_batch_size`` in the constructors of cached losses."""


@dataclass(frozen=True, slots=True)
class Loss:
    """A row of ``sentence_transformers.yaml``.

    Attributes:
        name: Its class.
        negatives: Texts that a sample must have beside the two that are compared; None for any number.
        label: Kind of a sample's label, None without one.
        compares: Whether it compares a sample with the others of its batch.
        gathers: Whether it can compare with the samples of the other GPUs.
        cached: The loss that computes the same in mini-batches.
        plain: The loss of which this is the one in mini-batches.
    """

    name: str
    negatives: int | None = 0
    label: Literal["number", "class"] | None = None
    compares: bool = False
    gathers: bool = False
    cached: str | None = None
    plain: str | None = None


@cache
def _table() -> tuple[Mapping[str, Loss], Mapping[str, str]]:
    """Read ``sentence_transformers.yaml`` once: the losses by their names, and why others are refused."""
    raw = parse_yaml(files(__package__).joinpath("sentence_transformers.yaml").read_text(encoding="utf-8"))
    plain = {row["cached"]: name for name, row in raw["losses"].items() if "cached" in row}
    losses = {}
    for name, row in raw["losses"].items():
        negatives = None if row.get("negatives") == "any" else row.get("negatives", 0)
        losses[name] = Loss(name, **{**row, "negatives": negatives, "plain": plain.get(name)})
    return losses, {name: reason for reason, names in raw["refused"].items() for name in names}


def losses() -> Mapping[str, Loss]:
    """Return the losses that are simulated, by their names."""
    return _table()[0]


def refused_losses() -> Mapping[str, str]:
    """Return why other losses are refused, by their names."""
    return _table()[1]


def _known(name: str) -> str:
    if name in losses():
        return name
    reason = refused_losses().get(name)
    said = f"{name} is not simulated: it {reason}" if reason else f"unknown loss {name!r}{suggestion(name, losses())}"
    raise PydanticCustomError("loss", "{said}", {"said": said})


class SentenceTransformersSpec(Section):
    """What sentence-transformers' trainer has beside its arguments; names and defaults are the library's (6.2)."""

    loss: Annotated[Text, AfterValidator(_known)] = Field(
        default="MultipleNegativesRankingLoss", description="class of the loss, by its name"
    )
    negatives: Index | None = Field(
        default=None,
        description="hard negatives of a sample, beside its two texts (default: none; 1 with `TripletLoss`)",
    )
    mini_batch_size: Count | None = Field(
        default=None, description=f"samples that a cached loss embeds at once (default: {DEFAULT_MINI_BATCH_SIZE})"
    )
    gather_across_devices: bool = Field(
        default=False, description="compare samples with those of the other GPUs, where the loss can"
    )
    matryoshka_dims: tuple[Count, ...] = Field(
        default=(), description="dimensions for which `MatryoshkaLoss` computes the loss"
    )
    loss_kwargs: Settings = Field(
        default_factory=dict,
        description="further arguments of the loss's constructor, such as `{scale: 50}`",
    )
    pooling: Literal["mean", "cls", "lasttoken", "max", "weightedmean", "mean_sqrt_len_tokens"] | None = Field(
        default=None,
        description="how the embeddings of tokens become one (default: that of the model on the hub where it is known, "
        "else the library's: `lasttoken` of causal language models, `mean` of others)",
    )
    normalize: bool | None = Field(
        default=None,
        description="normalise embeddings (default: as the model on the hub does where it is known, or no)",
    )

    @property
    def row(self) -> Loss:
        """Return what is known of the loss."""
        return losses()[self.loss]

    @property
    def columns(self) -> int:
        """Return the texts of a sample."""
        return 2 + (self.row.negatives or 0 if self.negatives is None else self.negatives)

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of the loss's constructor that are given, beside the model."""
        found = {**self.loss_kwargs}
        if self.mini_batch_size is not None:
            found["mini_batch_size"] = self.mini_batch_size
        if self.gather_across_devices:
            found["gather_across_devices"] = True
        return found

    def contradictions(self) -> list[Problem]:
        """Refuse what the loss does not have."""
        return list(self._problems())

    def _problems(self) -> Iterator[Problem]:
        row, name = self.row, self.loss
        if self.mini_batch_size is not None and row.plain is None:
            instead = f"use {row.cached}, which computes the same" if row.cached else "leave it out"
            yield Problem(("mini_batch_size",), f"belongs to cached losses, and {name} is none: {instead}")
        if self.gather_across_devices and not row.gathers:
            yield Problem(("gather_across_devices",), f"{name} does not compare samples of several GPUs: leave it out")
        if self.negatives is not None and row.negatives not in (None, self.negatives):
            has = f"{row.negatives} negative" if row.negatives else "no negatives"
            yield Problem(("negatives",), f"samples of {name} have {has}: leave it out")
        for key in ("model", "loss", *type(self).model_fields):
            if key in self.loss_kwargs:
                where = "is the workload's" if key == "model" else f"give it as sentence_transformers.{key}"
                yield Problem(("loss_kwargs", key), where)


def is_of_sentence_transformers(workload: Workload) -> bool:
    """Return whether sentence-transformers' trainer runs the training."""
    return workload.mode == "training" and workload.loop == LOOP


def model_on_hub(workload: Workload) -> EmbeddingModel | None:
    """Return what is known of the embedding model that is trained, by its name on the hub."""
    return embedding_model(workload.model.id) if is_of_sentence_transformers(workload) else None


def sequences_of(workload: Workload) -> int:
    """Return the sequences that a sample has in the batch."""
    if is_of_preferences(workload):
        return workload.preference.sequences
    return (
        workload.sentence_transformers.columns if is_of_sentence_transformers(workload) else loop_of(workload).sequences
    )


def compares_in_batch(workload: Workload) -> bool:
    """Return whether samples are compared with others of their batch, so that a batch in parts trains otherwise."""
    return is_of_sentence_transformers(workload) and workload.sentence_transformers.row.compares
