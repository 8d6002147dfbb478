"""DTensor's sharding propagation in a simulation: what it decides, and how often it searches the arguments."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

import pytest
from spread import workload
from torch.distributed.tensor import _sharding_prop
from torch.distributed.tensor._op_schema import OpSchema
from torch.distributed.tensor.placement_types import Replicate, Shard, _StridedShard

from trainatomy.simulator.parallel import sharding
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
