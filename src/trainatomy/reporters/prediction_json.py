"""A prediction as ``--json`` prints it.

The draft of version 2: memory by rank, and the names that its keys will have.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, fields, replace
from typing import Any, Self

from trainatomy.reporters.json_format import ABSENT, Derived, Format, view
from trainatomy.reporters.sentences import fact_source, fact_value, reasons
from trainatomy.reporters.subject_sentences import subject_line
from trainatomy.results.duration import Duration, TrainingCost
from trainatomy.results.host import HostBill, HostPhase
from trainatomy.results.lengths import LengthsPrediction
from trainatomy.results.memory import Verdict
from trainatomy.results.operations import Padding
from trainatomy.results.prediction import BytesPerParameter, Fact, GPUSummary, Prediction, RankPrediction, Subject
from trainatomy.results.script import ScriptRun
from trainatomy.results.tasks import Checkpoint, Evaluation, Generation, RestoredCheckpoint
from trainatomy.results.time import Time


@dataclass(frozen=True)
class _Line:
    line: str


@dataclass(frozen=True, slots=True)
class WrittenSubject(Subject, _Line):
    """What was predicted, with the line that pages show."""


@dataclass(frozen=True, slots=True)
class SaidPrediction(Prediction):
    """A predicted training, with sentences where the value has codes."""

    subject: WrittenSubject | None = None

    @classmethod
    def of(cls, prediction: Prediction, **given: object) -> Self:
        """Return a prediction with its sentences."""
        subject = prediction.subject
        return view(
            cls,
            prediction,
            bytes_per_parameter=replace(prediction.bytes_per_parameter, reasons=tuple(reasons(prediction))),
            facts=tuple(replace(fact, value=fact_value(fact), source=fact_source(fact)) for fact in prediction.facts),
            subject=subject and view(WrittenSubject, subject, line=subject_line(prediction)),
            **given,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenPrediction(SaidPrediction):
    """A predicted training, and how long the whole of it takes where that is known."""

    duration: Duration | None


@dataclass(frozen=True, slots=True)
class PredictionDocument(WrittenPrediction):
    """A predicted training.

    With `--why-oom`, `shortage` is what `fit --why-oom --json` prints. Where the duration and a price are known, `cost`
    is that of the whole training.
    """

    cost: TrainingCost = ABSENT
    shortage: dict[str, Any] = ABSENT


_SEVERITY: tuple[Verdict, ...] = ("fits", "tight", "does not fit")


@dataclass(frozen=True, slots=True)
class PredictionV2:
    """A predicted training, with its memory by rank.

    A training fits if all ranks do; `verdict` is the worst one of any rank.  Components of memory may be more than
    the eight standard ones.  Facts with an `amount` have an empty `value`; `reasons` are codes.
    """

    name: str
    workload: dict[str, object]
    card: GPUSummary
    fits: bool
    verdict: Verdict
    ranks: tuple[RankPrediction, ...]
    bytes_per_parameter: BytesPerParameter
    facts: tuple[Fact, ...]
    notes: tuple[str, ...]
    time: Time | None
    seconds_taken: float
    versions: dict[str, str]
    without_workspace: int
    trials: int
    evaluation: Evaluation | None = None
    generation: Generation | None = None
    checkpoint: Checkpoint | None = None
    restored: tuple[RestoredCheckpoint, ...] = ()
    lengths: LengthsPrediction | None = None
    script: ScriptRun | None = None
    subject: Subject | None = None
    leading_notes: tuple[str, ...] = ()
    paddings: tuple[Padding, ...] = ()
    host_bill: HostBill | None = None

    @classmethod
    def of(cls, prediction: Prediction) -> PredictionV2:
        """Return the form of version 2 of a prediction."""
        ranks = tuple(prediction.ranks.values())
        made: dict[str, Any] = {"ranks": ranks, "fits": all(each.fits for each in ranks)}
        made["verdict"] = max((each.verdict for each in ranks), key=_SEVERITY.index)
        kept = {each.name: getattr(prediction, each.name) for each in fields(cls) if each.name not in made}
        return cls(**kept, **made)


_NAMES_V2 = {
    "card": "gpu",
    "functionality": "inputs_and_workspaces",
    "general_rule_only": "operators_by_traffic_only",
    "host": "cpu",
    "host_seconds": "cpu_seconds",
    "modules": "activations_by_module",
    "num_alloc_retries": "allocator_retries",
    "priced_by": "kernel_times_from",
    "room_bytes": "headroom_bytes",
    "slow_host": "slow_cpu",
    "trials": "convolutions_with_trials",
    "without_workspace": "convolutions_without_workspace",
}
"""Keys of version 1 that have another name in version 2."""


def renamed_v2(value: Any, key: str = "") -> Any:
    """Return a JSON value or a JSON Schema of version 1 with the names of version 2."""
    if isinstance(value, dict):
        if key in ("workload", "versions"):
            return value
        return {_NAMES_V2.get(name, name): renamed_v2(item, name) for name, item in value.items()}
    if isinstance(value, list):
        return [renamed_v2(item, key) for item in value]
    if key in ("component", "bound_by", "required", "enum"):
        return _NAMES_V2.get(value, value)
    if key == "description":
        return re.sub(r"`(\w+)`|\b\w+_\w+\b", _renamed_word, value)
    return value


def _renamed_word(match: re.Match[str]) -> str:
    word = match[0].strip("`")
    return match[0].replace(word, _NAMES_V2.get(word, word))


_PHASE = {name: getattr(HostPhase, name).fget for name in ("needed_bytes", "held_bytes")}
_BILL = {name: getattr(HostBill, name).fget for name in ("verdict", "shortages")}
HOST_KEYS = {HostPhase: Derived(last=_PHASE), HostBill: Derived(last=_BILL)}
PREDICTION = Format("trainatomy/prediction/1", "A prediction", PredictionDocument, PredictionDocument.of, HOST_KEYS)
PREDICTION_2 = Format(
    "trainatomy/prediction/2-draft", "A prediction (draft of version 2)", PredictionV2, PredictionV2.of, HOST_KEYS
)
