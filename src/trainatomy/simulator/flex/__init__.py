"""FlexAttention on meta tensors: what ``torch.compile(flex_attention)`` allocates, without a compiler.

The code that Inductor writes around FlexAttention's kernels follows from its lowering, and always has the same form:
outputs and a few sums in forward, one buffer of sums and the gradients in backward.  These functions allocate that.
Running the compiler instead, as ``simulator.compiled`` does for a whole model, would need Triton and one release of
PyTorch, whose wrapper differs from those of others; the functions follow the release that is simulated, anywhere.
Where Triton is installed, tests compare them with Inductor's wrapper event by event.
"""
