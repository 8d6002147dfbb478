"""Context parallelism: ranks share each sequence, with PyTorch's ring attention."""

from __future__ import annotations

from typing import Any

import pytest
from executed import simulated
from spread import CONFIG, HIDDEN, LAYERS, collectives, labelled, weight_bytes
from spread import workload as described

from trainatomy.api import predict
from trainatomy.errors import WorkloadError
from trainatomy.workload.schema import Workload

LENGTH = 256


def workload(train: dict[str, Any] | None = None, **parallel: Any) -> Workload:
    made = described(train=train, **{"gpus": 2, "cp_size": 2, "strategy": "fsdp2", **parallel})
    return made.replace("data.sequence_length", LENGTH)


@pytest.mark.parametrize("strategy", ["allgather", "alltoall"])
def test_each_layer_passes_keys_and_values_around(strategy: str) -> None:
    found = collectives(simulated(workload(cp_comm_strategy=strategy)))
    own = 2 * (LENGTH // 2) * HIDDEN * 4 * 2  # keys and values of this rank's tokens, for two samples
    if strategy == "allgather":
        assert found.count(("nccl::all_gather", 2 * own)) >= LAYERS
    else:
        # Forward and backward pass keys and values on; their gradients go all the way around.
        assert found.count(("nccl::all_to_all", own)) == 4 * LAYERS


def test_weights_are_sharded_over_all_ranks_and_activations_over_those_of_a_sequence() -> None:
    shared, alone = simulated(workload()), simulated(workload(gpus=2, cp_size=1))
    assert labelled(shared.trace, "weight") == labelled(alone.trace, "weight")
    assert labelled(shared.trace, "weight") == pytest.approx(weight_bytes(shared) / 2, rel=0.01)
    inputs = [
        max(event.bytes for event in each.trace.events if each.trace.labels.get(event.allocation) == "input")
        for each in (shared, alone)
    ]
    assert inputs[0] == inputs[1]  # every rank loads whole sequences
    found = [predict(one, timed=False).memory.components for one in (workload(), workload(cp_size=1))]
    assert found[0].activations < 0.7 * found[1].activations


def test_ranks_that_share_a_sequence_process_the_same_samples() -> None:
    found = predict(workload(gpus=4))
    assert found.time is not None and found.time.communication is not None
    assert found.time.communication.data_parallel_size == 2
    assert set(simulated(workload(gpus=4)).communicators) == {(0, 1), (0, 1, 2, 3)}


def test_other_ranks_run_in_the_same_process() -> None:
    found = predict(workload(train={"bf16": True}), timed=False, ranks=[1])
    assert list(found.ranks) == [0, 1]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"parallel": {"gpus": 2, "cp_size": 2}}, "needs strategy: fsdp2"),
        (
            {"parallel": {"gpus": 4, "cp_size": 2, "tp_size": 2, "strategy": "fsdp2"}},
            "is not simulated with parallel.cp_size",
        ),
        ({"parallel": {"gpus": 2, "cp_comm_strategy": "alltoall"}}, "belongs to context parallelism"),
        ({"loop": "trainer"}, "parallel.cp_size: needs FSDP2, as accelerate runs it: set train.fsdp"),
        ({"data": {"sequence_length": LENGTH, "padding": True}}, "ring attention does not take"),
        ({"data": {"sequence_length": 66}}, "66 tokens cannot be"),
        ({"model": {"class": "LlamaForCausalLM", "config": CONFIG, "attn_implementation": "eager"}}, "use sdpa"),
        (
            {"model": {"class": "MistralForCausalLM", "config": {**CONFIG, "sliding_window": 32}}},
            "does not support attention layers",
        ),
    ],
    ids=lambda one: "-".join(one) if isinstance(one, dict) else "",
)
def test_what_cannot_be_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(WorkloadError, match=message):
        predict(Workload.from_mapping(workload().to_mapping() | changes), timed=False)
