"""The registry of operators: what each one allocates, what it costs on the GPU and how it is launched.

``table`` has a row for each operator and ``registry`` finds it. ``traffic`` and ``counts`` count bytes and FLOP for the
operation breakdown; ``cost`` computes the work of kernels for predicted times; ``allocation``, the only part that needs
torch, has the rules for memory and the meta kernels.
"""
