"""Select tests by marker: ``unit`` (set by folder), ``slow`` (only with ``-m slow``) and ``gpu`` (only with CUDA)."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

os.environ["TRAINATOMY_CUDNN"] = "none"  # recorded numbers are those of the rules, also where the library is installed

HERE = Path(__file__).parent
UNIT_FOLDERS = {"allocator", "analysis", "catalog", "doctor", "records", "timing", "workload"}
"""Folders whose tests simulate no training; ``pytest -m unit`` runs them."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    slow_selected = "slow" in config.getoption("-m")
    for item in items:
        slow = item.get_closest_marker("slow")
        if not slow and item.path.relative_to(HERE).parts[0] in UNIT_FOLDERS:
            item.add_marker("unit")
        if slow and not slow_selected:
            item.add_marker(pytest.mark.skip(reason="slow: run with -m slow"))
        if item.get_closest_marker("gpu") and not _has_cuda():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()
