"""Small allocation traces written by hand."""

from __future__ import annotations

from trainatomy.results.trace import AllocationTrace, Event, Mark, Origin

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


class TraceBuilder:
    """Builder of handwritten allocation traces."""

    def __init__(self) -> None:
        self.trace = AllocationTrace()

    def allocate(
        self, size: int, phase: str = "forward", label: str | None = None, module: str = "", step: int = 0
    ) -> int:
        """Record an allocation of ``size`` bytes and return its number."""
        number = len(self.trace.origins)
        self.trace.origins.append(Origin("aten::empty", module, phase, step))
        self.trace.events.append(Event("alloc", number, size))
        if label is not None:
            self.trace.labels[number] = label
        return number

    def free(self, *numbers: int) -> None:
        """Record that allocations are freed."""
        self.trace.events += [Event("free", number, 0) for number in numbers]

    def empty_cache(self) -> None:
        self.trace.events.append(Event("empty_cache", -1, 0))

    def mark(self, name: str, step: int = 0) -> None:
        """Mark that something begins or ends before the next event."""
        self.trace.marks.append(Mark(len(self.trace.events), name, step))


def one_step() -> tuple[AllocationTrace, dict[str, int]]:
    """Return the trace of a step (weights, forward, backward, states) and its allocation numbers by name."""
    builder = TraceBuilder()
    numbers = {"weight": builder.allocate(4 * MIB, "load", "weight")}
    builder.mark("loaded")
    numbers["kept by the loop"] = builder.allocate(1 * KIB, "other")
    numbers["input"] = builder.allocate(2 * KIB, "other", "input")
    builder.mark("forward")
    numbers["passing"] = builder.allocate(2 * MIB, module="encoder.layer.0")
    numbers["saved"] = builder.allocate(6 * MIB, module="encoder.layer.0.output")
    numbers["saved too"] = builder.allocate(2 * MIB, module="encoder.layer.1.output")
    builder.free(numbers["passing"])
    builder.mark("forward end")
    numbers["gradient"] = builder.allocate(4 * MIB, "backward", "gradient")
    numbers["backward"] = builder.allocate(8 * MIB, "backward")
    builder.free(numbers["backward"], numbers["saved"], numbers["saved too"])
    builder.mark("backward end")
    numbers["state"] = builder.allocate(4 * MIB, "optimizer", "optimizer_state")
    numbers["optimizer"] = builder.allocate(1 * MIB, "optimizer")
    builder.free(numbers["optimizer"])
    return builder.trace, numbers
