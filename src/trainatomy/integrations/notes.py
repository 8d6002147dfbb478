"""What is written down while somebody's loop runs: where in the stream of allocations each part begins, and where
tensors lie whose purpose is known.

Everything here is paid for by the loop.  A note costs one call of the allocator's counters, which build a dictionary
each time (some 20 microseconds); so what happens at one instant is noted by one call.  The addresses of gradients and
optimizer states are thousands of Python calls: they are read only at the end of a step in which the peak rose, because
only what is held at the peak needs a name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from trainatomy.measurement.step.follow import Follower
from trainatomy.measurement.step.scribe import addresses
from trainatomy.measurement.traces.trace import PHASES, Note
from trainatomy.results.memory import Instant
from trainatomy.training.observer import Silent
from trainatomy.training.states import tensors_in

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    from trainatomy.measurement.step.stopwatch import Stopwatch


FOLLOWED_STEPS = 2
"""Steps whose modules are noted at first: what the first takes for good (workspaces, states) no other does."""
FOLLOWED_AGAIN = 1
"""And in each later window of the history."""


class Counted(NamedTuple):
    """The allocator's counters: allocations and releases so far, and the most bytes that were allocated."""

    events: int
    peak_bytes: int


def counted(device: int) -> Counted:
    """Read the counters of one device: from the allocator itself, because ``torch.cuda.memory_stats`` flattens and
    sorts its answer, which takes ten times as long."""
    statistics = torch._C._cuda_memoryStats(device)
    calls, held = statistics["allocation"]["all"], statistics["allocated_bytes"]["all"]
    return Counted(calls["allocated"] + calls["freed"], held["peak"])


class Notes(Silent):
    """The listener (``attachment.signals.Listener``) that takes notes; of tensors it keeps addresses and sizes only.

    ``rolls`` is called after each step with the counters, and may take the notes away to begin anew.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Any,
        clock: Stopwatch,
        read: Callable[[], Counted],
        rolls: Callable[[Counted], None],
    ) -> None:
        self._model, self.optimizer, self._clock = model, optimizer, clock
        self._read, self._rolls = read, rolls
        self._named_peak = 0
        self._step = -1
        self._begins = False
        self._parameters: list[nn.Parameter] = []
        self._place: list[int] = []
        self._to_follow = FOLLOWED_STEPS
        self._inputs: list[int] = []
        self._follower: Follower | None = None
        self.keeps_batch = False
        self.first_batch: dict[str, Any] | None = None
        self.autocast: torch.dtype | None = None
        self.notes: list[Note] = []
        self.followed: list[int] = []
        self.steps = 0
        self.samples: list[int] = []
        self.tokens: list[int] = []

    # -- the loop ------------------------------------------------------------------------------------------------------

    def step_begin(self, step: int) -> None:
        self._step = step
        self.samples.append(0)
        self.tokens.append(0)
        self._begins = True

    def batch(self, arguments: tuple[Any, ...], keywords: Mapping[str, Any]) -> None:
        """Count samples and tokens, and remember where the batch lies."""
        tensors = list(_tensors((arguments, keywords)))
        first = keywords.get("input_ids", next(iter(tensors), None))
        if isinstance(first, torch.Tensor) and first.dim() > 0:
            self.samples[-1] += first.shape[0]
            self.tokens[-1] += first.numel() if first.dim() == 2 and not first.is_floating_point() else 0
        self._inputs = addresses(tensors)
        if self.keeps_batch and self.first_batch is None and not arguments:
            on_host = {name: _on_host(value) for name, value in keywords.items()}
            self.first_batch = {name: value for name, value in on_host.items() if value is not None}

    def micro_step_begin(self, micro_step: int) -> None:
        self._note("forward", input=self._inputs)

    def forward_end(self) -> None:
        self._note("forward end")

    def micro_step_end(self, micro_step: int) -> None:
        self._note("backward end")

    def optimizer_begin(self) -> None:
        self._note("optimizer")

    def optimizer_end(self) -> None:
        self._note_risen("optimizer end")

    def tick(self) -> None:
        self._clock.tick()

    def zero_grad_begin(self) -> None:
        self._note_risen("zero_grad")

    def zero_grad_end(self) -> None:
        self._note("zero_grad end")

    def step_end(self, step: int) -> None:
        now = self._read()
        self._write(now, "step end")
        self.steps += 1
        if self._follower is not None:
            self.followed.append(step)
            if len(self.followed) >= self._to_follow:
                self.unfollow()
                self._to_follow = FOLLOWED_AGAIN
        self._rolls(now)

    # -- modules -------------------------------------------------------------------------------------------------------

    def follow(self) -> None:
        """Note which module is at work, for the first steps from here on; the others are told by their likeness."""
        self.unfollow()
        self.notes, self.followed = [], []
        self._follower = Follower(self._model, self._take)
        self._follower.start()

    def unfollow(self) -> None:
        """Follow modules no longer."""
        if self._follower is not None:
            self._follower.stop()
            self._follower = None

    # -- names ---------------------------------------------------------------------------------------------------------

    def known(self) -> dict[str, list[int]]:
        """Where everything lies now whose purpose is known, by label."""
        self._parameters = list(self._model.parameters())
        self._place = addresses(self._parameters[:1])
        return {
            "weight": addresses(self._parameters),
            "buffer": addresses(self._model.buffers()),
            **self._grown(),
        }

    def _grown(self) -> dict[str, list[int]]:
        """Where that lies which comes in the course of a training."""
        return {
            "gradient": addresses(p.grad for p in self._parameters if p.grad is not None),
            "optimizer_state": addresses(tensors_in(getattr(self.optimizer, "state", {}))),
        }

    def instant(self) -> Instant:
        """Where the loop is now."""
        phases = (PHASES[note.name] for note in reversed(self.notes) if note.name in PHASES)
        return Instant(self._step, next(phases, "load"), "", "")

    def failed(self) -> None:
        """The loop raised: note all that is known, while what it held is still held."""
        self._note("failed", **self.known())

    def _note_risen(self, name: str) -> None:
        """A note, with the addresses of what is there if the peak rose since they were last noted."""
        now = self._read()
        found: dict[str, list[int]] = {}
        if now.peak_bytes > self._named_peak:
            self._named_peak = now.peak_bytes
            moved = not self._parameters or addresses(self._parameters[:1]) != self._place
            found = self.known() if moved else self._grown()
        self._write(now, name, found)

    def _note(self, name: str, **found: list[int]) -> None:
        self._write(self._read(), name, found)

    def _take(
        self,
        name: str,
        found: Mapping[str, list[int]] | None = None,
        module: str = "",
        copies: Sequence[tuple[int, int]] = (),
    ) -> None:
        if copies:
            self.autocast = torch.get_autocast_dtype("cuda")
        self._write(self._read(), name, found, module, copies)

    def _write(
        self,
        now: Counted,
        name: str,
        found: Mapping[str, list[int]] | None = None,
        module: str = "",
        copies: Sequence[tuple[int, int]] = (),
    ) -> None:
        """A note of this instant; a step begins with the first thing that is noted in it."""
        if self._begins:
            self._begins = False
            self.notes.append(Note(now.events, "step", self._step, {}))
        self.notes.append(Note(now.events, name, self._step, found or {}, module, copies))


def _on_host(value: Any) -> Any:
    return value.detach().cpu() if isinstance(value, torch.Tensor) else value


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, Sequence) and not isinstance(value, str | bytes):
        for item in value:
            yield from _tensors(item)
