"""The anatomy of a step's operations: what each group does, in which phase, and where it is heaviest. Plain values."""

from __future__ import annotations

from dataclasses import dataclass

TITLES = {
    "contraction": "tensor contractions",
    "normalisation": "statistical normalisations",
    "elementwise": "element-wise operators",
}
"""The groups by the names of Ivanov et al. (arXiv 2007.00072)."""


@dataclass(frozen=True, slots=True)
class GroupShare:
    """One group of operations in one phase (``step``: all of them).

    ``flop`` and ``bytes``: of all its operations; ``intensity``: FLOP per byte (``None``: nothing is moved); shares
    are of the whole phase, 0 to 1.  ``peak_bytes``: what its results hold at the peak of memory (``step`` only).
    ``seconds`` is predicted, ``measured_seconds`` measured, both of the GPU at work on it; ``bound_by`` names what
    bounds most of that time.
    """

    group: str
    phase: str
    operations: int
    flop: int
    bytes: int
    intensity: float | None
    flop_share: float
    bytes_share: float
    peak_bytes: int | None = None
    seconds: float | None = None
    seconds_share: float | None = None
    bound_by: str | None = None
    measured_seconds: float | None = None
    measured_share: float | None = None


@dataclass(frozen=True, slots=True)
class HeavyOperation:
    """All calls of one operator in one module (layers folded) and phase."""

    operation: str
    module: str
    phase: str
    group: str
    calls: int
    flop: int | None
    bytes: int
    flop_share: float
    bytes_share: float
    seconds: float | None = None
    seconds_share: float | None = None
    bound_by: str | None = None
    measured_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class ModuleShare:
    """All operations of one module itself (layers folded), without those of the modules in it."""

    module: str
    operations: int
    flop: int
    bytes: int
    flop_share: float
    bytes_share: float
    seconds: float | None = None
    seconds_share: float | None = None
    measured_seconds: float | None = None
    measured_share: float | None = None


@dataclass(frozen=True, slots=True)
class Unformulated:
    """An operator without a FLOP formula: how often it runs, the bytes that it moves, why."""

    operation: str
    calls: int
    bytes: int
    bytes_share: float
    why: str


@dataclass(frozen=True, slots=True)
class Claim:
    """What the guides say of every model, shown for this one: two numbers, their ratio (``None``: the first is
    nothing), and the sentence."""

    name: str
    forward: float
    backward: float
    ratio: float | None
    sentence: str


@dataclass(frozen=True, slots=True)
class WastefulShape:
    """A product whose shape the card cannot use well.

    ``dimension``: ``m``, ``n`` or ``k`` of [m, k] x [k, n], with what it is (``size``); ``multiple``: what it should
    be a multiple of; ``padded``: the next size that is.  For ``tiles`` and ``waves``: ``size`` is how many tiles the
    result has, ``padded`` how many the card would do in the same time, ``used`` the share of its work that counts.
    ``gain_seconds``: what the predicted time of the step loses if it is padded (``None``: not asked).
    """

    kind: str
    operation: str
    module: str
    phase: str
    calls: int
    shape: tuple[int, int, int, int]
    dimension: str
    size: int
    multiple: int
    padded: int
    used: float
    flop_share: float
    gain_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Padding:
    """One size that would be better if it were padded, with all products that it is a dimension of.

    ``size`` becomes ``padded``, a multiple of ``multiple``, where ``setting`` of the description is changed from
    ``value`` to ``padded_value`` (``""``: none of it decides the size); ``how``: what that means in a training script.
    ``gain_seconds``: what the step's products lose in predicted time, ``None`` without a clock.
    """

    size: int
    padded: int
    multiple: int
    products: int
    modules: tuple[str, ...]
    setting: str
    value: int
    padded_value: int
    how: str
    gain_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class PublishedShares:
    """What others measured of the same operations, percent by group: ``source``, where."""

    source: str
    flop_percent: dict[str, float]
    time_percent: dict[str, float]


@dataclass(frozen=True, slots=True)
class Joined:
    """How a profile was joined with the prediction: operations and GPU seconds that found each other, of how many, and
    the names of the rest on both sides with their number."""

    operations: int
    of: int
    seconds: float
    of_seconds: float
    only_predicted: dict[str, int]
    only_measured: dict[str, int]


@dataclass(frozen=True, slots=True)
class OperationBreakdown:
    """One training step by its operations.

    ``operations``: kernels on the GPU; ``aside``: what runs no kernel of a group, by kind (views, host, reads by the
    host, transfers).  ``by_rule``: operators that no table names, which were assigned by their form.
    """

    name: str
    workload: dict[str, object]
    card: str
    operations: int
    flop: int
    bytes: int
    groups: tuple[GroupShare, ...]
    heaviest: tuple[HeavyOperation, ...]
    unformulated: tuple[Unformulated, ...]
    by_rule: tuple[str, ...]
    aside: dict[str, int]
    claims: tuple[Claim, ...]
    shapes: tuple[WastefulShape, ...]
    paddings: tuple[Padding, ...] = ()
    modules: tuple[ModuleShare, ...] = ()
    seconds: float | None = None
    measured_seconds: float | None = None
    joined: Joined | None = None
    published: PublishedShares | None = None
    notes: tuple[str, ...] = ()

    @property
    def gpu(self) -> str:
        """The GPU; the field keeps the name that version 1 of the JSON gives it."""
        return self.card
