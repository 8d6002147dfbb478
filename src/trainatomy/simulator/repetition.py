"""Copies micro-batches that repeat, instead of executing them.

After the first micro-batch of a step, which makes the gradients, each further one does the same: the same operations,
allocations and releases, with other tensors.  This is checked, not assumed.  A further micro-batch becomes a template
if it did what the further one before it did (in a step with two micro-batches: that of the step before) and left only
its loss behind.  The micro-batches after it are then written to the trace and to the operations as copies of the
template, as long as their batches have the same shapes; in a later step also only if the first micro-batch of that step
did what that of the template's step did, so that nothing depends on the step.  A micro-batch that changes a number in
the host's memory (random numbers, a module that counts its calls) is never a template.  Whatever fails a check is
executed.

On several GPUs, a micro-batch that communicates, or works with several streams, is neither a template nor compared, and
the last one of a step is always executed: with DDP it reduces the gradients of all.

The first micro-batch of a step is copied from that of the step before if that did what the one of the step before it
did; the gradients that it made are then tensors of the same layout.

What an earlier run of the same training with another optimizer did takes the place of what this run would have to
execute to see that it repeats (``micro_batches.py``).  A run is remembered after its second step, which has shown
whether its micro-batches repeat.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from trainatomy.simulator.micro_batches import (
    Beginning,
    Recollections,
    RememberedRun,
    Template,
    Window,
    gradients,
    leaves_only,
)
from trainatomy.simulator.recorder import Recorder
from trainatomy.simulator.stretches import FIRST, INPUT, LOSS, OLDER, OWN, Entry, Inputs, Name, describe, write
from trainatomy.training.process import host_states

_PLAIN = (bool, int, float, str)


class Repetition:
    """Follower of a run's micro-batches that copies those that repeat.

    Args:
        recorder: Recorder of the run.
        recollections: Earlier runs of the same training with other optimizers.
    """

    def __init__(self, recorder: Recorder, recollections: Recollections | None = None) -> None:
        self._recorder = recorder
        self._recollections = recollections
        self._beginning: Beginning | None = None
        self._recalled: RememberedRun | None = None
        self._is_followed = False
        self._second: Template | None = None
        self._libraries: frozenset[str] = frozenset()
        self._loads_later = False
        self._operations = recorder.operations
        self._firsts: dict[int, Window] = {}
        self._further: tuple[Window, list[Entry]] | None = None
        self._earliest: Template | None = None
        self._template: Template | None = None
        self._open: tuple[Window, Any, tuple[int, ...]] | None = None
        self._modules: list[nn.Module] = []
        self._parameters: list[nn.Parameter] = []
        self._batch: Inputs | None = None
        self._kept = -1
        self._loss: tuple[torch.Size, tuple[int, ...], torch.dtype] | None = None
        self._origins_before_step = 0
        self._renamed: dict[int, int] = {}
        self._aligned: tuple[int, int] | None = None

    # -- events of the loop --------------------------------------------------------------------------------------------

    def loaded(self, model: nn.Module) -> None:
        """Note the model that is trained."""
        self._modules = list(model.modules())
        self._parameters = list(model.parameters())

    def between_steps(self) -> None:
        """Note that a step is over, or that the first one is about to be prepared."""
        self._remember()
        self._origins_before_step = len(self._recorder.trace.origins)

    def interrupted(self) -> None:
        """Forget what repeats: something else than training steps ran, and the next steps are executed."""
        self._firsts.clear()
        self._further = self._template = self._open = self._aligned = None
        self._recollections = self._recalled = None

    def kept(self, loss: torch.Tensor) -> None:
        """Note the loss that the loop keeps of the running micro-batch."""
        with torch._C.DisableTorchFunction():
            self._loss = (loss.shape, loss.stride(), loss.dtype)
        self._kept = _number(self._recorder, loss)

    def repeat(self, micro_step: int, batch: Any, *, is_last: bool = False) -> torch.Tensor | None:
        """Write a copy of the template as this micro-batch and return its loss; None if it has to be executed.

        The last one of a step is executed where ranks exchange their gradients in it.
        """
        self._batch = describe(self._recorder, batch)
        if self._batch is None or (is_last and self._recorder.communicates) or self._recorder.awaits:
            return None
        if micro_step == 0:
            return self._repeat_first(self._batch)
        template = self._template
        if template is None or template.window.batch.shapes != self._batch.shapes:
            return None
        if template.window.step != self._recorder.step and not self._is_aligned(
            template.window.step, self._recorder.step
        ):
            self._template = None
            return None
        return self._copy(template, self._batch)

    def _repeat_first(self, batch: Inputs) -> torch.Tensor | None:
        """Copy the first micro-batch of the step before, or that of an earlier run, if it is known to repeat."""
        step, trace = self._recorder.step, self._recorder.trace
        template = self._recalled_first(step) or self._first_of_step_before(step)
        if template is None or template.window.batch.shapes != batch.shapes or template.window.gradients is None:
            return None
        window, made = template.window, template.window.gradients
        if any(self._parameters[one.place].grad is not None for one in made):
            return None
        starts = len(trace.events), len(trace.origins), len(trace.marks)
        kept_before = self._kept
        loss = self._copy(template, batch)
        if loss is None:
            return None
        with torch._C.DisableTorchFunction():
            for one in made:
                number = one.number - window.numbers.start + starts[1]
                self._parameters[one.place].grad = self._recorder.ledger.stand_in(*one.layout, number)
        self._firsts[step] = replace(
            window,
            step=step,
            batch=batch,
            kept_before=kept_before,
            events=range(starts[0], len(trace.events)),
            numbers=range(starts[1], len(trace.origins)),
            marks=range(starts[2], len(trace.marks)),
            kept=self._kept,
            origins_before_step=self._origins_before_step,
            gradients=None,
            recording=None,
        )
        return loss

    def _first_of_step_before(self, step: int) -> Template | None:
        """Return the first micro-batch of the step before, if it did what that of the step before it did."""
        window = self._firsts.get(step - 1)
        if window is None or not self._is_aligned(step - 2, step - 1):
            return None
        return self._template_of_first(window)

    def _recalled_first(self, step: int) -> Template | None:
        """Return the first micro-batch of an earlier run's second step, if this run began as that one."""
        if self._recalled is None or not (step == 1 or (step == 2 and self._is_aligned(0, 1))):
            return None
        return self._recalled.first

    def _template_of_first(self, window: Window) -> Template | None:
        """Return the first micro-batch of a step as a template; None if it left more than gradients and its loss."""
        if window.exchanges or window.recording is None or window.gradients is None or window.loss is None:
            return None
        entries = window.entries(self._recorder.trace)
        left = {one.number - window.numbers.start for one in window.gradients} | {window.kept - window.numbers.start}
        return Template.of(window, entries) if leaves_only(window, entries, left) else None

    def begin(self, micro_step: int) -> None:
        """Begin to follow a micro-batch that is executed."""
        recorder, trace = self._recorder, self._recorder.trace
        if self._batch is None:
            return
        functions: list[Any] = []
        start, number, mark = len(trace.events), len(trace.origins), len(trace.marks)
        window = Window(
            recorder.step,
            micro_step,
            self._batch,
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
        self._libraries = frozenset(recorder.libraries)
        if self._is_to_be_recorded(micro_step):
            self._operations.begin_recording(recorder.step)
        self._open = window, self.host_state(), recorder.exchanges

    def _is_to_be_recorded(self, micro_step: int) -> bool:
        """Return whether operations of a micro-batch may be copied: by this run, or by one that recalls it.

        The second micro-batch of the first step is copied by others alone.
        """
        if micro_step == 0:
            return self._recorder.step - 1 in self._firsts
        return self._further is not None or (self._recorder.step == 0 and self._beginning is not None)

    def end(self) -> None:
        """End of a micro-batch that was executed: compare it with the one before."""
        if self._open is None:
            return
        (window, state, exchanges), self._open = self._open, None
        recorder, trace = self._recorder, self._recorder.trace
        recorder.functions = None
        window.events = range(window.events.start, len(trace.events))
        window.numbers = range(window.numbers.start, len(trace.origins))
        window.marks = range(window.marks.start, len(trace.marks))
        window.is_stateful = self.host_state() != state
        window.exchanges = recorder.exchanges != exchanges
        window.loss, window.kept = self._loss, self._kept
        window.recording = self._operations.end_recording()
        if window.micro_step == 0:
            window.gradients = gradients(self._parameters, lambda grad: _number(self._recorder, grad))
            self._firsts[window.step] = window
            self._recall_or_follow(window)
            return
        self._loads_later = self._loads_later or self._recorder.libraries != self._libraries
        if window.exchanges:
            return
        entries = window.entries(self._recorder.trace)
        before, self._further, self._template = self._further, (window, entries), None
        if before is not None and window.recording is not None and self._is_repeated(before, window, entries):
            self._template = Template.of(window, entries)
            if self._beginning is not None and self._earliest is None:
                self._earliest = Template.of(*before)

    # -- earlier runs --------------------------------------------------------------------------------------------------

    def _recall_or_follow(self, window: Window) -> None:
        """Recall an earlier run that began in the same way, after the first micro-batch, or else follow this run."""
        if self._recollections is None or not self._recorder.is_alone or window.is_stateful:
            return
        if window.step == 0:
            self._beginning = Beginning.of(self._recorder.trace, window)
            self._recalled = self._recollections.recall(self._beginning)
            if self._recalled is not None:
                self._template = self._recalled.further
                self._recorder.cards.keep(self._recalled.served)
        elif window.step == 1 and self._beginning is not None and self._recalled is None:
            loads = self._recorder.libraries != self._libraries
            self._second = None if loads else self._template_of_first(window)
            self._is_followed = True

    def _remember(self) -> None:
        """Remember this run after its second step: the first micro-batch of that, and the second one of its first."""
        if not self._is_followed or self._recollections is None or self._beginning is None:
            return
        self._is_followed, further = False, self._earliest
        if further is not None and (further.window.step or self._loads_later):
            further = None
        self._recollections.remember(self._beginning, self._second, further, frozenset(self._recorder.cards.others))

    # -- comparison ----------------------------------------------------------------------------------------------------

    def _is_repeated(self, before: tuple[Window, list[Entry]], window: Window, entries: list[Entry]) -> bool:
        """Return whether a micro-batch did what the one before did, and whether a copy can take its place."""
        earlier, earlier_entries = before
        return (
            not (earlier.is_stateful or window.is_stateful)
            and earlier.batch.shapes == window.batch.shapes
            and window.loss is not None
            and earlier.loss == window.loss
            and leaves_only(window, entries, {window.kept - window.numbers.start})
            and earlier.functions == window.functions
            and earlier_entries == entries
        )

    def _is_aligned(self, earlier: int, later: int) -> bool:
        """Return whether the first micro-batch of a step did what that of an earlier step did.

        What the earlier one made and what still lives now was made for the whole run: workspaces, the scaler's state.
        """
        steps = earlier, later
        if self._aligned == steps:
            return True
        then, now = self._firsts.get(earlier), self._firsts.get(later)
        if then is None or now is None or now.batch.shapes != then.batch.shapes or now.loss != then.loss:
            return False
        if now.is_stateful or then.is_stateful:
            return False
        passed = self._recorder.trace.events[then.events.start : now.events.stop]
        freed = {event.allocation for event in passed if event.action == "free"} | {then.kept}
        counted = [number for number in then.numbers if number in freed]
        released = Entry("free", (LOSS, 0))  # the first micro-batch of the run finds no loss of one before
        trace = self._recorder.trace
        did_then, did_now = (
            [entry for entry in entries if entry != released]
            for entries in (then.entries(trace, counted), now.entries(trace))
        )
        if did_then != did_now:
            return False
        self._renamed, self._aligned = dict(zip(counted, now.numbers, strict=True)), steps
        return True

    def host_state(self) -> Any:
        """Return the states of the random number generators, hashed, and the plain attributes of all modules."""
        plain = [value for module in self._modules for value in vars(module).values() if type(value) in _PLAIN]
        return hash(tuple(host_states().values())), plain

    # -- copies --------------------------------------------------------------------------------------------------------

    def _copy(self, template: Template, batch: Inputs) -> torch.Tensor | None:
        """Write the template once more and return a tensor that holds the allocation of its loss."""
        window, trace = template.window, self._recorder.trace
        assert window.recording is not None and window.loss is not None
        number_of = self._resolver(template, {place: number for number, place in batch.places.items()})
        if number_of is None:
            return None
        outputs = [tuple([number_of(name) for name in names]) for names in template.outputs]
        first_event, first_number, kept = len(trace.events), len(trace.origins), self._kept
        write(trace, template.columns, number_of, self._recorder.step)
        self._operations.write_again(window.recording, first_event - window.events.start, outputs)
        if Entry("free", (LOSS, 0)) in template.entries:
            self._recorder.ledger.forget(kept)
        self._kept = first_number + window.kept - window.numbers.start
        return self._recorder.ledger.stand_in(*window.loss, self._kept)

    def _resolver(self, template: Template, places: dict[int, int]) -> Callable[[Name], int] | None:
        """Return the function from names to today's numbers; None if a name has no number in this step."""
        window = template.window
        start, kept = len(self._recorder.trace.origins), self._kept
        same_step = window.step == self._recorder.step
        used = {name for names in template.outputs for name in names}

        def number_of(name: Name) -> int:
            kind, number = name
            if kind == OWN:
                return start + number
            if kind == INPUT:
                return places[number]
            if kind == LOSS:
                return kept
            if kind == FIRST:
                number += window.of_first.start
                return number if same_step else self._renamed.get(number, number)
            return number

        for kind, number in used:
            if kind == INPUT and number not in places:
                return None
            if kind == OLDER and not same_step and number >= window.origins_before_step:
                return None
        return number_of


def _number(recorder: Recorder, tensor: torch.Tensor) -> int:
    """Return the allocation of a tensor, -1 if it has none."""
    found = recorder.number_of(tensor)
    return -1 if found is None else found
