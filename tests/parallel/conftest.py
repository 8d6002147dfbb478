"""Processes of this machine for tests that run in ranks; each test gets forks of them."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import ModuleType

import pytest

from trainatomy.measurement.process.ranks import RankProcesses

HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def processes() -> Iterator[RankProcesses]:
    with _launched(2) as launched:
        yield launched


@pytest.fixture(scope="module")
def four_processes() -> Iterator[RankProcesses]:
    with _launched(4) as launched:
        yield launched


@contextmanager
def _launched(count: int) -> Iterator[RankProcesses]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(HERE), str(HERE.parent / "measurement"), *sys.path]))
        with RankProcesses(count) as launched:
            yield launched


@pytest.fixture
def same_processes(processes: RankProcesses, monkeypatch: pytest.MonkeyPatch) -> Callable[[ModuleType], None]:
    """Return a function that makes a module run its tasks in the processes that are there."""

    def reuse(module: ModuleType) -> None:
        monkeypatch.setattr(module, "RankProcesses", lambda count: nullcontext({2: processes}[count]))

    return reuse
