"""Cuts the allocation trace of a run into the pieces of its steps, in which allocations have relative names.

A step has a piece in which batches are fetched, one for each micro-batch and one for the optimizer.  What a piece
releases is its own, or was kept by an earlier piece of this step or of the step before; anything else would make a step
depend on more than the shapes of its batches, and is refused.

Puts epochs together from steps that were executed once.

What a step allocates depends on the shapes of its batches and on nothing that the steps before it did (``pieces.py``
checks that), so its pieces can follow each other in any order: what a step releases of the one before it is found by
its place there.  The piece in which a step with several micro-batches fetches them belongs to all of them; each of its
allocations is taken from the step that was executed with the shape of its micro-batch.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

from trainatomy.errors import SimulationError
from trainatomy.results.trace import Action, AllocationTrace, Event, Mark, Origin
from trainatomy.training.lengths import BatchShape

Owner = Literal["own", "this step", "step before", "none"]


class NamedEvent(NamedTuple):
    """An event with a relative name in place of an allocation's number.

    Attributes:
        action: See ``Event``.
        owner: Where the allocation was made: in this piece, or kept by another one.
        piece: That other piece, by its place in the step.
        place: Number among the piece's own allocations, or among those that the other piece kept.
        bytes: See ``Event``.
        stream: See ``Event``.
    """

    action: Action
    owner: Owner
    piece: int
    place: int
    bytes: int
    stream: int


@dataclass(slots=True)
class Piece:
    """Part of a step.

    Attributes:
        events: Its events.
        origins: Origins of its own allocations; steps count from this one, and batches are fetched in the one before.
        labels: Labels of its own allocations, by their places.
        choices: Decisions that they belong to (see ``AllocationTrace.choices``).
        marks: Names of moments, each with the number of events of the piece before it.
        kept: Places of its own allocations that a later piece releases.
    """

    events: list[NamedEvent] = field(default_factory=list)
    origins: list[Origin] = field(default_factory=list)
    labels: dict[int, str] = field(default_factory=dict)
    choices: dict[int, int] = field(default_factory=dict)
    marks: list[tuple[int, str]] = field(default_factory=list)
    kept: tuple[int, ...] = ()

    @property
    def signature(self) -> tuple[str | None, ...]:
        """Return the labels of what the piece keeps: equal for pieces that can take each other's place."""
        return tuple(self.labels.get(place) for place in self.kept)


class _Part(NamedTuple):
    """Place of a piece in the trace: its step, its place in the step, its events, its marks."""

    step: int
    piece: int
    events: range
    marks: range


@dataclass(frozen=True, slots=True)
class CutTrace:
    """The steps of a trace as pieces.

    Attributes:
        steps: The pieces of each step; those of the beginning say only what they keep.
        kept: Numbers of the allocations that each piece of the last step of the beginning keeps.
        ends: Number of events up to the end of each step of the beginning.
        kept_last: Numbers of what each piece of the last step keeps.
    """

    steps: tuple[tuple[Piece, ...], ...]
    kept: tuple[tuple[int, ...], ...]
    ends: tuple[int, ...]
    kept_last: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class Cuts:
    """Where a trace is cut, and what each part keeps for later ones.

    Attributes:
        parts: The parts in order.
        made: In which part each allocation was made.
        kept: Numbers of the allocations that each part keeps.
    """

    parts: Sequence[_Part]
    made: Mapping[int, int]
    kept: Sequence[Sequence[int]]

    def kept_in(self, step: int) -> tuple[tuple[int, ...], ...]:
        """Return the numbers of what each part of a step keeps."""
        return tuple(tuple(kept) for part, kept in zip(self.parts, self.kept, strict=True) if part.step == step)

    def end_of(self, step: int) -> int:
        """Return the number of events up to the end of a step."""
        return max(part.events.stop for part in self.parts if part.step == step)


