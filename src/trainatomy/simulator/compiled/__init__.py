"""Compiled steps: PyTorch's own compiler, whose device alone is simulated, and its code with kernels that do nothing."""
