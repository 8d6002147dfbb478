"""A package with CUDA kernels of its own brings the adapter with which they run without a GPU."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from script_types import RunScript

from trainatomy.simulator.adapters.registry import ENTRY_POINTS, adapters
from trainatomy.simulator.simulate import simulate
from trainatomy.workload import Workload

LIBRARY = """
import torch

def scale(x):
    raise RuntimeError("no kernel for this device")

class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1024, 256))

    def forward(self, x, labels=None):
        return (scale(x @ self.weight).square().mean(),)
"""
ADAPTER = """
import contextlib
from unittest import mock

import torch
from trainatomy.operators.allocation.above_autograd import one_operation
from trainatomy.simulator.adapters.adapter import Adapter

class Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        with one_operation("kernels::scale", x) as results:
            scratch = torch.empty_like(x, dtype=torch.float64)
            results.append(torch.empty_like(x))
        return results[0]

    @staticmethod
    def backward(ctx, gradient):
        return gradient

@contextlib.contextmanager
def simulated(process, workload):
    import own_kernels
    with mock.patch.object(own_kernels, "scale", Scale.apply):
        yield

ADAPTER = Adapter(
    is_used=lambda workload, model: type(model).__module__ == "own_kernels",
    simulated=simulated,
    notes=lambda workload, model: ["own_kernels: the kernel's time is assumed"],
    modules=("own_kernels",),
)
"""
SCRIPT = """
import torch
from own_kernels import Block

model = Block().cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    model(torch.ones(512, 1024, device="cuda"))[0].backward()
    optimizer.step()
    optimizer.zero_grad()
"""
FACTORIES = """
import torch
from own_kernels import Block

def model():
    return Block()

def batch(samples):
    return {"x": torch.ones(samples, 1024)}
"""
NOTE = "own_kernels: the kernel's time is assumed"
SCRATCH_BYTES = 512 * 256 * 8


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder on the path with a library, its adapter and the entry point, as pip would install them."""
    folder = tmp_path / "installed"
    information = folder / "own_kernels-1.0.dist-info"
    information.mkdir(parents=True)
    information.joinpath("METADATA").write_text("Metadata-Version: 2.1\nName: own-kernels\nVersion: 1.0\n")
    information.joinpath("entry_points.txt").write_text(f"[{ENTRY_POINTS}]\nown = own_adapter:ADAPTER\n")
    folder.joinpath("own_kernels.py").write_text(LIBRARY)
    folder.joinpath("own_adapter.py").write_text(ADAPTER)
    monkeypatch.syspath_prepend(str(folder))
    adapters.cache_clear()
    yield folder
    adapters.cache_clear()
    for name in ("own_kernels", "own_adapter"):
        sys.modules.pop(name, None)


@pytest.mark.usefixtures("package")
def test_a_workload_runs_the_kernels_of_another_package(tmp_path: Path) -> None:
    factories = tmp_path / "factories.py"
    factories.write_text(FACTORIES)
    described = {
        "loop": "pytorch",
        "model": {"factory": f"{factories}:model"},
        "data": {"factory": f"{factories}:batch"},
        "train": {"per_device_train_batch_size": 512, "optim": "sgd"},
    }
    workload = Workload.from_mapping(described)
    simulation = simulate(workload, workload.resolve_gpu())
    assert SCRATCH_BYTES in [event.bytes for event in simulation.trace.events]
    assert NOTE in simulation.notes


@pytest.mark.usefixtures("package")
def test_a_script_runs_the_kernels_of_another_package(run_script: RunScript) -> None:
    outcome = run_script(SCRIPT)
    assert outcome.prediction is not None
    assert outcome.exit_code == 0


def test_without_the_adapter_the_kernel_fails(package: Path, run_script: RunScript) -> None:
    package.joinpath("own_kernels-1.0.dist-info", "entry_points.txt").unlink()
    assert "no kernel for this device" in run_script(SCRIPT).message
