"""The ``preference`` section: the trainer and the loss of ``loop: preference``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from trainatomy.workload.section import Amount, Problem, Section

if TYPE_CHECKING:
    from trainatomy.workload.schema import Workload

LOOP = "preference"
Loss = Literal["sigmoid", "hinge", "ipo", "kto_pair", "orpo", "simpo", "cpo", "kto", "reward"]
WITHOUT_REFERENCE = frozenset({"orpo", "simpo", "cpo", "reward"})
"""Losses that compare with no other model."""


@dataclass(frozen=True, slots=True)
class Framework:
    """A framework whose trainers are known.

    Attributes:
        name: Its name for people.
        losses: Losses of its trainers.
        auxiliary: Those to which it can add the loss of supervised fine-tuning.
        multiple: The length of a batch is rounded up to a multiple of this.
        rewards_by_classifier: Whether its reward model is a classifier of sequences; else it is a causal language model
            with a head for values.
    """

    name: str
    losses: frozenset[str]
    auxiliary: frozenset[str]
    multiple: int = 1
    rewards_by_classifier: bool = True


FRAMEWORKS: Mapping[str, Framework] = {
    "llamafactory": Framework(
        "LLaMA-Factory",
        losses=frozenset({"sigmoid", "hinge", "ipo", "kto_pair", "orpo", "simpo", "kto", "reward"}),
        auxiliary=frozenset({"sigmoid", "hinge", "ipo", "kto_pair", "orpo", "simpo", "kto"}),
        multiple=8,
        rewards_by_classifier=False,
    ),
    "swift": Framework(
        "ms-swift",
        losses=frozenset({"sigmoid", "hinge", "ipo", "orpo", "simpo", "cpo", "kto", "reward"}),
        auxiliary=frozenset({"sigmoid", "hinge", "ipo", "simpo", "cpo"}),
    ),
    "axolotl": Framework(
        "axolotl",
        losses=frozenset({"sigmoid", "hinge", "ipo", "orpo", "simpo"}),
        auxiliary=frozenset({"simpo"}),
    ),
}
"""The values of ``preference.trainer``."""


class PreferenceSpec(Section):
    """Whose trainer computes which loss on answers that people prefer, or do not."""

    trainer: Literal["llamafactory", "swift", "axolotl"] = Field(
        default="llamafactory", description="framework whose trainer's step is run"
    )
    loss_type: Loss = Field(
        default="sigmoid",
        description="loss: of pairs of answers beside a reference model (`sigmoid`, `hinge`, `ipo`, `kto_pair`) or "
        "without one (`orpo`, `simpo`, `cpo`), of single answers that are good or bad (`kto`), or of a reward model "
        "(`reward`)",
    )
    rpo_alpha: Amount = Field(default=0.0, description="weight of the loss of supervised fine-tuning that is added")

    @property
    def framework(self) -> Framework:
        """Return what is known of the framework."""
        return FRAMEWORKS[self.trainer]

    @property
    def sequences(self) -> int:
        """Return the sequences that a sample has in the batch: two where it is a pair of answers."""
        return 1 if self.loss_type == "kto" else 2

    @property
    def is_of_classifier(self) -> bool:
        """Return whether the model is a classifier of sequences."""
        return self.loss_type == "reward" and self.framework.rewards_by_classifier

    def contradictions(self) -> list[Problem]:
        """Refuse what the framework's trainer does not have."""
        return list(self._problems())

    def _problems(self) -> Iterator[Problem]:
        name = self.framework.name
        if self.loss_type not in self.framework.losses:
            known = ", ".join(sorted(self.framework.losses))
            yield Problem(("loss_type",), f"{self.loss_type} is not simulated as {name} computes it: {known} are")
        elif self.rpo_alpha and self.loss_type not in self.framework.auxiliary:
            yield Problem(("rpo_alpha",), f"{name} adds no loss of fine-tuning to {self.loss_type}: leave it out")


def is_of_preferences(workload: Workload) -> bool:
    """Return whether ``loop: preference`` runs the training."""
    return workload.mode == "training" and workload.loop == LOOP


def has_reference_model(workload: Workload) -> bool:
    """Return whether ``loop: preference`` keeps a second model; with adapters, the model without them serves."""
    compares = is_of_preferences(workload) and workload.preference.loss_type not in WITHOUT_REFERENCE
    return compares and not workload.model.has_adapters