def cuts_of(trace: AllocationTrace, begun: int = 1, *, is_kept: bool = False) -> Cuts:
    """Return where to cut a trace; the arguments and errors are those of ``cut``."""
    if trace.stream_uses:
        raise _unlike("it uses memory on several streams")
    parts = list(_parts(trace))
    made, freed = _owners(trace, parts)
    kept: list[list[int]] = [[] for _ in parts]
    last = parts[-1].step
    for number, owner in made.items():
        until = freed.get(number)
        if until == owner:
            continue
        if until is None:
            if begun <= parts[owner].step < last:
                raise _unlike(f"{trace.origins[number].operation} keeps memory that no step before did")
            if is_kept and parts[owner].step == last:
                kept[owner].append(number)
        elif parts[until].step <= parts[owner].step + 1:
            kept[owner].append(number)
        elif parts[until].step >= begun:
            raise _unlike(f"{trace.origins[number].operation} keeps memory for more than one step")
    return Cuts(parts, made, kept)


def cut(trace: AllocationTrace, begun: int = 1, *, is_kept: bool = False) -> CutTrace:
    """Cut a trace of more steps than are its beginning; the pieces of the last one say nothing about what they keep.

    Tensors of collectives are taken as released when they die, as everywhere but at the high end of a range.

    Args:
        trace: The allocations.
        begun: Steps at the beginning, which are never repeated: the first, and with DDP the second, whose buckets are
            made anew.
        is_kept: Whether what the last step does not release is what it keeps for the next.

    Raises:
        SimulationError: A step depends on more than the step before it.
    """
    cuts = cuts_of(trace, begun, is_kept=is_kept)
    parts, last = cuts.parts, cuts.parts[-1].step
    places = {number: place for numbers in cuts.kept for place, number in enumerate(numbers)}
    pieces = [
        _begun(trace, cuts.kept[index]) if part.step < begun else _piece(trace, index, cuts, places)
        for index, part in enumerate(parts)
    ]
    by_step = [
        [piece for part, piece in zip(parts, pieces, strict=True) if part.step == step] for step in range(last + 1)
    ]
    return CutTrace(
        tuple(map(tuple, by_step)),
        cuts.kept_in(begun - 1),
        tuple(cuts.end_of(step) for step in range(begun)),
        cuts.kept_in(last),
    )


def _parts(trace: AllocationTrace) -> Iterator[_Part]:
    """Yield the parts of a trace in order: each ends with the mark that its place in the step demands."""
    step = piece = first_event = first_mark = 0
    for index, mark in enumerate(trace.marks):
        if mark.name not in ("step", "backward end", "step end"):
            continue
        yield _Part(step, piece, range(first_event, mark.event), range(first_mark, index + 1))
        first_event, first_mark = mark.event, index + 1
        step, piece = (step + 1, 0) if mark.name == "step end" else (step, piece + 1)


def _owners(trace: AllocationTrace, parts: Sequence[_Part]) -> tuple[dict[int, int], dict[int, int]]:
    """Return in which part each allocation was made, and in which it was released."""
    made: dict[int, int] = {}
    freed: dict[int, int] = {}
    for index, part in enumerate(parts):
        events = trace.events[part.events.start : part.events.stop]
        made.update(dict.fromkeys([event[1] for event in events if event[0] == "alloc"], index))
        freed.update(dict.fromkeys([event[1] for event in events if event[0] == "free"], index))
    return made, freed


def _begun(trace: AllocationTrace, kept: Sequence[int]) -> Piece:
    """Return what a part of the beginning keeps; its events are never repeated."""
    labels = {place: trace.labels[number] for place, number in enumerate(kept) if number in trace.labels}
    return Piece(labels=labels, kept=tuple(range(len(kept))))


def _piece(trace: AllocationTrace, index: int, cuts: Cuts, places: Mapping[int, int]) -> Piece:
    """Return a part with relative names; ``places``: of what each part keeps."""
    part, piece = cuts.parts[index], Piece()
    own: dict[int, int] = {}
    for event in trace.events[part.events.start : part.events.stop]:
        number = event.allocation
        if event.action == "alloc":
            own[number] = place = len(own)
            origin = trace.origins[number]
            piece.origins.append(Origin(*origin[:3], origin.step - part.step))
            if number in trace.labels:
                piece.labels[place] = trace.labels[number]
            if number in trace.choices:
                piece.choices[place] = trace.choices[number]
        if number in own:
            piece.events.append(NamedEvent(event.action, "own", 0, own[number], event.bytes, event.stream))
        elif number < 0:
            piece.events.append(NamedEvent(event.action, "none", 0, -1, event.bytes, event.stream))
        else:
            maker = cuts.parts[cuts.made[number]]
            owner: Owner = "this step" if maker.step == part.step else "step before"
            piece.events.append(NamedEvent(event.action, owner, maker.piece, places[number], 0, 0))
    piece.marks = [(trace.marks[i].event - part.events.start, trace.marks[i].name) for i in part.marks]
    piece.kept = tuple(own[number] for number in cuts.kept[index])
    return piece


