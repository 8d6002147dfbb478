"""Out of memory: the prediction that a real run would stop here."""

from __future__ import annotations


class OutOfMemory(Exception):  # a result that is raised, named as PyTorch names it
    """The allocator could not serve a request, even after it released every cached segment.

    Not a TrainatomyError: the caller decides whether this is a failure or the answer.

    Attributes:
        requested: Bytes that the program requested.
        segment: Bytes that the allocator requested from the driver.
        allocated: Allocated bytes at that moment.
        reserved: Reserved bytes at that moment.
        capacity: Limit of the reserved bytes.
    """

    def __init__(self, requested: int, segment: int, allocated: int, reserved: int, capacity: int) -> None:
        self.requested = requested
        self.segment = segment
        self.allocated = allocated
        self.reserved = reserved
        self.capacity = capacity
        super().__init__(requested, segment, allocated, reserved, capacity)

    def __str__(self) -> str:
        return (
            f"a request of {self.requested} bytes needs {self.segment} from the driver; "
            f"{self.reserved} of {self.capacity} are reserved, {self.allocated} of them allocated"
        )
