"""One execution for several GPUs of a compute capability: which of them it serves, and the sizes that differ.

What a training executes depends on the GPU's compute capability.  Its other properties (multiprocessors, cache, memory,
name) decide the sizes of some buffers that kernels take for themselves, and no more, unless something in the process
asks for them.  So an execution on one GPU serves others: an allocation rule that reads such a property plans for each
of them, and the trace keeps every size.  Where anything else reads a property, or a rule plans other buffers, the GPUs
that differ are no longer served: they have to be executed themselves.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple

from trainatomy.catalog.gpus import GPU, level_factors
from trainatomy.errors import TrainatomyError
from trainatomy.operators.allocation.plan import Free, KernelCall, Out, Plan, Processor, Rule, Scratch, Trial
from trainatomy.results.trace import AllocationTrace

EVERYTHING = "everything"
"""What is asked where the answer follows from all that the process did so far, such as the memory that it holds."""
_SAME = frozenset({"capability", "torch_version"})
"""Properties of a processor in which the GPUs of an execution do not differ."""
_DIFFERING = frozenset(each.name for each in fields(Processor)) - _SAME


class Card(NamedTuple):
    """Properties of a GPU that decide what a process on it is told, besides its compute capability."""

    name: str
    memory_bytes: int
    multiprocessors: int
    l2_bytes: int | None


def card_of(gpu: GPU) -> Card:
    """Return the properties of a GPU."""
    return Card(gpu.device_name, gpu.memory_bytes, gpu.multiprocessors, gpu.l2_bytes)


def others_like(gpu: GPU, processor: Processor, others: Collection[GPU]) -> dict[Card, Processor]:
    """Return those of several GPUs that an execution on ``gpu`` may serve, as ``SimulatedProcess`` takes them."""
    return {
        card_of(each): replace(
            processor,
            multiprocessors=each.multiprocessors,
            cudnn=None,
            l2_bytes=each.l2_bytes,
            level_factors=level_factors(each),
        )
        for each in others
        if each.capability == gpu.capability and each != gpu
    }


class CardBytes(int):
    """Size of a buffer on the GPU that was executed, with its size on others where that differs.

    Attributes:
        elsewhere: Size by the GPU.
    """

    elsewhere: Mapping[Card, int]

    @classmethod
    def of(cls, size: int, elsewhere: Mapping[Card, int]) -> CardBytes:
        """Return a size that is another one on some GPUs."""
        made = cls(size)
        made.elsewhere = elsewhere
        return made


class _WatchedProcessor(Processor):
    """Processor that tells when a property is read in which the GPUs of an execution may differ."""

    __slots__ = ("cards",)
    cards: Cards

    def __getattribute__(self, name: str) -> Any:
        if name in _DIFFERING:
            object.__getattribute__(self, "cards").asked(name)
        return object.__getattribute__(self, name)


@dataclass(slots=True)
class Cards:
    """The GPU that a process runs on, and others that its execution serves so far.

    Attributes:
        own: The GPU that is executed.
        processor: Its properties, for all that runs in the process.
        others: The others, with their properties.
        are_counters_read: Whether the process has asked how much memory it holds.
    """

    own: Card
    processor: Processor
    others: dict[Card, Processor] = field(default_factory=dict)
    are_counters_read: bool = False
    _plain: Processor = field(init=False)
    _read: set[str] | None = None

    def __post_init__(self) -> None:
        self._plain = self.processor
        self.others.pop(self.own, None)
        if self.others:
            plain = self._plain
            self.processor = _WatchedProcessor(**{each.name: getattr(plain, each.name) for each in fields(Processor)})
            object.__setattr__(self.processor, "cards", self)

    def asked(self, name: str) -> None:
        """Note that a property of the GPU was read: of its processor, ``name``, ``memory_bytes`` or ``EVERYTHING``."""
        if name == EVERYTHING:
            self.others, self.are_counters_read = {}, True
        elif self._read is not None:
            self._read.add(name)
        elif self.others:
            own = self._answer(self.own, self._plain, name)
            same = [card for card, processor in self.others.items() if self._answer(card, processor, name) == own]
            self.keep(same)

    def keep(self, served: Collection[Card]) -> None:
        """Serve only those others that an earlier execution, of which this one copies a part, served too."""
        if self.others:
            self.others = {card: processor for card, processor in self.others.items() if card in served}

    def plan(self, rule: Rule, call: KernelCall) -> Plan:
        """Return what a rule plans for a call, with the sizes on all GPUs that the execution serves."""
        if not self.others:
            return rule(call)
        read = self._read = set[str]()
        try:
            plan = rule(call)
        finally:
            self._read = None
        if not read:
            return plan
        if self._plain.cudnn is not None and "cudnn" in read:
            self.others = {}
            return plan
        planned: dict[Any, Plan | None] = {tuple(_value(self._plain, name) for name in sorted(read)): plan}
        elsewhere: dict[Card, Plan] = {}
        for card, processor in tuple(self.others.items()):
            key = tuple(_value(processor, name) for name in sorted(read))
            if key not in planned:
                planned[key] = _planned_alike(plan, rule, replace(call, processor=processor))
            if (found := planned[key]) is None:
                del self.others[card]
            else:
                elsewhere[card] = found
        return _with_sizes(plan, {card: other for card, other in elsewhere.items() if other is not plan})

    @staticmethod
    def _answer(card: Card, processor: Processor, name: str) -> Any:
        return _value(processor, name) if name in _DIFFERING else getattr(card, name)


def _value(processor: Processor, name: str) -> Any:
    """Return a property as a part of a key."""
    value = getattr(processor, name)
    return tuple(sorted(value.items())) if isinstance(value, Mapping) else value


def _planned_alike(plan: Plan, rule: Rule, call: KernelCall) -> Plan | None:
    """Return what a rule plans for a call on another GPU; None if that differs from ``plan`` in more than sizes."""
    try:
        other = rule(call)
    except TrainatomyError:
        return None
    return other if list(map(_but_for_size, other)) == list(map(_but_for_size, plan)) else None


def _but_for_size(item: Out | Scratch | Free | Trial) -> Any:
    """Return what two plans agree in that differ in sizes only: nothing is allocated for a buffer of 0 bytes."""
    if isinstance(item, Scratch):
        return type(item), item.name, item.choice, item.bytes > 0
    if isinstance(item, Out):
        return type(item), item.number, item.bytes is None, bool(item.bytes)
    return item


def _with_sizes(plan: Plan, others: Mapping[Card, Plan]) -> Plan:
    """Return a plan whose sizes know those of the plans of other GPUs."""
    found = list(plan)
    for place, item in enumerate(plan):
        if not isinstance(item, Scratch | Out) or item.bytes is None:
            continue
        sizes = {card: _bytes_at(other, place) for card, other in others.items()}
        if any(size != item.bytes for size in sizes.values()):
            found[place] = item._replace(bytes=CardBytes.of(item.bytes, sizes))
    return found


def _bytes_at(plan: Plan, place: int) -> int:
    item = plan[place]
    assert isinstance(item, Scratch | Out) and item.bytes is not None
    return item.bytes


def sizes_on(trace: AllocationTrace, card: Card) -> tuple[int, ...]:
    """Return the sizes in the trace of an execution that may differ between GPUs, on one that it serves."""
    return tuple(_size_on(event.bytes, card) for event in trace.events if isinstance(event.bytes, CardBytes))


def _size_on(size: CardBytes, card: Card) -> int:
    return size.elsewhere.get(card, int(size))


def trace_on(trace: AllocationTrace, card: Card) -> AllocationTrace:
    """Return the trace of an execution as it is on one of the GPUs that it serves."""
    events = [
        event._replace(bytes=_size_on(event.bytes, card)) if isinstance(event.bytes, CardBytes) else event
        for event in trace.events
    ]
    return replace(trace, events=events)
