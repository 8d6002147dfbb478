"""Meta kernels are registered for a simulation and destroyed after it."""

from __future__ import annotations

import pytest
import torch

from trainatomy.operators.allocation import meta
from trainatomy.operators.allocation.plan import Processor
from trainatomy.simulator.process import SimulatedProcess


def dispatcher() -> dict[str, str]:
    """Return the dispatcher's kernels of each operator whose meta kernel a simulation replaces or adds."""
    names = [name.partition(".")[0] for name in meta._kernels()]
    return {name: torch._C._dispatch_dump(f"aten::{name}") for name in names}


def strides_of_a_convolution() -> tuple[int, ...]:
    images = torch.empty(2, 8, 6, 6, device="meta")
    weight = torch.empty(4, 8, 3, 3, device="meta").to(memory_format=torch.channels_last)
    return torch.conv2d(images, weight).stride()


def test_kernels_are_registered_inside_and_gone_afterwards() -> None:
    dump, registered, strides = dispatcher(), set(torch.library._impls), strides_of_a_convolution()
    with meta.meta_kernels():
        assert strides_of_a_convolution() == (64, 1, 16, 4) != strides
    assert strides_of_a_convolution() == strides == (64, 16, 4, 1)
    assert dispatcher() == dump
    assert torch.library._impls == registered


def test_kernels_are_gone_after_a_failure() -> None:
    dump = dispatcher()
    with pytest.raises(KeyboardInterrupt), meta.meta_kernels():
        raise KeyboardInterrupt
    assert dispatcher() == dump


def test_a_failed_registration_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    dump = dispatcher()
    kernels = {**meta._kernels(), "no_such_operator": lambda: None}
    monkeypatch.setattr(meta, "_kernels", lambda: kernels)
    with pytest.raises(RuntimeError, match="no_such_operator"), meta.meta_kernels():
        pass
    monkeypatch.undo()
    assert dispatcher() == dump


def test_contexts_nest() -> None:
    with meta.meta_kernels():
        with meta.meta_kernels():
            pass
        assert strides_of_a_convolution() == (64, 1, 16, 4)
    assert strides_of_a_convolution() == (64, 16, 4, 1)


@pytest.mark.parametrize("fails", [False, True])
def test_a_simulation_leaves_the_dispatcher_as_it_was(fails: bool) -> None:
    dump = dispatcher()
    simulated = SimulatedProcess("NVIDIA H200", 150 << 30, Processor((9, 0), 132, (2, 11)))
    try:
        with simulated.open():
            assert strides_of_a_convolution() == (64, 1, 16, 4)
            if fails:
                raise KeyError
    except KeyError:
        assert fails
    assert strides_of_a_convolution() == (64, 16, 4, 1)
    assert dispatcher() == dump
