"""Puts epochs together from steps that were executed once.

What a step allocates depends on the shapes of its batches and on nothing that the steps before it did (``pieces.py``
checks that), so its pieces can follow each other in any order: what a step releases of the one before it is found by
its place there.  The piece in which a step with several micro-batches fetches them belongs to all of them; each of its
allocations is taken from the step that was executed with the shape of its micro-batch.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from trainatomy.errors import SimulationError
from trainatomy.results.trace import AllocationTrace, Event, Mark, Origin
from trainatomy.simulator.pieces import CutTrace, Piece
from trainatomy.training.lengths import BatchShape

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
        begun = AllocationTrace(
            events=events,
            origins=trace.origins[:count],
            labels={number: label for number, label in trace.labels.items() if number < count},
            marks=[mark for mark in trace.marks if mark.step <= last],
            choices={number: choice for number, choice in trace.choices.items() if number < count},
            trials={number: tried for number, tried in trace.trials.items() if number < count},
            rank=trace.rank,
        )
        return cls(begun, pieces.ends, pieces.kept, tuple(piece.signature for piece in pieces.steps[last]))


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
        if first.signatures != self.signature:
            raise _unlike("the first step keeps other things than later ones")
        begun = first.trace
        trace = AllocationTrace(
            list(begun.events),
            list(begun.origins),
            dict(begun.labels),
            list(begun.marks),
            dict(begun.choices),
            dict(begun.trials),
        )
        trace.rank = begun.rank
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


def _unlike(reason: str) -> SimulationError:
    return SimulationError(
        f"data.lengths: the steps of this training cannot be put together from single ones: {reason}.\n"
        "Predict it with data.sequence_length, the length of the longest batch"
    )
