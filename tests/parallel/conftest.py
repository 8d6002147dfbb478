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


class ForkedRanks(RankProcesses):
    """Ranks that load the libraries once, together; torchrun starts those of ``processes``, as it does for users."""

    def _command(self) -> list[str]:
        return [sys.executable, str(HERE / "forked_ranks.py"), str(self._spool), str(self._count)]


@pytest.fixture(scope="module")
def processes() -> Iterator[RankProcesses]:
    with _launched(RankProcesses(2)) as launched:
        yield launched


@pytest.fixture(scope="session")
def two_processes() -> Iterator[RankProcesses]:
    with _launched(ForkedRanks(2)) as launched:
        yield launched


@pytest.fixture(scope="session")
def four_processes() -> Iterator[RankProcesses]:
    with _launched(ForkedRanks(4)) as launched:
        yield launched


@contextmanager
def _launched(processes: RankProcesses) -> Iterator[RankProcesses]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(HERE), str(HERE.parent / "measurement"), *sys.path]))
        with processes as launched:
            yield launched


@pytest.fixture
def same_processes(two_processes: RankProcesses, monkeypatch: pytest.MonkeyPatch) -> Callable[[ModuleType], None]:
    """Return a function that makes a module run its tasks in the processes that are there."""

    def reuse(module: ModuleType) -> None:
        monkeypatch.setattr(module, "RankProcesses", lambda count: nullcontext({2: two_processes}[count]))

    return reuse
