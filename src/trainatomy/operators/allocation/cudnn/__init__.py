"""Memory that cuDNN allocates: workspaces of convolutions, workspace and reserve of recurrent layers.

cuDNN documents neither. All rules here were derived from random calls on an H200 (cuDNN 9.19, torch 2.11;
``benchmarks/kernels/workspaces.py``) and from recorded trainings.
"""
