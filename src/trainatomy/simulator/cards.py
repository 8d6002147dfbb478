"""One execution for several GPUs: which of them it serves, and the sizes that differ.

The properties of a GPU (compute capability, multiprocessors, cache, memory, name) decide a few things in a training:
the kernel of attention, and the sizes of some buffers that kernels and libraries take for themselves.  So an execution
on one GPU serves others.  What decides by a property is asked for each of them: GPUs with another answer are no longer
served, but if only sizes differ, the trace keeps every size.  Where anything else reads a property, the GPUs that
differ in it are no longer served.  Those have to be executed themselves, and may serve others then.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from trainatomy.catalog.gpus import GPU, level_factors
from trainatomy.errors import TrainatomyError
from trainatomy.operators.allocation.plan import Free, KernelCall, Out, Plan, Processor, Rule, Scratch, Trial
from trainatomy.results.trace import AllocationTrace

if TYPE_CHECKING:
    from trainatomy.operators.allocation.cudnn.heuristics import Heuristics

Answer = TypeVar("Answer")

EVERYTHING = "everything"
"""What is asked where the answer follows from all that the process did so far, such as the memory that it holds."""
_SAME = frozenset({"torch_version"})
"""Properties of a processor in which the GPUs of an execution do not differ."""
_DIFFERING = frozenset(each.name for each in fields(Processor)) - _SAME


class Card(NamedTuple):
    """Properties of a GPU that decide what a process on it is told."""

    name: str
    memory_bytes: int
    capability: tuple[int, int]
    multiprocessors: int
    l2_bytes: int | None


def card_of(gpu: GPU) -> Card:
    """Return the properties of a GPU."""
    return Card(gpu.device_name, gpu.memory_bytes, gpu.capability, gpu.multiprocessors, gpu.l2_bytes)


def processor_of(gpu: GPU, torch_version: tuple[int, int], cudnn: Heuristics | None) -> Processor:
    """Return the properties of a GPU that a kernel's choices depend on."""
    return Processor(
        gpu.capability,
        gpu.multiprocessors,
        torch_version,
        cudnn,
        gpu.l2_bytes,
        level_factors(gpu),
        gpu.architecture,
    )


def others_like(gpu: GPU, processor: Processor, others: Collection[GPU]) -> dict[Card, Processor]:
    """Return those of several GPUs that an execution on ``gpu`` may serve, as ``SimulatedProcess`` takes them.

    AMD GPUs share one with those of their architecture alone.
    """
    alike = (each for each in others if each != gpu and each.architecture == gpu.architecture)
    return {card_of(each): processor_of(each, processor.torch_version, None) for each in alike}


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
    _kinds: dict[frozenset[str], tuple[tuple[Processor, set[Card]], ...]] = field(default_factory=dict)

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
            self.are_counters_read = True
            self.keep(())
        elif self._read is not None:
            self._read.add(name)
        elif self.others:
            own = self._answer(self.own, self._plain, name)
            same = [card for card, processor in self.others.items() if self._answer(card, processor, name) == own]
            self.keep(same)

    def keep(self, served: Collection[Card]) -> None:
        """Serve only those others that an earlier execution, of which this one copies a part, served too."""
        if not self.others.keys() <= set(served):
            self.others = {card: processor for card, processor in self.others.items() if card in served}
            self._kinds.clear()

    def decide(self, question: Callable[[Processor], Answer]) -> Answer:
        """Return the answer of the GPU to a question; those with another one are no longer served."""
        return self._ask(question, operator.eq)[0]

    def size(self, question: Callable[[Processor], int]) -> int:
        """Return a size that depends on the GPU, with that on all GPUs that the execution serves."""
        own, elsewhere = self._ask(question, lambda one, other: bool(one) == bool(other))
        return CardBytes.of(own, elsewhere) if elsewhere else own

    def plan(self, rule: Rule, call: KernelCall) -> Plan:
        """Return what a rule plans for a call, with the sizes on all GPUs that the execution serves."""
        if not self.others:
            return rule(call)

        def planned(processor: Processor) -> Plan:
            return rule(call if processor is self.processor else replace(call, processor=processor))

        plan, elsewhere = self._ask(planned, _differ_in_sizes_only)
        return _with_sizes(plan, elsewhere) if elsewhere else plan

    def _ask(
        self, question: Callable[[Processor], Answer], are_alike: Callable[[Answer, Answer], bool]
    ) -> tuple[Answer, dict[Card, Answer]]:
        """Return the answer of the GPU to a question, and others' answers that differ.

        Those whose answer is not like that of the GPU, or who have none, are no longer served.
        """
        if not self.others or self._read is not None:  # or in a question, which is asked for each of them anyway
            return question(self.processor), {}
        self._read = set()
        try:
            own = question(self.processor)
            read = frozenset(self._read)
        finally:
            self._read = None
        if not read:
            return own, {}
        if self._plain.cudnn is not None and "cudnn" in read:
            self.keep(())
        elsewhere: dict[Card, Answer] = {}
        for processor, cards in tuple(self._differing(read)):
            try:
                other = question(processor)
            except TrainatomyError:
                self.keep(self.others.keys() - cards)
                continue
            if not are_alike(own, other):
                self.keep(self.others.keys() - cards)
            elif other != own:
                elsewhere.update(dict.fromkeys(cards, other))
        return own, elsewhere

    def _differing(self, names: frozenset[str]) -> Collection[tuple[Processor, set[Card]]]:
        """Return those of the others that differ from the GPU in these properties, by their values."""
        if names not in self._kinds:
            own = _values(self._plain, names)
            kinds: dict[Any, tuple[Processor, set[Card]]] = {}
            for card, processor in self.others.items():
                if (key := _values(processor, names)) != own:
                    kinds.setdefault(key, (processor, set()))[1].add(card)
            self._kinds[names] = tuple(kinds.values())
        return self._kinds[names]

    @staticmethod
    def _answer(card: Card, processor: Processor, name: str) -> Any:
        return _value(processor, name) if name in _DIFFERING else getattr(card, name)


def _values(processor: Processor, names: Collection[str]) -> Any:
    """Return several properties as a key."""
    return tuple(_value(processor, name) for name in sorted(names))


def _value(processor: Processor, name: str) -> Any:
    """Return a property as a part of a key."""
    value = getattr(processor, name)
    return tuple(sorted(value.items())) if isinstance(value, Mapping) else value


def _differ_in_sizes_only(plan: Plan, other: Plan) -> bool:
    """Return whether two plans differ in sizes at most."""
    return list(map(_but_for_size, plan)) == list(map(_but_for_size, other))


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
