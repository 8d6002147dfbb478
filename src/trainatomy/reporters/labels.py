"""Titles, colours and letters of everything that is reported: one home for text, JSON, charts and HTML."""

from __future__ import annotations

FACTS = {
    "simulated_steps": "simulated steps",
    "allocations": "allocations",
    "allocator": "allocator settings",
    "gpu_memory": "GPU memory",
    "context": "context and kernels",
}
"""Titles of the facts that a prediction rests on."""
