"""Analyze the memory and the operations of a step.  Needs no torch.

memory.py               from an allocation trace to the memory breakdown, the peak and the verdict
purposes.py             the component that each allocation belongs to
memory_timeline.py      bytes by component over the steps
bytes_per_parameter.py  bytes per parameter beside the rules of thumb
operations.py           from the operations of a step to the operation breakdown
operation_table.py      FLOP, bytes and time by group, phase, module and operator
claims.py               general statements about training, checked against this step
matmul_shapes.py        matrix products whose shapes waste the GPU
padding.py              the setting to change so that a dimension becomes a good multiple
published_layer.py      the published shares of an encoder layer
"""