def _unlike(reason: str) -> SimulationError:
    return SimulationError(
        f"data.lengths: the steps of this training cannot be put together from single ones: {reason}.\n"
        "Predict it with data.sequence_length, the length of the longest batch"
    )


StepShapes = tuple[BatchShape, ...]
"""Shapes of the batches of a step."""
_APART = 1_000_000
"""Added to the decisions about workspaces in repeated steps, which are numbered apart from those of the first step."""


@dataclass(frozen=True, slots=True)
class Beginning:
    """The first steps of a training, which are not repeated.

    Attributes:
        trace: Its trace up to the end of them.
        ends: Number of events up to the end of each.
        kept: Numbers of what each piece of the last of them keeps.
        signatures: Labels of what these keep.
    """

    trace: AllocationTrace
    ends: tuple[int, ...]
    kept: tuple[tuple[int, ...], ...]
    signatures: tuple[tuple[str | None, ...], ...]

    @classmethod
    def of(cls, trace: AllocationTrace, pieces: CutTrace) -> Beginning:
        """Return the beginning of a trace that was cut."""
        last = len(pieces.ends) - 1
        events = trace.events[: pieces.ends[last]]
        count = 1 + max((event.allocation for event in events), default=-1)
        begun = replace(
            trace.blank(),
            events=events,
            origins=trace.origins[:count],
            labels={number: label for number, label in trace.labels.items() if number < count},
            marks=[mark for mark in trace.marks if mark.step <= last],
            choices={number: choice for number, choice in trace.choices.items() if number < count},
            trials={number: tried for number, tried in trace.trials.items() if number < count},
        )
        return cls(begun, pieces.ends, pieces.kept, tuple(piece.signature for piece in pieces.steps[last]))

    def check(self, library: StepLibrary) -> None:
        """Raise ``SimulationError`` if the steps of a library cannot follow."""
        if self.signatures != library.signature:
            raise _unlike("the first step keeps other things than later ones")


@dataclass(frozen=True, slots=True)
class Stitched:
    """An epoch: its trace, the number of events at the end of each step, what each piece of the last one keeps."""

    trace: AllocationTrace
    step_ends: tuple[int, ...]
    kept: tuple[tuple[int, ...], ...] = ()


