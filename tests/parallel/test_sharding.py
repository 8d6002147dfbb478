"""DTensor's sharding propagation in a simulation: what it decides, and how often it searches the arguments."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from spread import workload
from torch.distributed.fsdp._fully_shard import _fsdp_common
from torch.distributed.tensor import _sharding_prop
from torch.distributed.tensor._op_schema import OpSchema
from torch.distributed.tensor.placement_types import Replicate, Shard, _StridedShard

from trainatomy.simulator.parallel import patches, sharding
from trainatomy.simulator.simulate import simulate

propagated = getattr(_sharding_prop, sharding._FLAG, None)


def test_arguments_of_a_list_are_searched_once(monkeypatch: pytest.MonkeyPatch) -> None:
    schemas: list[OpSchema] = []
    listed = OpSchema.args_spec.fget
    assert listed is not None
    monkeypatch.setattr(OpSchema, "args_spec", property(lambda schema: schemas.append(schema) or listed(schema)))
    described = workload(gpus=2, strategy="fsdp2")
    simulate(described, described.resolve_gpu())  # anew, whatever other tests have simulated
    lists = [schema for schema in schemas if schema.op._schema.name == "aten::_fused_adamw_"]
    assert lists
    assert max(Counter(map(id, lists)).values()) < 6  # once for each of its more than 20 parameters otherwise


@pytest.mark.skipif(propagated is None, reason="this torch has no flags of strided shards")
@pytest.mark.parametrize("flags", [(), (False,), (True, True), (True, False, True), (False, True)])
def test_strided_shards_are_flagged_as_pytorch_flags_them(flags: tuple[bool, ...]) -> None:
    def spec(flag: bool, placement: object) -> SimpleNamespace:
        return SimpleNamespace(placements=(placement,), use_strided_shard_as_shard_order=flag, shard_order="given")

    strided = _StridedShard(0, split_factor=2)
    arguments = [spec(True, Shard(0)), *(spec(flag, strided) for flag in flags), spec(False, Replicate())]
    flagged = []
    for propagate in (propagated, sharding._asking_once(propagated)):
        inputs = [spec(False, strided), spec(True, strided), spec(True, Shard(0))]
        strategy = SimpleNamespace(strategies=[SimpleNamespace(output_specs=None, input_specs=inputs)])
        for _ in range(2):
            propagate(strategy, SimpleNamespace(args_spec=arguments))
        flagged.append([vars(each) for each in inputs])
    assert flagged[0] == flagged[1]


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
