"""How long a step takes: what an operation costs the GPU, what issuing it costs the host, and both clocks together.

Needs no torch: it reads ``results.operations``.
"""
