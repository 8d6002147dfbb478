"""Libraries with kernels of their own, on meta tensors: one file a library."""
