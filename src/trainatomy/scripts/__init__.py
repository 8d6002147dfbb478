"""Unmodified training scripts without a GPU: run in a simulated process, stopped after a few optimizer steps."""
