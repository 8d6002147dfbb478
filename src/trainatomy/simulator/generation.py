"""Calls of ``generate()`` in a simulation: what is remembered of one, and how it is written once more.

A further call with the same prompts does what the first did, except that workspaces exist: it is copied.

Calls of ``generate()`` that repeat the one before: a training that generates for each step calls it alike each time.

A call is written again if its inputs, their known values, and the settings of the model are those of the last one that
was executed, and if that one left nothing behind but its result and the workspaces of libraries.  Which words a prompt
has does not matter, unless they are special tokens: these pad prompts, end them, and stand for images.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, count
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from trainatomy.results.operations import Operations
from trainatomy.results.trace import WORKSPACES, AllocationTrace, Mark
from trainatomy.simulator.operations import Recording
from trainatomy.simulator.recorder import Recorder
from trainatomy.simulator.repeated_layers import RepeatedLayers
from trainatomy.simulator.stretches import describe, event_of
from trainatomy.simulator.values import LazyValue
from trainatomy.training.process import host_states
from trainatomy.training.quantization import scales


@dataclass(frozen=True, slots=True)
class ExecutedGeneration:
    """The last call of ``generate()``.

    Attributes:
        sequences: Sequences that were generated at once.
        cache_bytes: Keys and values at the end.
        cache_bytes_per_token: Keys and values of one token of one sequence.
        first_operations: Number of its operations before the second token.
    """

    sequences: int
    cache_bytes: int
    cache_bytes_per_token: int
    first_operations: int

    def prefill(self, operations: Operations) -> Operations:
        """Return those of a call's operations that come before the second token."""
        count = self.first_operations or len(operations.operations)
        whole = sum(one.repeats for one in operations.operations) or 1
        calls = {phase: number * count // whole for phase, number in operations.module_calls.items()}
        return Operations(operations.calls, operations.operations[:count], calls, step=operations.step)


class CallOfGenerate:
    """Follows calls of ``generate()``: the operations of the middle one of further tokens are written for all of them.

    What a token reads grows by the same with each, so that the time of the middle one is the mean.

    Args:
        recorder: Recorder of the run.

    Attributes:
        runs: Whether a call runs.
        cache: Number of sequences in the cache, its bytes, and those of one token of one sequence.
    """

    def __init__(self, recorder: Recorder) -> None:
        self.runs = False
        self.cache = 0, 0, 0
        self._operations = recorder.operations
        self._layers = RepeatedLayers(recorder)
        self._tokens = self._first_operations = 0
        self._writes = False

    def begin(self, model: nn.Module) -> None:
        """Begin a call with the prompts."""
        self.runs, self.cache, self._writes, self._first_operations = True, (0, 0, 0), False, 0
        self._layers.begin(model)

    def token_begin(self, token: int, tokens: int | None) -> None:
        """Begin a further token, from 1; ``tokens``: how many there will be with the first, None: nobody knows."""
        self._layers.token_begin()
        if tokens is None:
            return
        if token == 1:
            self._tokens, self._writes = tokens, self._operations.recording
            self._first_operations = len(self._operations.operations.operations)
        if token == max(1, tokens // 2) and self._writes:
            self._operations.generating, self._operations.repeats = True, tokens - 1
            self._operations.resume()
        else:
            self._operations.pause()

    def end(self) -> ExecutedGeneration:
        """End the call and return what is known of it."""
        self.runs = False
        self._layers.end()
        self._operations.generating, self._operations.repeats = False, 1
        if self._writes:
            self._operations.resume()
        return ExecutedGeneration(*self.cache, self._first_operations)


class StepBegin(NamedTuple):
    """Number of events, allocations and marks of a trace where a step begins."""

    events: int
    origins: int
    marks: int


class Copied(NamedTuple):
    """A stretch of a trace that was written again.

    Attributes:
        moved: Numbers of the allocations of the copy, by those of the stretch.
        places: Places of the events of the copy, by those in the stretch; one more for what comes after them.
    """

    moved: dict[int, int]
    places: Sequence[int]


def left_behind(
    trace: AllocationTrace, begin: StepBegin, end: StepBegin, results: Collection[int] = ()
) -> set[int] | None:
    """Return the workspaces that a stretch of a trace left behind, which a repetition does not allocate again.

    None if it freed an allocation of before it, or left more behind than workspaces and its results.
    """
    freed = {number for action, number, _, _ in trace.events[begin.events : end.events] if action == "free"}
    kept = set(range(begin.origins, end.origins)).difference(freed, results)
    if min(freed, default=begin.origins) < begin.origins or any(
        trace.labels.get(one) not in WORKSPACES for one in kept
    ):
        return None
    return kept


def write_again(
    trace: AllocationTrace,
    begin: StepBegin,
    end: StepBegin,
    left_out: Collection[int],
    step: int,
    phase_of: Callable[[str], str] = str,
) -> Copied:
    """Write a stretch of a trace once more at its end, as a part of ``step``, without the allocations ``left_out``.

    ``phase_of`` returns the phase of the copy of an allocation by that of the original.
    """
    stretch = trace.events[begin.events : end.events]
    places: Sequence[int] = range(len(trace.events), len(trace.events) + len(stretch) + 1)
    own: Sequence[int] = range(begin.origins, end.origins)
    if left_out:
        places = list(accumulate([event[1] not in left_out for event in stretch], initial=len(trace.events)))
        own = [number for number in own if number not in left_out]
    moved = dict(zip(own, count(len(trace.origins))))
    trace.events += map(
        event_of,
        (
            (action, moved.get(number, number), size, stream)
            for action, number, size, stream in stretch
            if number not in left_out
        ),
    )
    made = [trace.origins[number] for number in own]
    again = {one: one._replace(phase=phase_of(one.phase), step=step) for one in set(made)}
    trace.origins += [again[one] for one in made]
    trace.labels |= {moved[number]: trace.labels[number] for number in filter(trace.labels.__contains__, own)}
    trace.choices |= {moved[number]: trace.choices[number] for number in filter(trace.choices.__contains__, own)}
    return Copied(moved, places)


def repeat_step(trace: AllocationTrace, begin: StepBegin, operations: Operations, step: int) -> Operations | None:
    """Write the last step of a trace once more, and return its operations there.

    None, and nothing is written, if the step freed an allocation of before it, or left more behind than workspaces.

    Args:
        trace: The trace.
        begin: Where its last step begins.
        operations: The operations of that step.
        step: Number of the copy.
    """
    end, marks = StepBegin(len(trace.events), len(trace.origins), len(trace.marks)), trace.marks[begin.marks :]
    workspaces = left_behind(trace, begin, end)
    if workspaces is None:
        return None
    moved, places = write_again(trace, begin, end, workspaces, step)
    trace.marks.extend(Mark(places[mark.event - begin.events], mark.name, step) for mark in marks)
    copied = [
        one._replace(
            event=places[max(0, one.event - begin.events)],
            outputs=tuple(moved.get(number, number) for number in one.outputs),
        )
        for one in operations.operations
    ]
    return Operations(operations.calls, copied, operations.module_calls, step=step)


_LOADED = "loaded"
"""Mark that a script's first call of a model sets."""
_OF_TOKENS = ("_token_id", "_token_ids", "_token_index")
"""Ends of the names under which a configuration has special tokens."""
_PLAIN = (bool, int, float, str, type(None))


@dataclass(frozen=True, slots=True)
class _Inputs:
    """What a call depends on.

    Attributes:
        shapes: Shapes and plain values of its arguments.
        places: The place of each allocation among them.
        values: Values of the tensors among them, None for those that are unknown and for words of prompts.
        words: Prompts without special tokens, None if there are none.
        state: Settings of the model, the allocations of its weights, what autocast does.
    """

    shapes: Any
    places: dict[int, int]
    values: list[torch.Tensor | None]
    words: torch.Tensor | None
    state: Any

    def equal(self, other: _Inputs) -> bool:
        """Return whether another call has the same inputs."""
        if self.shapes != other.shapes or self.state != other.state or (self.words is None) != (other.words is None):
            return False
        with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
            return all(
                one is theirs if one is None or theirs is None else torch.equal(one, theirs)
                for one, theirs in zip(self.values, other.values, strict=True)
            )


@dataclass(frozen=True, slots=True)
class _Result:
    """The tokens that a call returned: their allocation and its size, their layout, what is known of their values."""

    number: int
    storage: torch.Size
    dtype: torch.dtype
    layout: tuple[torch.Size, tuple[int, ...], int]
    value: Any


@dataclass(frozen=True, slots=True)
class _Executed:
    """A call that may be written again.

    Attributes:
        model: Its model.
        inputs: What it depends on.
        begin, end: Where its part of the trace begins and ends.
        recording: Its operations.
        result: What it returned.
        workspaces: What it left behind besides.
        phase: The phase that it began in.
    """

    model: weakref.ref[nn.Module]
    inputs: _Inputs
    begin: StepBegin
    end: StepBegin
    recording: Recording
    result: _Result
    workspaces: set[int]
    phase: str


class RepeatedGeneration:
    """Follows calls of ``generate()`` and writes copies of the last one that was executed.

    Args:
        recorder: Recorder of the run.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._executed: _Executed | None = None
        self._open: tuple[nn.Module, _Inputs, StepBegin, str, Any, Any] | None = None

    def repeat(self, model: nn.Module, arguments: Any, keywords: Any) -> torch.Tensor | None:
        """Write the last call again and return its tokens; None if this one is to be executed, until ``end``."""
        self._open = None
        inputs = self._inputs(model, arguments, keywords) if self._recorder.is_alone else None
        if inputs is None:
            return None
        executed = self._executed
        if executed is not None and executed.model() is model and executed.inputs.equal(inputs):
            return self._write_again(executed, inputs)
        self._executed = None
        self._recorder.operations.begin_recording(self._recorder.step)
        self._open = model, inputs, self._now(), self._recorder.phase, host_states(), self._beside()
        return None

    def end(self, tokens: Any) -> None:
        """End a call that was executed; ``tokens`` is what it returned, None if it failed."""
        if self._open is None:
            return
        (model, inputs, begin, phase, states, beside), self._open = self._open, None
        recording, end = self._recorder.operations.end_recording(), self._now()
        result = self._result(tokens, inputs.words)
        if recording is None or result is None or self._state(model) != inputs.state:
            return
        if host_states() != states or self._beside() != beside or not self._recorder.is_alone:
            return
        workspaces = left_behind(self._recorder.trace, begin, end, (result.number,))
        if workspaces is not None and result.number >= begin.origins:
            self._executed = _Executed(weakref.ref(model), inputs, begin, end, recording, result, workspaces, phase)

    def _now(self) -> StepBegin:
        trace = self._recorder.trace
        return StepBegin(len(trace.events), len(trace.origins), len(trace.marks))

    def _beside(self) -> Any:
        """Return what a trace has besides events, origins and marks, which a copy does not write."""
        trace = self._recorder.trace
        return len(trace.trials), len(trace.stream_uses), len(trace.cpu_waits), len(trace.pinned)

    def _inputs(self, model: nn.Module, arguments: Any, keywords: Any) -> _Inputs | None:
        """Return what a call depends on; None if it is not all known."""
        described = [_plain(value) for value in arguments], {name: _plain(value) for name, value in keywords.items()}
        inputs = describe(self._recorder, described)
        if inputs is None:
            return None
        known = self._recorder.values
        prompts = keywords.get("input_ids", arguments[0] if arguments else keywords.get("inputs"))
        values, words = list[torch.Tensor | None](), None
        special = _special_tokens(model, described)
        with (
            torch._C.DisableTorchFunction(),
            torch._C._DisableTorchDispatch(),
        ):  # what is asked here, a training does not run
            for leaf in tree_leaves(described):
                if not isinstance(leaf, torch.Tensor):
                    continue
                if not leaf.is_meta or known.knows(leaf, with_data=True) != known.knows(leaf, with_data=False):
                    return None
                value = known.of(leaf, decides=False)
                if leaf is prompts and value is not None and special.isdisjoint(value.flatten().tolist()):
                    value, words = None, value
                values.append(value)
        return _Inputs(inputs.shapes, inputs.places, values, words, self._state(model))

    def _state(self, model: nn.Module) -> Any:
        held = (*model.parameters(), *model.buffers(), *scales(model))
        configurations = (getattr(model, name, None) for name in ("config", "generation_config"))
        return (
            [(type(module), _settings(module)) for module in model.modules()],
            [(self._recorder.number_of(one), one.dtype, one.requires_grad) for one in held],
            [_plain(one) for one in configurations],
            list(self._recorder.weight_copies),
            (torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")),
            (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
        )

    def _result(self, tokens: Any, words: torch.Tensor | None) -> _Result | None:
        """Return the tokens of a call; None if nobody could make them again."""
        if type(tokens) is not torch.Tensor:
            return None
        with torch._C.DisableTorchFunction():
            number = self._recorder.number_of(tokens)
            if number is None or tokens.requires_grad:
                return None
            value = self._recorder.values.entry(tokens)
            if isinstance(value, LazyValue) and "draw" in value.origins:
                return None
            if words is not None and (tokens.dim() != 2 or tokens.shape[0] != words.shape[0]):
                return None
            elements = tokens.untyped_storage().nbytes() // tokens.itemsize
            layout = tokens.shape, tokens.stride(), int(tokens.storage_offset())
            return _Result(number, torch.Size([elements]), tokens.dtype, layout, value)

    def _write_again(self, executed: _Executed, inputs: _Inputs) -> torch.Tensor:
        recorder, result, begin = self._recorder, executed.result, executed.begin
        trace, step, phase = recorder.trace, recorder.step, recorder.phase
        marks = trace.marks[begin.marks : executed.end.marks]

        def phase_of(before: str) -> str:
            return phase if before == executed.phase else before

        moved, places = write_again(trace, begin, executed.end, executed.workspaces, step, phase_of)
        trace.marks.extend(
            Mark(places[mark.event - begin.events], mark.name, step) for mark in marks if mark.name != _LOADED
        )
        numbers = {place: number for number, place in inputs.places.items()}
        renamed = {number: numbers[place] for number, place in executed.inputs.places.items()} | moved
        operations = [
            one._replace(event=places[max(0, one.event - begin.events)], phase=phase_of(one.phase))
            for one in executed.recording.operations
        ]
        held = [tuple(renamed.get(number, number) for number in one.outputs) for one in operations]
        recorder.operations.write_again(replace(executed.recording, operations=operations), 0, held)
        with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
            storage = recorder.ledger.stand_in(result.storage, (1,), result.dtype, moved[result.number])
            tokens = storage.as_strided(*result.layout)
            if result.value is not None:
                recorder.values.remember(
                    tokens, result.value if inputs.words is None else _after(inputs.words, result.value)
                )
        return tokens


def _special_tokens(model: nn.Module, described: Any) -> set[int]:
    """Return all tokens that the configurations of a call and of its model name."""
    configurations = [_plain(getattr(model, name, None)) for name in ("config", "generation_config")]
    found, waiting = set[int](), [described, *configurations]
    while waiting:
        one = waiting.pop()
        if isinstance(one, dict):
            named = [value for name, value in one.items() if str(name).endswith(_OF_TOKENS)]
            found.update(token for token in tree_leaves(named) if isinstance(token, int))
        waiting += one.values() if isinstance(one, dict) else one if isinstance(one, list | tuple) else ()
    return found


def _after(words: torch.Tensor, tokens: torch.Tensor | LazyValue) -> torch.Tensor | LazyValue:
    """Return the values of generated tokens after another prompt of the same length."""

    def joined(value: torch.Tensor) -> torch.Tensor:
        with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
            return torch.cat([words, value[:, words.shape[1] :]], 1)

    if not isinstance(tokens, LazyValue):
        return joined(tokens)

    def run() -> list[torch.Tensor]:
        value = tokens.get()
        return [] if value is None else [joined(value)]

    return LazyValue(run, 0, tokens.shape, from_data=tokens.from_data, origins=tokens.origins)


def _plain(value: Any) -> Any:
    """Return a configuration as a mapping, everything else unchanged."""
    return value.to_dict() if hasattr(value, "to_dict") and not isinstance(value, torch.Tensor) else value


def _settings(module: nn.Module) -> list[tuple[str, Any]]:
    """Return the attributes of a module that are plain values, or lists of them such as the names of adapters."""
    return [
        (name, value if isinstance(value, _PLAIN) else list(value))
        for name, value in vars(module).items()
        if isinstance(value, _PLAIN)
        or (isinstance(value, list | tuple | set) and all(isinstance(one, _PLAIN) for one in value))
    ]
