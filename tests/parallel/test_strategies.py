"""One rank of trainings on several GPUs, by PyTorch's own strategies."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from executed import simulated
from spread import HIDDEN, INNER, LAYERS, VOCABULARY, collectives, labelled, weight_bytes, workload

from trainatomy.allocator.settings import AllocatorSettings
from trainatomy.analysis.memory import analyze_memory
from trainatomy.errors import SimulationError, WorkloadError
from trainatomy.workload.schema import Workload


def test_ddp_reduces_each_gradient_once_and_holds_buckets_of_their_size() -> None:
    found = simulated(workload(gpus=4))
    reduced = sum(size for name, size in collectives(found) if name == "nccl::all_reduce")
    assert reduced == weight_bytes(found)
    assert labelled(found.trace, "communication_buffer") == pytest.approx(weight_bytes(found), rel=0.02)


def test_gradients_as_views_take_the_memory_of_the_buckets() -> None:
    found = simulated(workload(gpus=4, gradient_as_bucket_view=True))
    both = labelled(found.trace, "gradient") + labelled(found.trace, "communication_buffer")
    assert both == pytest.approx(weight_bytes(found), rel=0.02)


def test_fsdp2_holds_a_share_and_gathers_each_layer_twice() -> None:
    found = simulated(workload(gpus=4, strategy="fsdp2"))
    assert labelled(found.trace, "weight") == pytest.approx(weight_bytes(found) / 4, rel=0.01)
    assert labelled(found.trace, "optimizer_state") == pytest.approx(2 * weight_bytes(found) / 4, rel=0.01)
    gathers = [size for name, size in collectives(found) if name == "nccl::all_gather"]
    assert len(gathers) == 2 * LAYERS + 1  # the root stays gathered
    scattered = sum(size for name, size in collectives(found) if name == "nccl::reduce_scatter")
    assert scattered == weight_bytes(found)


@pytest.mark.parametrize("strategy", ["fsdp2", "fsdp1"])
def test_fsdp_wraps_the_classes_that_are_named(strategy: str) -> None:
    found = simulated(workload(gpus=2, strategy=strategy, transformer_layer_cls_to_wrap=["LlamaMLP"]))
    gathers = [size for name, size in collectives(found) if name == "nccl::all_gather"]
    mlp = 3 * HIDDEN * INNER * 4
    assert gathers.count(mlp) == 2 * LAYERS


def test_a_class_that_the_model_does_not_have_is_refused() -> None:
    described = workload(gpus=2, strategy="fsdp2", transformer_layer_cls_to_wrap=["BertLayer"])
    with pytest.raises(WorkloadError, match="no BertLayer; its layers are LlamaDecoderLayer"):
        simulated(described)


def test_fsdp2_without_resharding_gathers_once() -> None:
    found = simulated(workload(gpus=4, strategy="fsdp2", reshard_after_forward=False))
    assert len([name for name, _ in collectives(found) if name == "nccl::all_gather"]) == LAYERS + 1


def test_hybrid_sharding_reduces_over_the_copies_too() -> None:
    found = simulated(workload(gpus=4, nodes=2, strategy="fsdp2", dp_replicate_size=2))
    groups = {
        (call.name, dict(call.numbers)["ranks"], dict(call.numbers)["nodes"])
        for call in found.operations.calls
        if call.name.startswith("nccl::")
    }
    assert ("nccl::reduce_scatter", "4", "1") in groups
    assert ("nccl::all_reduce", "2", "2") in groups
    assert labelled(found.trace, "weight") == pytest.approx(weight_bytes(found) / 4, rel=0.01)


def test_mixed_precision_gathers_half_the_bytes() -> None:
    whole = simulated(workload(gpus=4, strategy="fsdp2"))
    half = simulated(workload(gpus=4, strategy="fsdp2", mp_policy={"param_dtype": "bfloat16"}))
    of = [sum(size for name, size in collectives(one) if name == "nccl::all_gather") for one in (whole, half)]
    assert of[1] * 2 == of[0]


def test_fsdp1_holds_a_share() -> None:
    found = simulated(workload(gpus=4, strategy="fsdp1"))
    assert labelled(found.trace, "weight") == pytest.approx(weight_bytes(found) / 4, rel=0.1)
    assert found.trace.stream_uses


def test_fsdp1_without_resharding_gathers_once() -> None:
    of = [simulated(workload(gpus=4, strategy="fsdp1", reshard_after_forward=keeps)) for keeps in (False, None)]
    counts = [len([name for name, _ in collectives(one) if name == "nccl::all_gather"]) for one in of]
    assert counts == [LAYERS + 1, 2 * LAYERS + 1]


def test_zero1_shards_only_the_states() -> None:
    found = simulated(workload(gpus=4, strategy="zero1"))
    assert labelled(found.trace, "weight") >= weight_bytes(found)
    assert 0 < labelled(found.trace, "optimizer_state") < 0.6 * 2 * weight_bytes(found)


def test_zero1_shards_an_optimizer_by_its_class() -> None:
    found = simulated(workload(gpus=4, strategy="zero1", train={"optim": "torch.optim.SGD"}))
    assert labelled(found.trace, "optimizer_state") == 0  # SGD without momentum


def test_zero1_refuses_a_function_that_makes_optimizers(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text("import torch\ndef make(model): return torch.optim.SGD(model.parameters(), lr=1)\n")
    with pytest.raises(WorkloadError, match="ZeroRedundancyOptimizer makes them of a class"):
        simulated(workload(gpus=4, strategy="zero1", train={"optim": f"{path}:make"}))


def test_tensor_parallelism_shards_every_linear_layer() -> None:
    found = simulated(workload(gpus=4, tp_size=4))
    # Norms are whole, and DTensor computes the whole gradient of an embedding whose rows are sharded.
    whole = (2 * LAYERS + 1) * HIDDEN * 4 + VOCABULARY * HIDDEN * 4
    assert labelled(found.trace, "gradient") == pytest.approx((weight_bytes(found) - whole) / 4 + whole, rel=0.01)


def test_offloaded_weights_and_states_are_not_on_the_gpu() -> None:
    found = simulated(workload(gpus=4, strategy="fsdp2", offload_policy="cpu"))
    assert labelled(found.trace, "weight") == labelled(found.trace, "optimizer_state") == 0


def test_accumulation_communicates_in_the_last_micro_batch_only() -> None:
    train = {"gradient_accumulation_steps": 3}
    once = collectives(simulated(workload(train=train, gpus=4)))
    always = collectives(simulated(workload(train=train, gpus=4, sync_each_batch=True)))
    assert len([one for one in always if one[0] == "nccl::all_reduce"]) == 3 * len(
        [one for one in once if one[0] == "nccl::all_reduce"]
    )


def test_a_world_of_1024_ranks_is_one_process() -> None:
    found = simulated(workload(gpus=8, nodes=128, strategy="fsdp2"))
    assert labelled(found.trace, "weight") < weight_bytes(found) / 100


def test_nothing_is_left_behind() -> None:
    before = sys.excepthook, torch.UntypedStorage.resize_, dict(os.environ)
    simulated(workload(gpus=4, strategy="fsdp2"))
    assert not dist.is_initialized()
    assert (sys.excepthook, torch.UntypedStorage.resize_, dict(os.environ)) == before


@pytest.mark.parametrize(
    ("parallel", "key", "message"),
    [
        ({"gpus": 8, "tp_size": 3}, "parallel.tp_size", "tp_size 3 = 3 does not divide 8"),
        ({"gpus": 4, "dp_shard_size": 2, "dp_replicate_size": 4, "strategy": "fsdp2"}, "parallel.dp", "is not 4"),
        ({"gpus": 4, "cp_size": 2}, "parallel.cp_size", "needs strategy: fsdp2"),
        ({"gpus": 4, "reshard_after_forward": False}, "parallel.reshard_after_forward", "belongs to strategy fsdp1"),
        ({"gpus": 4, "tp_size": 2}, "parallel.tp_size", "cannot be combined with ddp"),
        ({"gpus": 4, "strategy": "fsdp1", "gradient_as_bucket_view": True}, "parallel.gradient", "belongs to strategy"),
        ({"gpus": 4, "strategy": "fsdp1", "dp_shard_size": 2}, "parallel.strategy", "fsdp1 shards over all GPUs"),
        (
            {"gpus": 4, "strategy": "fsdp1", "reshard_after_forward": 2},
            "parallel.reshard_after",
            "fsdp2 takes a number",
        ),
        ({"gpus": 4, "strategy": "ddp", "dp_replicate_size": 2}, "parallel.dp_replicate_size", "is 4 with ddp"),
        ({"gpus": 4, "dp_shard_size": 2}, "parallel.dp_shard_size", "belongs to FSDP, but the strategy is ddp"),
        ({"strategy": "fsdp2", "offload_policy": "cpu"}, "parallel.offload_policy", "needs several GPUs"),
        ({"strategy": "fsdp2", "mp_policy": {"param_dtype": "bfloat16"}}, "parallel.mp_policy", "needs several GPUs"),
    ],
)
def test_what_cannot_be_is_refused_by_its_key(parallel: dict[str, Any], key: str, message: str) -> None:
    with pytest.raises(WorkloadError, match=message) as raised:
        workload(**parallel)
    assert key in str(raised.value)


@pytest.mark.parametrize(
    ("train", "parallel", "message"),
    [
        ({"fp16": True}, {"tp_size": 2}, "train.fp16: needs a gradient scaler for sharded and whole weights"),
        ({"gradient_accumulation_steps": 2}, {"static_graph": True}, "or set parallel.sync_each_batch"),
    ],
)
def test_what_pytorch_cannot_train_is_refused(train: dict[str, Any], parallel: dict[str, Any], message: str) -> None:
    with pytest.raises(WorkloadError, match=message):
        workload(train=train, gpus=2, **parallel)


def test_a_model_without_a_list_of_layers_is_one_unit_of_fsdp(tmp_path: Path) -> None:
    found = simulated(own_model(tmp_path, "self.one, self.weight = nn.Linear(64, 512), nn.Parameter(torch.ones(512))"))
    gathers = [size for name, size in collectives(found) if name == "nccl::all_gather"]
    assert gathers == [(64 * 512 + 2 * 512) * 4]


@pytest.mark.parametrize("strategy", ["fsdp2", "fsdp1"])
def test_weights_that_a_constructor_makes_with_data_are_sharded(tmp_path: Path, strategy: str) -> None:
    plain, legacy = (
        simulated(own_model(tmp_path, f"self.one, self.weight = nn.Linear(64, 512), nn.Parameter({made})", strategy))
        for made in ("torch.ones(512)", "torch.Tensor(512).fill_(1)")
    )
    assert legacy.trace.events == plain.trace.events


def own_model(folder: Path, made: str, strategy: str = "fsdp2") -> Workload:
    """Return a training of a module whose constructor runs ``made``."""
    (folder / "own.py").write_text(
        "import torch\nfrom torch import nn\n\n\nclass Own(nn.Module):\n    def __init__(self):\n"
        f"        super().__init__()\n        {made}\n\n"
        "    def forward(self, x):\n        return (self.one(x) * self.weight).square().mean()\n\n\n"
        "def batch(size):\n    return {'x': torch.ones(size, 64)}\n"
    )
    return Workload.from_mapping(
        {
            "loop": "pytorch",
            "model": {"factory": f"{folder}/own.py:Own"},
            "data": {"factory": f"{folder}/own.py:batch"},
            "gpu": "h200",
            "parallel": {"gpus": 2, "strategy": strategy},
        }
    )


def test_weights_shared_by_groups_of_fsdp2_are_refused_since_2_13() -> None:
    described = model_of("google-t5/t5-small", {"gpus": 2}, {"num_layers": 2, "num_decoder_layers": 2}, "trainer")
    assert simulated(described.replace("software.torch", "2.11")).parameters
    with pytest.raises(SimulationError, match="already managed by another FSDP group"):
        simulated(described.replace("software.torch", "2.13"))


def test_heads_that_cannot_be_divided_are_named() -> None:
    with pytest.raises(WorkloadError, match="8 attention heads, which 16 ranks cannot share"):
        simulated(workload(gpus=16, tp_size=16))


def test_a_model_with_position_embeddings_is_described_as_it_was_before_it_was_sharded() -> None:
    gpt2 = Workload.from_mapping(
        {
            "loop": "pytorch",
            "model": {"class": "GPT2LMHeadModel", "config": {"n_layer": 2, "n_embd": 64, "n_head": 2}},
            "data": {"sequence_length": 64},
            "gpu": "h200",
            "parallel": {"gpus": 2, "strategy": "fsdp1"},
        }
    )
    assert simulated(gpt2).tokens_per_sample == 64


def model_of(name: str, parallel: dict[str, Any], config: dict[str, Any], loop: str = "pytorch") -> Workload:
    train = {"fsdp": True, "bf16": True} if loop == "trainer" else {}
    mapping = {"loop": loop, "gpu": "h200", "model": {"id": name, "config": config}, "parallel": parallel}
    return Workload.from_mapping({**mapping, "data": {"sequence_length": 64}, "train": train})


def test_embeddings_that_share_weights_with_the_output_layer_stay_in_the_root() -> None:
    found = simulated(model_of("FacebookAI/roberta-base", {"gpus": 2, "strategy": "fsdp2"}, {"num_hidden_layers": 2}))
    assert len([name for name, _ in collectives(found) if name == "nccl::all_gather"]) == 2 * 2 + 1


def test_gradients_of_norms_inside_a_sharded_attention_are_summed() -> None:
    found = simulated(model_of("Qwen/Qwen3-0.6B", {"gpus": 2, "tp_size": 2}, {"num_hidden_layers": 2}))
    small = [size for name, size in collectives(found) if name == "nccl::all_reduce" and size == 128 * 2]  # bfloat16
    # DTensor sums them where they are used: in clipping once, in AdamW once if it is fused, else three times.
    is_fused = any(call.name == "aten::_fused_adamw_" for call in found.operations.calls)
    assert len(small) == (1 + (1 if is_fused else 3)) * 2 * 2


def test_what_accelerate_cannot_shard_is_not_called_a_bug_of_the_simulation() -> None:
    described = model_of("FacebookAI/roberta-base", {"gpus": 2}, {"num_hidden_layers": 2}, "trainer")
    with pytest.raises(SimulationError, match="ends so, too"):
        simulated(described)


def test_ddp_may_hold_its_first_buckets_beside_the_second_ones() -> None:
    described = workload(gpus=2)
    found = simulated(described)
    memory = analyze_memory(found.trace, AllocatorSettings(), described.resolve_gpu().memory_bytes, 0).memory
    assert memory.range is not None
    low, high = memory.range.allocated_bytes
    assert low == memory.peak_allocated_bytes
    assert 0 < high - low <= 1.05 * weight_bytes(found)


def test_sharded_weights_are_released_at_once() -> None:
    described = workload(gpus=2, strategy="fsdp2")
    trace = simulated(described).trace
    assert analyze_memory(trace, AllocatorSettings(), described.resolve_gpu().memory_bytes, 0).memory.range is None
