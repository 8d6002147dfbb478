"""Names of processes, for those who share a card with us."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path


def process_name(pid: int) -> str:
    """What the process of that id is called; empty where this machine does not show it (another user's container)."""
    try:
        psutil = import_module("psutil")
    except ImportError:
        return _from_proc(pid)
    try:
        return str(psutil.Process(pid).name())
    except psutil.Error:
        return ""


def _from_proc(pid: int) -> str:
    """Linux tells it without a library."""
    try:
        return Path("/proc", str(pid), "comm").read_text(encoding="utf-8").strip()
    except OSError:
        return ""
