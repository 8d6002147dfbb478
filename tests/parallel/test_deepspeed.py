"""One rank of DeepSpeed's engine under the Hugging Face Trainer."""

from __future__ import annotations

import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from executed import simulated
from spread import CONFIG, HIDDEN, LAYERS, collectives, labelled, workload

import trainatomy
from trainatomy.analysis.outside_allocator import nccl_bytes
from trainatomy.errors import MissingLibrary, WorkloadError
from trainatomy.prediction.assemble import keep_executed
from trainatomy.results.host import KeptOnHost
from trainatomy.search.axes import axes_of
from trainatomy.simulator.simulate import simulate, topology_of
from trainatomy.simulator.simulation import Simulation
from trainatomy.workload.schema import Workload

RANKS = 4
AUTO = {
    "bf16": {"enabled": "auto"},
    "gradient_clipping": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
}
HOST = {"device": "cpu"}
DRIVE = {"device": "nvme", "nvme_path": "/nonexistent/drive"}


def described(stage: int, gpus: int = RANKS, train: dict[str, Any] | None = None, **zero: Any) -> Workload:
    config = {**AUTO, "zero_optimization": {"stage": stage, "reduce_bucket_size": 100_000, **zero}}
    settings = {"bf16": True, "deepspeed": config, **(train or {})}
    return workload("trainer", settings, gpus=gpus).replace("steps", 2)


@pytest.fixture(scope="module")
def ranks() -> dict[int, Simulation]:
    pytest.importorskip("deepspeed")
    return {stage: simulated(described(stage, stage3_param_persistence_threshold=0)) for stage in (0, 1, 2, 3)}


