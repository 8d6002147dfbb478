"""CUDA streams and events of a simulated process.

A stream matters twice: the allocator keeps a pool of blocks for each, and the GPU works on several at once, in an
order that events decide.  All code runs in the order of the program here; the allocation trace and the operations note
the stream, and the operations also note the waits.

Work known to be done on the GPU when the CPU has waited for a stream: also what that stream had waited for.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, ClassVar, Literal

import torch

from trainatomy.results.trace import CPUWait


class CPUWaits:
    """Follows the waits between streams, and notes those of the CPU.

    Attributes:
        noted: The CPU's waits, in order.
    """

    def __init__(self) -> None:
        self.noted: list[CPUWait] = []
        self._waited_for: dict[int, dict[int, int]] = {}
        self._at_record: dict[int, dict[int, int]] = {}

    def synchronize(self, kind: SyncKind, stream: int, event: int, now: int) -> None:
        """Note a synchronisation (see ``Streams``); ``now``: number of events of the allocation trace so far."""
        if kind == "record":
            self._at_record[event] = self._done(stream, now)
        elif kind == "wait":
            _merge(self._waited_for.setdefault(stream, {}), self._at_record.get(event, {}))
        else:
            done = None if stream < 0 else self._at_record.get(event) or self._done(stream, now)
            self.noted.append(CPUWait(now, done))

    def read(self, stream: int, now: int) -> None:
        """Note that the CPU reads a result on a stream."""
        self.noted.append(CPUWait(now, self._done(stream, now)))

    def _done(self, stream: int, now: int) -> dict[int, int]:
        """Return the number of events up to which each stream is done, once a stream is."""
        return {**self._waited_for.get(stream, {}), stream: now}


def _merge(known: dict[int, int], other: dict[int, int]) -> None:
    for stream, event in other.items():
        known[stream] = max(event, known.get(stream, 0))


DEFAULT_STREAM = 0
SyncKind = Literal["record", "wait", "cpu_wait"]


class Streams:
    """Streams of one process; number 0 is the default stream, the others count in the order of their creation.

    Args:
        device: Device that the streams belong to.
        note: Called with (kind, stream, event) for each synchronisation.  "record": the stream records the event;
            "wait": later launches on the stream wait for the event; "cpu_wait": the CPU waits for the event,
            for the stream (event -1) or for all streams (stream -1).  An event has a new number whenever it is
            recorded.
    """

    def __init__(self, device: torch.device, note: Callable[[SyncKind, int, int], None]) -> None:
        self.device = device
        self.note = note
        self.pooled = False
        """True if a stream was taken from PyTorch's pools; the first one makes all that they hold."""
        self._count = 1
        self._events = 0
        self._external: dict[int, int] = {}
        self.event_class = type("Event", (SimulatedEvent,), {"owner": self})
        self.stream_class = type("Stream", (SimulatedStream,), {"owner": self})
        self.external_class = type("ExternalStream", (SimulatedExternalStream, self.stream_class), {})
        self.default = self.stream_class(stream_id=DEFAULT_STREAM)
        self.current: Any = self.default
        self._of_nodes: dict[int, Any] = {}
        """Streams of autograd nodes, by their sequence numbers, where they are not the default stream."""
        self._nodes = 0
        """Autograd nodes whose stream is known: those with smaller sequence numbers."""
        self.makes_nodes = True
        """False between the making of an autograd node and its operation, while others run that make none."""
        self._chosen: tuple[int, Any] | None = None
        """A node of a backward pass, and the stream that its hooks made current."""

    @property
    def executing(self) -> Any:
        """The stream of the running operation: in backward that of the forward operation that it belongs to.

        The engine makes it current for each node; hooks of the node may make another one current.
        Source: torch/csrc/autograd/engine.cpp, ``Engine::evaluate_function`` (``func.stream()``), torch 2.9-2.13.
        """
        node = _running_node() if self._of_nodes or self._chosen else None
        if node is None:
            return self.current
        number = node._sequence_nr()
        if self._chosen is not None and self._chosen[0] == number:
            return self._chosen[1]
        return self._of_nodes.get(number, self.current)

    @property
    def of_node(self) -> Any:
        """The stream of the node that runs in a backward pass; None for the default one, and where a hook chose one."""
        node = _running_node() if self._of_nodes else None
        if node is None or (self._chosen is not None and self._chosen[0] == node._sequence_nr()):
            return None
        return self._of_nodes.get(node._sequence_nr())

    @property
    def uses(self) -> int:
        """Number of streams that were made and of events that were recorded, on which operations may depend."""
        return self._count - 1 + self._events

    def operation(self) -> None:
        """Remember the stream of the autograd nodes that the operation made that just ran."""
        if self._count == 1 or not self.makes_nodes:
            return
        nodes = torch._C._autograd._get_sequence_nr()
        if nodes > self._nodes:
            stream = self.executing
            if stream is not self.default:
                self._of_nodes.update(dict.fromkeys(range(self._nodes, nodes), stream))
            self._nodes = nodes

    @contextlib.contextmanager
    def consumer(self) -> Iterator[None]:
        """Run what the engine does after a node, adding its gradients to those of others, on the next node's stream.

        That stream waits for the node's.  If the next nodes have several streams, nothing changes.
        Source: torch/csrc/autograd/input_buffer.cpp (``InputBuffer::add``), torch 2.9-2.13.
        """
        node = _running_node() if self._of_nodes else None
        following = [] if node is None else [one for one, _ in node.next_functions if one is not None]
        streams = {self._of_nodes.get(one._sequence_nr(), self.default) for one in following}
        own = self.executing
        if node is None or len(streams) != 1 or streams == {own}:
            yield
            return
        (stream,) = streams
        stream.wait_stream(own)
        before, self._chosen = self._chosen, (node._sequence_nr(), stream)
        try:
            yield
        finally:
            self._chosen = before

    def next_stream(self) -> int:
        """Return the number of a new stream."""
        if self._count == 1:
            self._nodes = torch._C._autograd._get_sequence_nr()
        self._count += 1
        return self._count - 1

    def next_of_pool(self) -> int:
        """Return the number of a new stream of PyTorch's pools."""
        self.pooled = True
        return self.next_stream()

    def external(self, pointer: int) -> int:
        """Return the number of a stream that another library made, by its address."""
        if pointer not in self._external:
            self._external[pointer] = self.next_stream() if pointer else DEFAULT_STREAM
        return self._external[pointer]

    def next_event(self) -> int:
        """Return the number of a new record of an event."""
        self._events += 1
        return self._events - 1

    def select(self, stream: Any) -> None:
        """Make ``stream`` current (``torch.cuda.set_stream``); in backward, for the running node.

        None changes nothing.
        """
        if stream is None:
            return
        node = _running_node()
        if node is None:
            self.current = stream
        else:
            self._chosen = (node._sequence_nr(), stream)

    def synchronize_device(self) -> None:
        """Let the CPU wait for all streams."""
        self.note("cpu_wait", -1, -1)


