"""The timing model: predict how long one rank's training step takes, on the CPU and on its GPU.

cost_model.py      GPU time of one operation: a physical estimate times an efficiency measured by a calibration
efficiency.py      the efficiencies of kernel families by the points of a calibration; compiled.py: those that ship
extrapolation.py   the efficiencies of one GPU applied to another
launch.py          CPU time to launch each operation, and the training loop's own CPU time
host_costs.py      CPU costs of a host: launches, loops, cudaMalloc and cudaFree
timeline.py        the CPU timeline and one GPU timeline per CUDA stream (streams.py, one_stream.py)
step.py            all of these together: the ``Time`` of a step
evidence.py        what the times of a card rest on; summary of a calibration beside the GPU's data sheet

The package needs no torch: it reads ``results.operations``.
"""
