"""Out of memory, as a result: the prediction that a real run would have stopped here."""

from __future__ import annotations


class OutOfMemory(Exception):  # a result that is raised, named as PyTorch names it
    """The allocator could not serve a request, even after it gave back every cached segment (all values in bytes).

    ``requested`` is what the program asked for and ``segment`` what the driver was asked for; ``allocated`` and
    ``reserved`` are the allocator's state at that moment, ``capacity`` the bound on ``reserved`` that was hit.
    Not a TrainatomyError: the caller decides whether this is a failure or the answer.
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
