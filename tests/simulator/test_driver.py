"""Replaced functions of ``torch.cuda`` during a simulation, and their restoration."""

from __future__ import annotations

import contextlib
import inspect
import sys
import types
from typing import Any

import pytest
import torch
from torch.utils import _foreach_utils, checkpoint

from trainatomy.simulator.process import SimulatedProcess

CHECKS = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")


def state() -> dict[str, Any]:
    """Return everything that a simulated process may replace, by name."""
    found: dict[str, Any] = {}
    for name, module in list(sys.modules.items()):
        if (name == "torch" or name.startswith("torch.")) and isinstance(module, types.ModuleType):
            found |= {f"{name}.{check}": vars(module)[check] for check in CHECKS if check in vars(module)}
    for module in (torch.cuda, torch.accelerator, _foreach_utils):
        found |= {f"{module.__name__}.{name}": value for name, value in vars(module).items()}
    found["clear_autocast_cache"] = torch.clear_autocast_cache
    found["version"] = torch.version.cuda
    found["checkpoint"] = dict(checkpoint._allowed_determinism_checks_to_fns)
    found["accelerator"] = getattr(torch._C, "_get_accelerator", None)
    return found


def differing(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    return [name for name in before.keys() | after.keys() if before.get(name) is not after.get(name)]


@pytest.mark.parametrize("fails", [False, True])
def test_everything_is_put_back(closed: SimulatedProcess, fails: bool) -> None:
    before, available = state(), torch.cuda.is_available()
    hooks = len(torch.nn.modules.module._global_forward_hooks)
    try:
        with closed.open():
            assert torch.cuda.is_available()
            changed = {name.rpartition(".")[2] for name in differing(before, state())}
            assert changed >= {*CHECKS, "is_available", "empty_cache", "clear_autocast_cache"}
            torch.ones(3).to("cuda")
            if fails:
                raise KeyError
    except KeyError:
        assert fails
    left = [name for name in differing(before, state()) if name != "checkpoint"]
    assert left == []
    assert state()["checkpoint"] == before["checkpoint"]
    assert torch.cuda.is_available() is available
    assert len(torch.nn.modules.module._global_forward_hooks) == hooks
    assert torch.overrides._get_current_function_mode() is None


def test_the_gpu_is_the_requested_one(process: SimulatedProcess) -> None:
    assert torch.cuda.get_device_name() == "NVIDIA H200"
    assert torch.cuda.get_device_capability() == (9, 0)
    properties = torch.cuda.get_device_properties(0)
    assert (properties.total_memory, properties.multi_processor_count, properties.major) == (150 << 30, 132, 9)
    assert torch.cuda.is_bf16_supported()
    assert torch.cuda.device_count() == 1
    assert torch.accelerator.current_accelerator() == torch.device("cuda")
    assert torch.distributed.is_nccl_available() and torch.cuda.nccl.version() > (2, 10)  # of a build for the CPU, too


def test_libraries_may_use_streams_and_events(process: SimulatedProcess) -> None:
    with torch.cuda.stream(torch.cuda.Stream()):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        end.record()
    torch.cuda.synchronize()
    torch.cuda.current_stream().wait_stream(torch.cuda.Stream())
    assert (begin.query(), begin.elapsed_time(end)) == (True, 0.0)


def test_a_process_can_be_opened_again(closed: SimulatedProcess) -> None:
    for _ in range(2):
        with closed.open():
            torch.ones(256).to("cuda")
    assert [event.bytes for event in closed.trace.events if event.action == "alloc"] == [1024, 1024]


def _signatures(module: types.ModuleType) -> dict[str, str]:
    """Return the signatures of a module's own functions."""
    found = {}
    for name, value in vars(module).items():
        if inspect.isfunction(value) and not name.startswith("_"):
            with contextlib.suppress(TypeError, ValueError):
                found[name] = str(inspect.signature(value))
    return found


def test_functions_keep_their_signatures(closed: SimulatedProcess) -> None:
    before = [_signatures(module) for module in (torch.cuda, torch.accelerator)]
    with closed.open():
        after = [_signatures(module) for module in (torch.cuda, torch.accelerator)]
        torch.cuda.set_device(device=0)
        torch.cuda.set_stream(stream=torch.cuda.current_stream(device=0))
        assert torch.cuda.get_device_properties(device="cuda:0").multi_processor_count
        assert torch.cuda.memory_allocated(device=0) == torch.cuda.memory_stats(device=0)["allocated_bytes.all.current"]
        with torch.cuda.stream(stream=torch.cuda.Stream(device=0, priority=0)):
            pass
    for old, new in zip(before, after, strict=True):
        assert {name: new.get(name) for name in old} == old