def padded(parameters: int) -> int:
    """Elements of the flat buffers of two groups (with and without weight decay), as they are aligned for NCCL."""
    decaying = parameters - (2 * LAYERS + 1) * HIDDEN  # two norms a layer and the last one
    return sum(-(-size // (2 * RANKS)) * 2 * RANKS for size in (decaying, parameters - decaying))


@pytest.mark.parametrize("stage", [1, 2])
def test_states_are_sharded_to_the_byte(ranks: dict[int, Simulation], stage: int) -> None:
    found = ranks[stage]
    share = padded(found.parameters) // RANKS
    assert labelled(found.trace, "weight") == 2 * padded(found.parameters)
    assert labelled(found.trace, "master_weight") == 4 * share
    assert labelled(found.trace, "optimizer_state") == 8 * share + 2 * 4  # each group counts its steps


def test_stage_0_holds_everything(ranks: dict[int, Simulation]) -> None:
    found = ranks[0]
    assert labelled(found.trace, "weight") == 2 * found.parameters
    assert labelled(found.trace, "master_weight") == 4 * found.parameters
    tensors = LAYERS * 9 + 3
    assert labelled(found.trace, "optimizer_state") == 8 * found.parameters + 4 * tensors  # each counts its steps
    assert labelled(found.trace, "gradient") == 2 * found.parameters


def test_stage_3_shards_weights_gradients_and_states(ranks: dict[int, Simulation]) -> None:
    found = ranks[3]
    share = found.parameters // RANKS  # every parameter of this model can be divided
    assert labelled(found.trace, "weight") == 2 * share
    assert labelled(found.trace, "master_weight") == 4 * share
    assert labelled(found.trace, "gradient") == 2 * share
    assert labelled(found.trace, "gathered_weight") == 0  # nothing is kept between steps


def test_gradients_are_partitioned_between_micro_batches_from_stage_2_on() -> None:
    pytest.importorskip("deepspeed")
    accumulates = {"gradient_accumulation_steps": 2}
    first, second = (simulated(described(stage, train=accumulates)) for stage in (1, 2))
    held = [labelled(one.trace, "gradient") for one in (first, second)]
    assert held[0] >= 2 * first.parameters
    assert held[1] < first.parameters  # parameters at the edges of a partition are held whole


def test_collectives_move_what_the_stages_need(ranks: dict[int, Simulation]) -> None:
    moved = {stage: Counter[str]() for stage in ranks}
    for stage, found in ranks.items():
        for name, size in collectives(found):
            moved[stage][name.removeprefix("nccl::")] += size
    whole = 2 * ranks[1].parameters
    assert moved[0]["all_reduce"] == pytest.approx(whole, rel=0.01)
    assert moved[1]["all_gather"] == moved[2]["all_gather"] == pytest.approx(whole, rel=0.01)
    assert moved[2]["all_reduce"] == pytest.approx(whole, rel=0.01)  # to all ranks, by use_multi_rank_bucket_allreduce
    assert moved[3]["reduce_scatter"] == pytest.approx(whole, rel=0.01)
    assert moved[3]["all_gather"] >= whole * 0.99


@pytest.mark.parametrize(("stage", "options"), [(1, {}), (2, {}), (3, {"offload_param": HOST})])
@pytest.mark.parametrize("gpus", [1, RANKS])
def test_offloaded_states_take_no_gpu_memory(stage: int, options: dict[str, Any], gpus: int) -> None:
    pytest.importorskip("deepspeed")
    found = simulated(described(stage, gpus, offload_optimizer=HOST, **options))
    assert labelled(found.trace, "optimizer_state") == labelled(found.trace, "master_weight") == 0
    assert (labelled(found.trace, "weight") == 0) == (stage == 3)
    updates = [call for call in found.operations.calls if call.name == "deepspeed::adam_update"]
    assert updates
    assert all(array.on_host for call in updates for array in call.inputs)
    assert bool(collectives(found)) == (gpus > 1)


def kept_on_host(found: Simulation) -> KeptOnHost:
    assert found.host is not None
    return found.host.kept["training"]


@pytest.mark.parametrize("stage", [1, 3])
def test_offloaded_states_are_kept_on_the_host(stage: int) -> None:
    """Three values in fp32 for each parameter of the rank, in DeepSpeed's own tensors."""
    pytest.importorskip("deepspeed")
    config = {**AUTO, "zero_optimization": {"stage": stage, "offload_optimizer": HOST}}
    found = trainatomy.predict(workload("trainer", {"bf16": True, "deepspeed": config}, gpus=RANKS), timed=False)
    assert found.host_bill is not None
    phase = next(phase for phase in found.host_bill.phases if phase.name == "training")
    kept = [part for part in phase.processes[0].parts if part.component == "offloaded"]
    assert phase.processes[0].count == RANKS
    assert sum(part.bytes for part in kept) >= 3 * 4 * found.bytes_per_parameter.parameters / RANKS


def test_a_drive_keeps_states_and_the_host_their_buffers() -> None:
    pytest.importorskip("deepspeed")
    large = {"model.config.hidden_size": 512, "model.config.intermediate_size": 2048}  # swappers leave small tensors
    buffers = (4, 6)
    found = [_with_host(described(3, offload_optimizer={**DRIVE, "buffer_count": count}), large) for count in buffers]
    share = found[0].parameters / RANKS
    for each in found:
        assert each.host is not None
        assert each.host.on_drive >= 3 * 4 * 0.9 * share
        assert labelled(each.trace, "optimizer_state") == 0
        assert any(call.name == "deepspeed::aio" for call in each.operations.calls)
    more = kept_on_host(found[1]).anonymous - kept_on_host(found[0]).anonymous
    assert more == pytest.approx((buffers[1] - buffers[0]) * 4 * share, rel=0.1)
    assert not Path(DRIVE["nvme_path"]).exists()


def _with_host(training: Workload, changes: dict[str, Any]) -> Simulation:
    for key, value in changes.items():
        training = training.replace(key, value)
    with keep_executed() as executed:
        trainatomy.predict(training, timed=True)
    return executed[-1].simulation


def test_buckets_have_the_size_that_is_configured() -> None:
    pytest.importorskip("deepspeed")
    small, large = (
        simulated(described(3, reduce_bucket_size=size, stage3_param_persistence_threshold=0))
        for size in (10**5, 10**6)
    )
    buffers = [labelled(found.trace, "communication_buffer") for found in (small, large)]
    assert buffers[1] - buffers[0] == 2 * (10**6 - 10**5)


def test_small_parameters_persist_on_every_gpu() -> None:
    pytest.importorskip("deepspeed")
    """DeepSpeed takes the name of the option with and without its prefix."""
    for name in ("stage3_param_persistence_threshold", "param_persistence_threshold"):
        found = simulated(described(3, **{name: HIDDEN}))
        assert labelled(found.trace, "gathered_weight") == 2 * (2 * LAYERS + 1) * HIDDEN


def test_modules_and_gradients_that_the_engine_handles_are_counted(ranks: dict[int, Simulation]) -> None:
    of = {stage: found.operations for stage, found in ranks.items()}
    gradients = sum(of[3].engine_gradients.values())
    assert gradients == sum(of[2].engine_gradients.values()) > 0
    assert set(of[3].engine_modules) == {"forward", "backward"}
    assert not of[2].engine_modules


def test_deepspeeds_own_adam_is_one_kernel_a_group() -> None:
    pytest.importorskip("deepspeed")
    own = described(1).replace({"train.deepspeed.optimizer": {"type": "AdamW", "params": {"lr": "auto"}}})
    found = simulated(own)
    kernels = [one for one in found.operations.operations if found.operations.calls[one.call].name.endswith("_adam")]
    assert len(kernels) == 1  # transformers makes no groups for an optimizer of the configuration
    assert labelled(found.trace, "optimizer_state") == labelled(found.trace, "master_weight") * 2


def test_adapters_are_trained_and_the_base_is_sharded() -> None:
    pytest.importorskip("deepspeed")
    pytest.importorskip("peft")
    adapted = described(3, stage3_param_persistence_threshold=0).replace({"model.lora": {"r": 8}})
    found = simulated(adapted)
    assert found.trainable_parameters < found.parameters / 10
    assert labelled(found.trace, "master_weight") == found.trainable_parameters
    assert labelled(found.trace, "weight") == pytest.approx(2 * found.parameters / RANKS, rel=0.01)


@pytest.mark.parametrize("options", [{"fp16": True, "bf16": False}, {"gradient_checkpointing": True}])
def test_the_step_is_taken(options: dict[str, Any]) -> None:
    pytest.importorskip("deepspeed")
    found = simulated(described(2, train=options))
    assert labelled(found.trace, "optimizer_state") > found.parameters


def test_the_last_rank_holds_padding_and_no_more(ranks: dict[int, Simulation]) -> None:
    training = described(2)
    last = simulate(training, training.resolve_gpu(), topology=topology_of(training, RANKS - 1))
    for label in ("weight", "master_weight", "optimizer_state"):
        assert labelled(last.trace, label) == labelled(ranks[2].trace, label)


def test_deepspeed_has_a_communicator_beside_that_of_all_processes(ranks: dict[int, Simulation]) -> None:
    everybody = tuple(range(RANKS))
    assert ranks[2].communicator_copies == {everybody: 2}
    links = described(2).parallel.links(described(2).resolve_gpu())
    one, two = (nccl_bytes(ranks[2].communicators, 0, links, RANKS, {everybody: count}) for count in (1, 2))
    assert nccl_bytes({}, 0, links, RANKS) < one < two < 2 * one


def test_a_configuration_that_deepspeed_refuses_is_named() -> None:
    pytest.importorskip("deepspeed")
    wrong = described(2).replace("train.deepspeed.zero_optimization.reduce_bucket_size", -1)
    with pytest.raises(WorkloadError, match=r"(?s)train.deepspeed: DeepSpeed refuses: .*reduce_bucket_size"):
        simulated(wrong)


def test_a_simulation_leaves_nothing_behind(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("deepspeed")
    simulated(described(3))  # imports everything
    from deepspeed.accelerator import real_accelerator
    from deepspeed.comm import comm
    from transformers.integrations import deepspeed as integration

    monkeypatch.chdir(tmp_path)
    watched = (real_accelerator.ds_accelerator, comm.cdb, torch.nn.functional.linear)
    environment = dict(os.environ)
    simulated(described(3))
    assert watched == (real_accelerator.ds_accelerator, comm.cdb, torch.nn.functional.linear)
    assert os.environ == environment
    assert not integration.is_deepspeed_zero3_enabled()
    assert not torch.distributed.is_initialized()
    assert not list(tmp_path.iterdir())


def test_the_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    with pytest.raises(MissingLibrary, match=r'pip install "trainatomy\[deepspeed\]"'):
        simulated(described(1))


def test_values_that_differ_from_the_trainers_are_named() -> None:
    pytest.importorskip("deepspeed")
    differing = described(1).replace("train.deepspeed.train_micro_batch_size_per_gpu", 7)
    with pytest.raises(WorkloadError, match="train_micro_batch_size_per_gpu=7 vs hf per_device_train_batch_size=2"):
        simulated(differing)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"zero_optimization": {"stage": 4}}, "zero_optimization.stage: must be 0, 1, 2 or 3, found 4"),
        ({"zero_optimization": {"stage": 2, "reduce_bucket": 1}}, "reduce_bucket: unknown key; did you mean reduce_"),
        ({"zero_optimization": {"stage": 3, "zero_quantized_weights": True}}, r"belongs to ZeRO\+\+"),
        ({"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}}, "nvme_path: is missing"),
        ({"zero_optimization": {"stage": 2, "offload_optimizer": DRIVE}}, "needs stage 3, found stage 2"),
        ({"zero_optimization": {"stage": 3}, "aio": {"use_gds": True}}, "use_gds: GPUDirect Storage is not simulated"),
        ({"zero_optimization": {"stage": 2, "offload_param": HOST}}, "needs stage 3, found stage 2"),
        ({"zero_optimization": {"stage": 0, "offload_optimizer": HOST}}, "needs stage 1, 2 or 3, found stage 0"),
        ({"zero_optimization": {"stage": 1}, "optimizer": {"type": "OneBitAdam"}}, "'OneBitAdam' of DeepSpeed is not"),
        ({"zero_optimization": {"stage": 1}, "tensor_parallel": {"autotp_size": 2}}, "DeepSpeed's tensor parallelism"),
        ({"zero_optimization": {"stage": 1}, "flops_profiler": {"enabled": True}}, "flops_profiler: is not simulated"),
        ({"bf16": {"enabled": True}}, "zero_optimization: must be a mapping with a stage"),
        ({"zero_optimization": {"stage": 1}, "gradient_cliping": 1}, "gradient_cliping: unknown key; did you mean"),
    ],
)
def test_what_is_not_simulated_is_named(config: dict[str, Any], message: str) -> None:
    with pytest.raises(WorkloadError, match=message):
        workload("trainer", {"deepspeed": config}, gpus=2)


def test_other_strategies_are_refused_beside_it() -> None:
    config = {"zero_optimization": {"stage": 2}}
    with pytest.raises(WorkloadError, match="cannot be combined with deepspeed"):
        workload("trainer", {"deepspeed": config, "fsdp": True}, gpus=2)
    with pytest.raises(WorkloadError, match="dp_shard_size: belongs to FSDP, but the strategy is deepspeed"):
        workload("trainer", {"deepspeed": config}, gpus=2, dp_shard_size=2)
    with pytest.raises(WorkloadError, match="use `loop: trainer`"):
        workload("pytorch", {"deepspeed": config}, gpus=2)


def test_a_search_varies_what_its_configuration_leaves_open() -> None:
    names = {axis.name for axis in axes_of(described(2), 8)}
    assert {"batch", "gradient_checkpointing"} <= names and not {"plan", "optimizer", "precision"} & names


def test_the_model_of_the_tests_divides_evenly() -> None:
    assert all(size % RANKS == 0 for size in CONFIG.values() if size > RANKS)
