"""One rank of the Hugging Face Trainer on several GPUs."""

from __future__ import annotations

from typing import Any

import pytest
from executed import simulated
from spread import CONFIG, HIDDEN, LAYERS, collectives, labelled, weight_bytes, workload

from trainatomy.errors import WorkloadError


def test_the_trainer_reduces_gradients_with_ddp() -> None:
    found = simulated(workload("trainer", gpus=4))
    reduced = sum(size for name, size in collectives(found) if name == "nccl::all_reduce")
    assert reduced == pytest.approx(weight_bytes(found), rel=0.001)
    assert labelled(found.trace, "communication_buffer") == pytest.approx(weight_bytes(found), rel=0.02)


@pytest.mark.parametrize(
    "config", [{"version": 2}, {"fsdp_version": 1}, {"version": 2, "reshard_after_forward": False}]
)
def test_the_trainer_shards_with_fsdp(config: dict[str, Any]) -> None:
    found = simulated(workload("trainer", {"fsdp": True, "bf16": True, "fsdp_config": config}, gpus=4))
    assert labelled(found.trace, "weight") == pytest.approx(weight_bytes(found) / 4, rel=0.01)
    assert labelled(found.trace, "optimizer_state") == pytest.approx(2 * weight_bytes(found) / 4, rel=0.01)


def test_fsdp_takes_an_optimizer_by_its_class() -> None:
    found = simulated(workload("trainer", {"fsdp": True, "optim": "torch.optim.NAdam"}, gpus=4))
    assert labelled(found.trace, "optimizer_state") == pytest.approx(2 * weight_bytes(found) / 4, rel=0.01)


@pytest.mark.parametrize("torch", ["2.11", "2.13"])
def test_adagrad_has_no_states_for_shards_before_2_13(torch: str) -> None:
    made = workload("trainer", {"fsdp": True, "optim": "adagrad"}, gpus=4).replace("software.torch", torch)
    if torch == "2.13":
        assert labelled(simulated(made).trace, "optimizer_state") > 0
    else:
        with pytest.raises(WorkloadError, match="KeyError: 'sum'"):
            simulated(made)


def test_accelerate_reads_fsdp1s_strategy_from_its_variable_only() -> None:
    passed_over, read = (
        simulated(workload("trainer", {"fsdp": True, "fsdp_config": {"version": 1, key: "NO_SHARD"}}, gpus=4))
        for key in ("reshard_after_forward", "sharding_strategy")
    )
    assert labelled(passed_over.trace, "weight") == pytest.approx(weight_bytes(passed_over) / 4, rel=0.01)
    assert any("does not read no_shard" in note for note in passed_over.notes)
    assert labelled(read.trace, "weight") == pytest.approx(weight_bytes(read), rel=0.01)
    assert not any("does not read" in note for note in read.notes)


def test_fsdp1_keeps_shards_in_host_memory() -> None:
    train = {"fsdp": True, "fsdp_config": {"version": 1, "cpu_offload": True}}
    found = simulated(workload("trainer", train, gpus=4))
    assert labelled(found.trace, "optimizer_state") == 0
    assert labelled(found.trace, "weight") < weight_bytes(found) / 20


def test_fsdp1_is_the_same_in_every_run() -> None:
    train = {"fsdp": True, "fsdp_config": {"version": 1}}
    first, second = (simulated(workload("trainer", train, gpus=4)).trace for _ in range(2))
    assert first.events == second.events


@pytest.mark.parametrize("size", ["dp_replicate_size", "dp_shard_size"])
def test_copies_of_shards_take_accelerates_configuration(size: str) -> None:
    found = simulated(workload("trainer", {"fsdp": True}, gpus=4, **{size: 2}))
    assert labelled(found.trace, "weight") == pytest.approx(weight_bytes(found) / 2, rel=0.01)


@pytest.mark.parametrize(
    ("train", "parallel", "message"),
    [
        ({"fsdp": True}, {}, "train.fsdp: shards over several GPUs: set parallel.gpus"),
        ({}, {"gpus": 2, "strategy": "fsdp2"}, "belongs to loop: pytorch, except dp; the Trainer uses DDP"),
        ({}, {"gpus": 2, "dp_shard_size": 2}, "parallel.dp_shard_size"),
        ({"fsdp": True}, {"gpus": 2, "tp_size": 2}, "parallel.tp_size: takes all GPUs with the Trainer"),
        ({"eval_strategy": "steps"}, {"gpus": 2, "tp_size": 2}, "tp_size: is not simulated together with evaluation"),
        ({"fsdp": True, "fsdp_config": {"version": 3}}, {"gpus": 2}, "train.fsdp_config.version: must be 1 or 2"),
        ({"fsdp": True, "fsdp_config": {"cpu_ofload": True}}, {"gpus": 2}, "unknown key; did you mean cpu_offload"),
        ({"fsdp": True, "fsdp_config": {"xla": True}}, {"gpus": 2}, "is about TPUs"),
        ({"fsdp": True, "optim": "own.py:make"}, {"gpus": 2}, "train.optim: own.py:make makes an optimizer before"),
        ({"ddp_static_graph": True, "gradient_accumulation_steps": 2}, {"gpus": 2}, "train.ddp_static_graph: fails"),
        ({"fsdp": True, "fsdp_config": {"sharding_strategy": "NO_SHARD"}}, {"gpus": 2}, "is FSDP1's"),
        (
            {"fsdp": True, "fsdp_config": {"version": 1, "sharding_strategy": "SOME"}},
            {"gpus": 2},
            "must be one of FULL",
        ),
        ({"deepspeed": "no-such-file.json"}, {"gpus": 2}, "train.deepspeed: cannot read no-such-file.json"),
    ],
)
def test_what_the_trainer_does_not_do_is_refused(train: dict[str, Any], parallel: dict[str, Any], message: str) -> None:
    with pytest.raises(WorkloadError, match=message):
        workload("trainer", train, **parallel)


def test_the_trainer_shares_matrices_as_the_plain_loop_does() -> None:
    train = {"bf16": True}
    found, plain = (simulated(workload(loop, train, gpus=2, tp_size=2)) for loop in ("trainer", "pytorch"))
    for label in ("weight", "optimizer_state", "gradient"):
        assert labelled(found.trace, label) == labelled(plain.trace, label)
    # transformers 5.24 also reduces the gradients of norms.
    large = [[one for one in collectives(each) if one[1] > 4 * HIDDEN] for each in (found, plain)]
    reduced = [[one for one in each if one[0] == "nccl::all_reduce"] for each in large]
    assert len(reduced[0]) >= 4 * LAYERS and reduced[0][: 4 * LAYERS] == reduced[1][: 4 * LAYERS]


def test_shared_embeddings_are_not_divided_by_the_trainer() -> None:
    tied = workload("trainer", gpus=2, tp_size=2).replace("model.config", {**CONFIG, "tie_word_embeddings": True})
    with pytest.raises(WorkloadError, match="share weights, which is not simulated with tensor parallelism by the"):
        simulated(tied)


def test_the_plain_loop_refuses_the_trainers_settings() -> None:
    with pytest.raises(WorkloadError, match="use the section `parallel`"):
        workload("pytorch", {"fsdp": True}, gpus=2)