def _running_node() -> Any:
    """Return the autograd node that a backward pass runs, None outside of one."""
    return None if torch._C._current_graph_task_id() == -1 else torch._C._current_autograd_node()


class StreamContext:
    """``torch.cuda.stream``: makes a stream current for a block; None changes nothing."""

    def __init__(self, streams: Streams, stream: Any) -> None:
        self.stream = stream
        self._streams = streams
        self._before: list[Any] = []

    def __enter__(self) -> None:
        self._before.append(self._streams.executing)
        self._streams.select(self.stream)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._streams.select(self._before.pop())


class SimulatedStream:
    """``torch.cuda.Stream``; libraries make streams without arguments, so ``owner`` is an attribute of a subclass."""

    owner: ClassVar[Streams]

    def __init__(self, device: Any = None, priority: int = 0, *, stream_id: int | None = None, **options: Any) -> None:
        self.stream_id = self.owner.next_of_pool() if stream_id is None else stream_id
        self.cuda_stream = self.native_handle = self._as_parameter_ = self.stream_id
        self.device, self.device_index, self.device_type = self.owner.device, self.owner.device.index, 1
        self.priority = priority
        self._contexts: list[StreamContext] = []

    def __eq__(self, other: object) -> bool:
        return getattr(other, "stream_id", None) == self.stream_id

    def __hash__(self) -> int:
        return hash((self.device, self.stream_id))

    def __repr__(self) -> str:
        return f"<torch.cuda.Stream device={self.device} cuda_stream={self.stream_id:#x}>"

    def __enter__(self) -> Any:
        self._contexts.append(StreamContext(self.owner, self))
        self._contexts[-1].__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._contexts.pop().__exit__(*error)

    def record_event(self, event: Any = None) -> Any:
        """Record ``event``, or a new one, and return it."""
        event = self.owner.event_class() if event is None else event
        event.record(self)
        return event

    def wait_event(self, event: Any) -> None:
        """Let later launches wait for ``event``; an event that was never recorded counts as done."""
        if event.number is not None:
            self.owner.note("wait", self.stream_id, event.number)

    def wait_stream(self, stream: Any) -> None:
        """Let later launches wait for everything launched on ``stream`` so far."""
        self.wait_event(stream.record_event())

    def synchronize(self) -> None:
        """Let the CPU wait for this stream."""
        self.owner.note("cpu_wait", self.stream_id, -1)

    def query(self) -> bool:
        """Return True: everything is done."""
        return True

    def is_capturing(self) -> bool:
        """Return False: CUDA graphs are not simulated."""
        return False


class SimulatedEvent:
    """``torch.cuda.Event``, with ``owner`` as in ``SimulatedStream``."""

    owner: ClassVar[Streams]

    def __init__(self, *args: Any, **options: Any) -> None:
        self.number: int | None = None
        self.device, self.cuda_event = self.owner.device, 0
        self._stream = -1

    def record(self, stream: Any = None) -> None:
        """Note the event on ``stream``, by default the current one."""
        self.number = self.owner.next_event()
        self._stream = (self.owner.executing if stream is None else stream).stream_id
        self.owner.note("record", self._stream, self.number)

    def wait(self, stream: Any = None) -> None:
        """Let ``stream``, by default the current one, wait for this event."""
        (self.owner.executing if stream is None else stream).wait_event(self)

    def synchronize(self) -> None:
        """Let the CPU wait for this event."""
        if self.number is not None:
            self.owner.note("cpu_wait", self._stream, self.number)

    def query(self) -> bool:
        """Return True: everything is done."""
        return True

    def elapsed_time(self, end_event: Any) -> float:
        """Return 0: nothing runs."""
        return 0.0


class SimulatedExternalStream(SimulatedStream):
    """``torch.cuda.ExternalStream``: a stream that another library made."""

    def __init__(self, stream_ptr: int, device: Any = None, **options: Any) -> None:
        super().__init__(stream_id=self.owner.external(int(stream_ptr)))
