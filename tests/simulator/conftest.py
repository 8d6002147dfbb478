"""A world on an H200 in which single operations run, and predictions of small factories."""

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
    """A world that is not entered yet."""
    return SimulatedProcess("NVIDIA H200", 150 << 30, H200, allocation_rules())


@pytest.fixture
def world(closed: SimulatedProcess) -> Iterator[SimulatedProcess]:
    """A world that is open while the test runs."""
    with closed.open():
        yield closed


@pytest.fixture
def from_factory(tmp_path: Path) -> Callable[..., Workload]:
    """A workload whose model and batch the text of a Python file makes, by its ``model`` and its ``batch``."""

    def make(text: str, **sections: Any) -> Workload:
        file = tmp_path / "mine.py"
        file.write_text("import torch\nfrom torch import nn\n" + text)
        described = {"loop": "pytorch", "model": {"factory": f"{file}:model"}, "data": {"factory": f"{file}:batch"}}
        return Workload.from_mapping({**described, "steps": 2, **sections})

    return make