class StepLibrary:
    """Steps that were executed, by the shape of all their batches.

    Args:
        steps: The pieces of each.

    Raises:
        SimulationError: They keep different things for the next step.
    """

    def __init__(self, steps: Mapping[BatchShape, Sequence[Piece]]) -> None:
        self._steps = steps
        self._fetched: dict[StepShapes, Piece] = {}
        signatures = Counter(tuple(piece.signature for piece in pieces) for pieces in steps.values())
        if len(signatures) != 1:
            raise _unlike("what a step keeps depends on the length of its batches")
        self.signature = next(iter(signatures))
        self._owners = self._owners_of_fetched()

    def pieces(self, shapes: StepShapes) -> list[Piece]:
        """Return the pieces of a step with batches of these shapes."""
        if len(set(shapes)) == 1:
            return list(self._steps[shapes[0]])
        micro = [self._steps[shape][1 + place] for place, shape in enumerate(shapes)]
        return [self._fetch(shapes), *micro, self._steps[shapes[-1]][-1]]

    def _owners_of_fetched(self) -> list[int | None]:
        """Return which micro-batch decides the size of each event of the fetching piece; None: it is constant.

        The allocations of one operator whose sizes differ between shapes belong to the micro-batches in order.
        """
        fetched = [pieces[0] for pieces in self._steps.values()]
        accumulation = len(next(iter(self._steps.values()))) - 2
        if accumulation == 1 or len(fetched) == 1:
            return [None] * len(fetched[0].events)
        if len({tuple(event[:4] for event in piece.events) for piece in fetched}) != 1:
            raise _unlike("batches are fetched differently, depending on their length")
        varying = [
            index
            for index, events in enumerate(zip(*(piece.events for piece in fetched), strict=True))
            if len({event.bytes for event in events}) > 1
        ]
        by_operator: dict[str, list[int]] = defaultdict(list)
        for index in varying:
            by_operator[fetched[0].origins[fetched[0].events[index].place].operation].append(index)
        owners: list[int | None] = [None] * len(fetched[0].events)
        for operator, indices in by_operator.items():
            if len(indices) % accumulation:
                raise _unlike(f"{operator} does not treat the batches of a step alike")
            for place, index in enumerate(indices):
                owners[index] = place * accumulation // len(indices)
        return owners

    def _fetch(self, shapes: StepShapes) -> Piece:
        known = self._fetched.get(shapes)
        if known is None:
            first = self._steps[shapes[0]][0]
            events = [
                event if owner is None else self._steps[shapes[owner]][0].events[index]
                for index, (event, owner) in enumerate(zip(first.events, self._owners, strict=True))
            ]
            known = self._fetched[shapes] = replace(first, events=events)
        return known

    def stitch(self, first: Beginning, steps: Sequence[StepShapes], *, detailed: bool = False) -> Stitched:
        """Return the trace of the first steps and the ``steps`` after them.

        Args:
            first: The first steps.
            steps: Shapes of the batches of each further step.
            detailed: Whether origins need the number of their step, which takes time.
        """
        *_, last = self.stitched(first, steps, detailed=detailed)
        return last

    def stitched(self, first: Beginning, steps: Iterable[StepShapes], *, detailed: bool = False) -> Iterator[Stitched]:
        """Yield the trace of the first steps, and after each further one; it is the same trace, which grows."""
        first.check(self)
        begun = first.trace
        trace = replace(
            begun,
            events=list(begun.events),
            origins=list(begun.origins),
            labels=dict(begun.labels),
            marks=list(begun.marks),
            choices=dict(begun.choices),
            trials=dict(begun.trials),
        )
        kept, ends = list(first.kept), list(first.ends)
        yield Stitched(trace, tuple(ends), tuple(kept))
        for number, shapes in enumerate(steps, start=len(ends)):
            before, kept = kept, []
            for piece in self.pieces(shapes):
                kept.append(_append(trace, piece, number, kept, before, detailed=detailed))
            ends.append(len(trace.events))
            yield Stitched(trace, tuple(ends), tuple(kept))


def _append(
    trace: AllocationTrace,
    piece: Piece,
    step: int,
    kept: Sequence[tuple[int, ...]],
    before: Sequence[tuple[int, ...]],
    *,
    detailed: bool,
) -> tuple[int, ...]:
    """Write a piece at the end of a trace; returns the numbers of what it keeps."""
    events, start, begin = trace.events, len(trace.origins), len(trace.events)
    for action, owner, other, place, size, stream in piece.events:
        if owner == "own":
            events.append(Event(action, start + place, size, stream))
        elif owner == "this step":
            events.append(Event(action, kept[other][place], size, stream))
        elif owner == "step before":
            events.append(Event(action, before[other][place], size, stream))
        else:
            events.append(Event(action, -1, size, stream))
    trace.origins += [Origin(*one[:3], step + one.step) for one in piece.origins] if detailed else piece.origins
    trace.labels.update({start + place: label for place, label in piece.labels.items()})
    trace.choices.update({start + place: choice + _APART for place, choice in piece.choices.items()})
    trace.marks += [Mark(begin + offset, name, step) for offset, name in piece.marks]
    return tuple(start + place for place in piece.kept)


def same_events(one: Sequence[Piece], other: Sequence[Piece]) -> bool:
    """Return whether two steps allocate and release the same."""
    return [piece.events for piece in one] == [piece.events for piece in other]
