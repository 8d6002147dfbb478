"""Frozen values that every other part reads and writes: bytes as ``int``, seconds as ``float``; no torch, no
formatting, no I/O."""
