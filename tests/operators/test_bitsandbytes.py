"""Optimizers of bitsandbytes step on meta tensors and create the same states as on a GPU."""

from __future__ import annotations

import contextlib
import sys

import pytest
import torch

from trainatomy.errors import MissingLibrary
from trainatomy.simulator.adapters.bitsandbytes import simulated_bitsandbytes

optim = pytest.importorskip("bitsandbytes.optim")


def parameter(*shape: int) -> torch.nn.Parameter:
    made = torch.nn.Parameter(torch.empty(shape, device="meta"))
    made.grad = torch.empty_like(made)
    return made


def bytes_of(state: dict[str, object], *names: str) -> int:
    tensors = [state[name] for name in names]
    assert all(isinstance(tensor, torch.Tensor) for tensor in tensors)
    return sum(tensor.nbytes for tensor in tensors if isinstance(tensor, torch.Tensor))


def test_states_are_8_bit_with_scales_for_blocks_of_256() -> None:
    large, small = parameter(100, 101), parameter(4095)
    with simulated_bitsandbytes() as paged:
        optimizer = optim.AdamW8bit([large, small])
        optimizer.step()
        optimizer.step()
    assert bytes_of(optimizer.state[large], "state1", "state2") == 2 * 10100
    assert bytes_of(optimizer.state[large], "absmax1", "absmax2") == 2 * 4 * 40
    assert bytes_of(optimizer.state[small], "state1", "state2") == 2 * 4 * 4095
    assert paged == []


def test_tables_are_shared() -> None:
    first, second = parameter(128, 64), parameter(128, 64)
    with simulated_bitsandbytes():
        optimizer = optim.Adam8bit([first, second])
        optimizer.step()
    assert optimizer.state[first]["qmap1"] is optimizer.state[second]["qmap1"]
    assert bytes_of(optimizer.state[first], "qmap1", "qmap2") == 2 * 1024


def test_paged_states_lie_outside_the_allocator() -> None:
    inside: list[bool] = []

    @contextlib.contextmanager
    def host():  # type: ignore[no-untyped-def]
        inside.append(True)
        yield

    large, small = parameter(400, 300), parameter(100, 100)
    with simulated_bitsandbytes(host) as paged:
        optimizer = optim.PagedAdamW8bit([large, small])
        optimizer.step()
        optimizer.step()
    assert [tensor.nbytes for tensor in paged] == [120000, 120000]
    assert len(inside) == 2
    assert not hasattr(optimizer.state[small]["state1"], "is_paged")


@pytest.mark.parametrize("name", ["Lion8bit", "RMSprop8bit", "AdEMAMix8bit", "LAMB", "PagedLion", "AdamW"])
def test_other_optimizers_step(name: str) -> None:
    with simulated_bitsandbytes():
        getattr(optim, name)([parameter(64, 64)], lr=1e-3).step()


def test_overrides_do_not_outlive_it() -> None:
    embedding = torch.nn.Embedding(100, 64, device="meta")
    embedding.weight.grad = torch.empty_like(embedding.weight)
    manager = optim.GlobalOptimManager.get_instance()
    before = len(manager.module_weight_config_triple)
    with simulated_bitsandbytes():
        manager.register_module_override(embedding, "weight", {"optim_bits": 32})
        optimizer = optim.AdamW8bit(embedding.parameters())
        optimizer.step()
    assert optimizer.state[embedding.weight]["state1"].dtype == torch.float32
    assert len(manager.module_weight_config_triple) == before


def test_missing_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes.functional", None)
    with pytest.raises(MissingLibrary, match="pip install bitsandbytes"), simulated_bitsandbytes():
        pass
