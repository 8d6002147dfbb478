"""What holds for all tests: selection by marker, few threads, little garbage, further tries where the clock decides.

Markers: ``unit`` (set by folder), ``slow`` (only with ``-m slow``), ``gpu`` (only with CUDA) and ``timed``.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

os.environ["OMP_NUM_THREADS"] = "1"  # read by torch: threads make tiny operations slower, and the other tests wait
os.environ.pop("COLUMNS", None)  # pages are as wide as without a terminal; processes of pytest-xdist say 80
os.environ["TRAINATOMY_CUDNN"] = "none"  # recorded numbers are those of the rules, also where the library is installed
os.environ["TRAINATOMY_CACHE"] = ""  # no code of PyTorch's compiler that other runs wrote
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # else each process that a test starts compiles every file again
sys.dont_write_bytecode = False

gc.disable()  # until all tests are collected: to search what is imported for garbage takes two seconds

HERE = Path(__file__).parent
UNIT_FOLDERS = {"allocator", "analysis", "catalog", "doctor", "records", "timing", "workload"}
"""Folders whose tests simulate no training; ``pytest -m unit`` runs them."""
RANK_FIXTURE = "forked"
"""The fixture that starts a process which loads the libraries: once, if one process runs all tests that need it."""


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the groups
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.pluginmanager.hasplugin("xdist"):
        _group(items)
    slow_selected = "slow" in config.getoption("-m")
    for item in items:
        slow = item.get_closest_marker("slow")
        if not slow and item.path.relative_to(HERE).parts[0] in UNIT_FOLDERS:
            item.add_marker("unit")
        if slow and not slow_selected:
            item.add_marker(pytest.mark.skip(reason="slow: run with -m slow"))
        if item.get_closest_marker("gpu") and not _has_cuda():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


def _group(items: list[pytest.Item]) -> None:
    """Keep the tests of a file in one process, and those of all files that need the processes of ranks in another."""
    ranks = {item.path for item in items if RANK_FIXTURE in getattr(item, "fixturenames", ())}
    for item in items:
        item.add_marker(pytest.mark.xdist_group("ranks" if item.path in ranks else str(item.path.relative_to(HERE))))


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Try a test of times before pytest does: where it fails, the machine may have been busy."""
    if pyfuncitem.get_closest_marker("timed") is None:
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    for _ in range(2):
        with suppress(AssertionError):
            pyfuncitem.obj(**arguments)
            return True
    return None


@pytest.fixture(autouse=True)
def old_objects_are_no_garbage() -> None:
    """Leave what exists already out of Python's search for garbage, which takes half a second with all libraries."""
    gc.collect()
    gc.freeze()


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


@pytest.fixture(scope="module")
def kept_workspaces() -> Iterator[None]:
    """Keep cuBLAS's workspaces, as PyTorch did before 2.15, so that they do not decide the peak of a tiny model."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCH_CUBLAS_WORKSPACE_CACHE", "1")
        yield
