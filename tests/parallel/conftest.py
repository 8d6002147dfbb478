"""Processes of this machine for tests that run in ranks; each test gets forks of them."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType

import pytest
from forked_ranks import Ranks

from trainatomy.measurement.process.pool import Processes

HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def server_of_ranks() -> Iterator[Processes]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(HERE), str(HERE.parent / "measurement"), *sys.path]))
        with Processes() as processes:
            yield processes


@pytest.fixture(scope="session")
def two_processes(server_of_ranks: Processes) -> Ranks:
    return Ranks(server_of_ranks, 2)


@pytest.fixture(scope="session")
def four_processes(server_of_ranks: Processes) -> Ranks:
    return Ranks(server_of_ranks, 4)


@pytest.fixture
def same_processes(two_processes: Ranks, monkeypatch: pytest.MonkeyPatch) -> Callable[[ModuleType], None]:
    """Return a function that makes a module run its tasks in the processes that are there."""

    def reuse(module: ModuleType) -> None:
        monkeypatch.setattr(module, "Processes", lambda: nullcontext(two_processes))

    return reuse
