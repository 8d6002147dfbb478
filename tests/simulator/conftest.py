"""Fixtures: a simulated process on an H200 for single operations, and workloads from small factories."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from trainatomy.operators.allocation import allocation_rules
from trainatomy.operators.allocation.plan import Processor
from trainatomy.simulator.process import SimulatedProcess
from trainatomy.workload import Workload

H200 = Processor((9, 0), 132, (2, 11))


@pytest.fixture
def closed() -> SimulatedProcess:
    """Make a simulated process that is not entered yet."""
    return SimulatedProcess("NVIDIA H200", 150 << 30, H200, allocation_rules())


@pytest.fixture
def process(closed: SimulatedProcess) -> Iterator[SimulatedProcess]:
    """Open a simulated process while the test runs."""
    with closed.open():
        yield closed


@pytest.fixture
def from_factory(tmp_path: Path) -> Callable[..., Workload]:
    """Make workloads from the text of a Python file with the functions ``model`` and ``batch``."""

    def make(text: str, **sections: Any) -> Workload:
        file = tmp_path / "mine.py"
        file.write_text("import torch\nfrom torch import nn\n" + text)
        described = {"loop": "pytorch", "model": {"factory": f"{file}:model"}, "data": {"factory": f"{file}:batch"}}
        return Workload.from_mapping({**described, "steps": 2, **sections})

    return make
