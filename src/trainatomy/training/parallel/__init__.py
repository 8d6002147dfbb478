"""Spread a model over GPUs with PyTorch's own classes, in a prediction and in a measurement alike."""
