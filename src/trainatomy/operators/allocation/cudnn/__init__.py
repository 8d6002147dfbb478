"""Memory that cuDNN allocates: workspaces of convolutions, workspace and reserve of recurrent layers.

cuDNN documents neither. Where its library is installed, it is asked what it would choose for a convolution
(``heuristics``). Elsewhere, trees that were learned from its answers for an H200 decide (``learned``).
"""
