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
    """Ranks that load the libraries once, together; torchrun, which starts ranks for users, is tested with light ones.

    The process that loads the libraries also forks the ranks of ``others``.
    """

    def __init__(self, count: int, *others: NeighbouringRanks) -> None:
        super().__init__(count)
        self._launches = (self, *others)

    def _command(self) -> list[str]:
        launches = [word for one in self._launches for word in (str(one._spool), str(one._count))]
        return [sys.executable, str(HERE / "forked_ranks.py"), *launches]


class NeighbouringRanks(RankProcesses):
    """Ranks that the process of ``ForkedRanks`` forks; their own launcher only waits until they shall end."""

    def _command(self) -> list[str]:
        return ["sh", "-c", f"until [ -e '{self._spool}/end' ]; do sleep 0.5; done"]


@pytest.fixture(scope="session")
def forked() -> Iterator[dict[int, RankProcesses]]:
    """Ranks by their number."""
    with NeighbouringRanks(4) as four, _launched(ForkedRanks(2, four)) as two:
        yield {2: two, 4: four}
        (four._spool / "end").touch()  # so that the process that forked them all can end


@pytest.fixture(scope="session")
def two_processes(forked: dict[int, RankProcesses]) -> RankProcesses:
    return forked[2]


@pytest.fixture(scope="session")
def four_processes(forked: dict[int, RankProcesses]) -> RankProcesses:
    return forked[4]


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
