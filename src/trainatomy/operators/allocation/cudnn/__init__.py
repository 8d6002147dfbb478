"""What cuDNN takes for itself: workspaces of convolutions, workspace and reserve of recurrent layers.

It tells none of it before it runs. All rules here were read off random calls on an H200 (cuDNN 9.19, torch 2.11;
``benchmarks/kernels/workspaces.py``) and off recorded trainings.
"""
