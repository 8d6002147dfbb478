"""The registry of operators: the memory each allocates, its cost on the GPU and the way it is launched.

``table`` has a row for each operator and ``registry`` finds it. ``traffic`` and ``counts`` count bytes and FLOP for the
operation breakdown; ``cost`` computes the work of kernels for predicted times; ``allocation``, the only part that needs
torch, has the rules for memory and the meta kernels.
"""
