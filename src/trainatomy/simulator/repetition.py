"""Copies micro-batches that repeat, instead of executing them.

After the first micro-batch of a step, which makes the gradients, each further one does the same: the same operations,
allocations and releases, with other tensors.  This is checked, not assumed.  A further micro-batch becomes a template
if it did what the further one before it did (in a step with two micro-batches: that of the step before) and left only
its loss behind.  The micro-batches after it are then written to the trace and to the operations as copies of the
template, as long as their batches have the same shapes; in a later step also only if the first micro-batch of that step
did what that of the template's step did, so that nothing depends on the step.  A micro-batch that changes a number in
the host's memory (random numbers, a module that counts its calls) is never a template.  Whatever fails a check is
executed.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten

from trainatomy.results.trace import Event, Mark, Origin
from trainatomy.simulator.operations import Recording
from trainatomy.simulator.recorder import Recorder

_OWN, _BATCH, _LOSS, _FIRST, _OLDER = "own", "batch", "loss", "first", "older"
_PLAIN = (bool, int, float, str)
Name = tuple[str, int]
"""Allocation as a micro-batch refers to it: its own, by number; of its batch, by place; the loss that the loop kept of
the one before; of the first micro-batch of the step, by number; an older one, by its number in the trace."""


@dataclass(slots=True)
class _Window:
    """What the trace and the loop say about one executed micro-batch."""

    step: int
    micro_step: int
    shapes: Any
    batch: dict[int, int]
    kept_before: int
    events: range
    numbers: range
    marks: range
    functions: list[Any]
    is_stateful: bool
    of_first: range
    origins_before_step: int
    loss: tuple[torch.Size, tuple[int, ...], torch.dtype] | None = None
    kept: int = -1
    recording: Recording | None = None

    def name(self, number: int) -> Name:
        """Return how this micro-batch refers to an allocation; -1 stands for none."""
        if number < 0:
            return _OLDER, number
        if number in self.numbers:
            return _OWN, number - self.numbers.start
        if number in self.batch:
            return _BATCH, self.batch[number]
        if number == self.kept_before:
            return _LOSS, 0
        if number in self.of_first:
            return _FIRST, number - self.of_first.start
        return _OLDER, number


@dataclass(slots=True)
class _Template:
    """A micro-batch that can be copied, with its entries in the trace."""

    window: _Window
    entries: list[tuple[Any, ...]]
    outputs: list[tuple[Name, ...]] = field(default_factory=list)


class Repetition:
    """Follows the micro-batches of a run and copies those that repeat.

    Args:
        recorder: Recorder of the run.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._operations = recorder.operations
        self._firsts: dict[int, _Window] = {}
        self._further: tuple[_Window, list[tuple[Any, ...]]] | None = None
        self._template: _Template | None = None
        self._open: tuple[_Window, Any] | None = None
        self._modules: list[nn.Module] = []
        self._batch: tuple[Any, dict[int, int]] | None = None
        self._kept = -1
        self._loss: tuple[torch.Size, tuple[int, ...], torch.dtype] | None = None
        self._origins_before_step = 0
        self._renamed: dict[int, int] = {}
        self._aligned: tuple[int, int] | None = None

    # -- events of the loop --------------------------------------------------------------------------------------------

    def loaded(self, model: nn.Module) -> None:
        """Note the model that is trained."""
        self._modules = list(model.modules())

    def between_steps(self) -> None:
        """Note that a step is over, or that the first one is about to be prepared."""
        self._origins_before_step = len(self._recorder.trace.origins)

    def kept(self, loss: torch.Tensor) -> None:
        """Note the loss that the loop keeps of the running micro-batch."""
        with torch._C.DisableTorchFunction():
            self._loss = (loss.shape, loss.stride(), loss.dtype)
        self._kept = _number(self._recorder, loss)

    def repeat(self, micro_step: int, batch: Any) -> torch.Tensor | None:
        """Write a copy of the template as this micro-batch and return its loss; None if it has to be executed."""
        self._batch = self._described(batch)
        template = self._template
        if template is None or micro_step == 0 or self._batch is None or template.window.shapes != self._batch[0]:
            return None
        if template.window.step != self._recorder.step and not self._is_aligned(template):
            self._template = None
            return None
        return self._copy(template, self._batch[1])

    def begin(self, micro_step: int) -> None:
        """Begin to follow a micro-batch that is executed."""
        recorder, trace = self._recorder, self._recorder.trace
        if self._batch is None:
            return
        functions: list[Any] = []
        start, number, mark = len(trace.events), len(trace.origins), len(trace.marks)
        window = _Window(
            recorder.step,
            micro_step,
            *self._batch,
            self._kept,
            range(start, start),
            range(number, number),
            range(mark, mark),
            functions,
            False,
            range(0) if recorder.step not in self._firsts else self._firsts[recorder.step].numbers,
            self._origins_before_step,
        )
        self._batch, self._loss = None, None
        recorder.functions = functions
        if micro_step > 0 and self._further is not None:
            self._operations.begin_recording(recorder.step)
        self._open = window, self._host_state()

    def end(self) -> None:
        """End of a micro-batch that was executed: compare it with the one before."""
        if self._open is None:
            return
        (window, state), self._open = self._open, None
        recorder, trace = self._recorder, self._recorder.trace
        recorder.functions = None
        window.events = range(window.events.start, len(trace.events))
        window.numbers = range(window.numbers.start, len(trace.origins))
        window.marks = range(window.marks.start, len(trace.marks))
        window.is_stateful = self._host_state() != state
        window.loss, window.kept = self._loss, self._kept
        if window.micro_step == 0:
            self._firsts[window.step] = window
            return
        window.recording = self._operations.end_recording()
        entries = list(self._entries(window))
        before, self._further, self._template = self._further, (window, entries), None
        if before is not None and window.recording is not None and self._is_repeated(before, window, entries):
            outputs = [tuple([window.name(number) for number in one.outputs]) for one in window.recording.operations]
            self._template = _Template(window, entries, outputs)

    # -- comparison ----------------------------------------------------------------------------------------------------

    def _described(self, batch: Any) -> tuple[Any, dict[int, int]] | None:
        """Return the shapes of a batch and the places of its tensors by their allocations; None if it has others."""
        leaves, structure = tree_flatten(batch)
        shapes: list[Any] = []
        numbers: dict[int, int] = {}
        with torch._C.DisableTorchFunction():
            for leaf in leaves:
                if isinstance(leaf, torch.Tensor) and leaf.layout == torch.strided:
                    shapes.append((leaf.shape, leaf.stride(), leaf.dtype, leaf.is_meta))
                elif leaf is None or isinstance(leaf, _PLAIN):
                    shapes.append((type(leaf), leaf))
                else:
                    return None
        for place, leaf in enumerate(leaves):
            number = _number(self._recorder, leaf) if isinstance(leaf, torch.Tensor) else -1
            if number >= 0:
                numbers.setdefault(number, place)
        return (structure, tuple(shapes)), numbers

    def _is_repeated(
        self, before: tuple[_Window, list[tuple[Any, ...]]], window: _Window, entries: list[tuple[Any, ...]]
    ) -> bool:
        """Return whether a micro-batch did what the one before did, and whether a copy can take its place."""
        earlier, earlier_entries = before
        freed = {entry[1] for entry in entries if entry[0] == "free"}
        survivors = [i for i in range(len(window.numbers)) if (_OWN, i) not in freed]
        return (
            (earlier.step == window.step or earlier.micro_step == window.micro_step)
            and not (
                earlier.is_stateful
                or window.is_stateful
                or self._recorder.streams.in_use
                or self._recorder.trace.stream_uses
            )
            and earlier.shapes == window.shapes
            and window.loss is not None
            and earlier.loss == window.loss
            and survivors == [window.kept - window.numbers.start]
            and all(name[0] in (_OWN, _LOSS) for name in freed)
            and earlier.functions == window.functions
            and earlier_entries == entries
        )

    def _is_aligned(self, template: _Template) -> bool:
        """Return whether the first micro-batch of this step did what that of the template's step did.

        What the earlier one made and what still lives now was made for the whole run: workspaces, the scaler's state.
        """
        steps = template.window.step, self._recorder.step
        if self._aligned == steps:
            return True
        then, now = (self._firsts.get(step) for step in steps)
        if then is None or now is None or now.shapes != then.shapes or now.loss != then.loss:
            return False
        if now.is_stateful or then.is_stateful:
            return False
        passed = self._recorder.trace.events[then.events.start : now.events.stop]
        freed = {event.allocation for event in passed if event.action == "free"}
        counted = [number for number in then.numbers if number in freed]
        released = "free", (_LOSS, 0), 0, 0  # the first micro-batch of the run finds no loss of one before
        did_then, did_now = (
            [entry for entry in entries if entry != released]
            for entries in (self._entries(then, counted), self._entries(now))
        )
        if did_then != did_now:
            return False
        self._renamed, self._aligned = dict(zip(counted, now.numbers, strict=True)), steps
        return True

    def _entries(self, window: _Window, own: list[int] | None = None) -> Iterator[tuple[Any, ...]]:
        """Yield what a micro-batch wrote to the trace, with allocations by their names.

        Args:
            window: The micro-batch.
            own: Its allocations that count, by default all.
        """
        trace = self._recorder.trace
        places = None if own is None else {number: place for place, number in enumerate(own)}
        marks = iter(trace.marks[window.marks.start : window.marks.stop])
        mark = next(marks, None)
        for index in window.events:
            while mark is not None and mark.event <= index:
                yield "mark", mark.name
                mark = next(marks, None)
            action, number, size, stream = trace.events[index]
            is_own = number in window.numbers
            if is_own and places is not None and number not in places:
                continue
            name = (_OWN, places[number]) if is_own and places is not None else window.name(number)
            if action != "alloc":
                yield action, name, size, stream
                continue
            origin = trace.origins[number]
            label, choice = trace.labels.get(number), trace.choices.get(number)
            yield action, name, size, stream, origin.operation, origin.module, origin.phase, label, choice
        while mark is not None:
            yield "mark", mark.name
            mark = next(marks, None)

    def _host_state(self) -> Any:
        """Return the states of the random number generators, hashed, and the plain attributes of all modules."""
        with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
            drawn = torch.default_generator.get_state().numpy().tobytes()
        numpy: Any = sys.modules.get("numpy")
        array = () if numpy is None else numpy.random.get_state()
        random_numbers = drawn, random.getstate(), *(one if isinstance(one, _PLAIN) else one.tobytes() for one in array)
        plain = [value for module in self._modules for value in vars(module).values() if type(value) in _PLAIN]
        return hash(random_numbers), plain

    # -- copies --------------------------------------------------------------------------------------------------------

    def _copy(self, template: _Template, batch: dict[int, int]) -> torch.Tensor | None:
        """Write the template once more and return a tensor that holds the allocation of its loss."""
        window, trace, step = template.window, self._recorder.trace, self._recorder.step
        assert window.recording is not None and window.loss is not None
        places = {place: number for number, place in batch.items()}
        number_of = self._resolver(template, places)
        if number_of is None:
            return None
        outputs = [tuple([number_of(name) for name in names]) for names in template.outputs]
        first_event, first_number, kept = len(trace.events), len(trace.origins), self._kept
        for entry in template.entries:
            action, name = entry[0], entry[1]
            if action == "mark":
                trace.marks.append(Mark(len(trace.events), name, step))
                continue
            number = number_of(name) if name[1] >= 0 else -1
            trace.events.append(Event(action, number, entry[2], entry[3]))
            if action != "alloc":
                continue
            operation, module, phase, label, choice = entry[4:]
            trace.origins.append(Origin(operation, module, phase, step))
            if label is not None:
                trace.labels[number] = label
            if choice is not None:
                trace.choices[number] = choice
        self._operations.write_again(window.recording, first_event - window.events.start, outputs)
        if any(entry[0] == "free" and entry[1][0] == _LOSS for entry in template.entries):
            self._recorder.forget(kept)
        self._kept = first_number + window.kept - window.numbers.start
        return self._recorder.stand_in(*window.loss, self._kept)

    def _resolver(self, template: _Template, places: dict[int, int]) -> Callable[[Name], int] | None:
        """Return the function from names to today's numbers; None if a name has no number in this step."""
        window = template.window
        start, kept = len(self._recorder.trace.origins), self._kept
        same_step = window.step == self._recorder.step
        used = {name for names in template.outputs for name in names}

        def number_of(name: Name) -> int:
            kind, number = name
            if kind == _OWN:
                return start + number
            if kind == _BATCH:
                return places[number]
            if kind == _LOSS:
                return kept
            if kind == _FIRST:
                number += window.of_first.start
                return number if same_step else self._renamed.get(number, number)
            return number

        for kind, number in used:
            if kind == _BATCH and number not in places:
                return None
            if kind == _OLDER and not same_step and number >= window.origins_before_step:
                return None
        return number_of


def _number(recorder: Recorder, tensor: torch.Tensor) -> int:
    """Return the allocation of a tensor, -1 if it has none."""
    found = recorder.number_of(tensor)
    return -1 if found is None else found
