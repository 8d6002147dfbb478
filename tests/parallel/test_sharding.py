"""DTensor's sharding propagation in a simulation: what it decides for lists, and how FSDP2 divides tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from spread import workload
from torch.distributed.fsdp._fully_shard import _fsdp_common
from torch.distributed.tensor._op_schema import OpSchema
from torch.distributed.tensor._sharding_prop import ShardingPropagator

from trainatomy.simulator.parallel import patches, sharding
from trainatomy.simulator.simulate import simulate


@pytest.mark.parametrize(
    "spread",
    [
        {"gpus": 2, "strategy": "fsdp2"},
        {"gpus": 4, "strategy": "fsdp2", "tp_size": 2},
        {"gpus": 4, "strategy": "fsdp2", "nodes": 2, "dp_replicate_size": 2},
    ],
)
@pytest.mark.parametrize("optim", ["adamw_torch_fused", "adamw_torch"])
def test_items_of_a_list_are_sharded_as_one_of_their_kind(
    monkeypatch: pytest.MonkeyPatch, spread: dict[str, Any], optim: str
) -> None:
    by_kind, seen = sharding._by_kind, list[tuple[int, int]]()

    def checked(propagate: Callable[..., Any]) -> Callable[..., Any]:
        def noting(self: ShardingPropagator, schema: OpSchema) -> Any:
            sizes.append(len(schema.args_spec))
            return propagate(self, schema)

        sizes = list[int]()
        faster = by_kind(noting)

        def compare(self: ShardingPropagator, schema: OpSchema) -> Any:
            expected = propagate(self, schema)
            sizes.clear()
            found = faster(self, schema)
            seen.append((min(sizes), len(schema.args_spec)))
            assert described(found.output_spec) == described(expected.output_spec)
            assert found.needs_redistribute == expected.needs_redistribute
            return expected

        return compare

    monkeypatch.setattr(sharding, "_by_kind", checked)
    training = workload(**spread).replace("train.optim", optim)
    simulate(training, training.resolve_gpu())  # anew, whatever other tests have simulated
    assert any(few < all_of_them for few, all_of_them in seen)


def described(spec: Any) -> Any:
    """Return what a spec says, or those of a list."""
    if isinstance(spec, (list, tuple)):
        return [described(each) for each in spec]
    return spec and (spec, spec.tensor_meta, spec.use_strided_shard_as_shard_order)


@pytest.mark.parametrize("num_chunks", [1, 2, 3, 7, 16])
@pytest.mark.parametrize(("shape", "dim"), [((10, 4), 0), ((4, 10), 1), ((1, 3), 0), ((16,), 0), ((0, 3), 0)])
def test_chunks_that_fsdp2_asks_for_are_those_that_pytorch_makes(
    shape: tuple[int, ...], dim: int, num_chunks: int
) -> None:
    tensor = torch.empty(shape, device="meta")
    chunks = patches._Chunks(tensor, num_chunks, dim)
    for rank, expected in enumerate(_fsdp_common._chunk_with_empty(tensor, num_chunks, dim)):
        sizes, own = (_fsdp_common._get_dim_chunked_size(each, tensor.size(), dim) for each in (expected, chunks[rank]))
        assert own == sizes
        if expected.numel():
            found = chunks[rank]
            assert (found.stride(), found.storage_offset()) == (expected.stride(), expected.storage_offset())
            assert found.untyped_storage()._cdata == tensor.untyped_storage()._cdata
