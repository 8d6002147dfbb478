"""Frozen values that every other package reads and writes.

Bytes are ``int``, seconds ``float``. No torch, no formatting, no I/O.
"""
