"""Tensor parallelism with shards of the sequence between the layers."""

from __future__ import annotations

from typing import Any

import pytest
from executed import simulated
from spread import CONFIG, HIDDEN, LAYERS, collectives, shards_embeddings, workload

from trainatomy.api import predict
from trainatomy.errors import WorkloadError

WHOLE = 2 * 64 * HIDDEN * 4
"""Bytes of the hidden states of the batch."""


def test_sequences_are_gathered_before_each_block_and_scattered_behind_it() -> None:
    plain, sharded = (collectives(simulated(workload(gpus=2, tp_size=2, sequence_parallel=on))) for on in (False, True))
    of = [[one for one in found if one[0] == "nccl::reduce_scatter"] for found in (plain, sharded)]
    # Forward: behind attention and MLP, and sharded embeddings; backward: before them, and before the head.
    assert (len(of[0]), len(of[1])) == (0, 4 * LAYERS + 1 + shards_embeddings())
    assert {size for _, size in of[1]} == {WHOLE}
    assert not [size for name, size in sharded if name == "nccl::all_reduce" and size >= WHOLE]
    assert [size for name, size in plain if name == "nccl::all_reduce" and size >= WHOLE]


def test_activations_between_the_layers_are_halved() -> None:
    plain, sharded = (
        predict(
            workload(gpus=2, tp_size=2, sequence_parallel=on).replace("data.sequence_length", 64 * 16), timed=False
        ).memory.components.activations
        for on in (False, True)
    )
    # Each layer saves the inputs of its two norms and what they compute of them.
    assert plain - sharded >= 4 * LAYERS * 16 * WHOLE // 2


@pytest.mark.parametrize("tied", [False, True])
def test_it_runs_with_fsdp_and_tied_embeddings(tied: bool) -> None:
    made = workload(gpus=4, tp_size=2, sequence_parallel=True, strategy="fsdp2")
    found = simulated(made.replace("model.config", {**CONFIG, "tie_word_embeddings": tied}))
    assert set(found.communicators) == {(0, 1), (0, 2)}


@pytest.mark.parametrize(
    ("changes", "key", "message"),
    [
        ({"parallel": {"gpus": 2, "sequence_parallel": True}}, "parallel.sequence_parallel", "set parallel.tp_size"),
        ({"loop": "trainer"}, "parallel.sequence_parallel", "loop: pytorch"),
        ({"data": {"sequence_length": 64, "padding": True}}, "data.padding", "attention mask"),
        ({"data": {"sequence_length": 63}}, "data.sequence_length", "cannot share 63 tokens"),
        (
            {"model": {"class": "LlamaForCausalLM", "config": CONFIG, "attn_implementation": "eager"}},
            "",
            "needs a mask",
        ),
        (
            {"model": {"class": "MistralForCausalLM", "config": {**CONFIG, "sliding_window": 32}}},
            "",
            "attend to 32 tokens",
        ),
    ],
    ids=lambda one: next(iter(one)) if isinstance(one, dict) else "",
)
def test_what_cannot_be_is_refused(changes: dict[str, Any], key: str, message: str) -> None:
    given = workload(gpus=2, tp_size=2, sequence_parallel=True).to_mapping() | changes
    with pytest.raises(WorkloadError, match=message) as raised:
        predict(type(workload()).from_mapping(given), timed=False)
    assert key in str(raised.value) or raised.value.key == key


def test_norms_behind_a_block_work_on_shards() -> None:
    gemma = {"class": "Gemma3ForCausalLM", "config": {**CONFIG, "head_dim": 32, "sliding_window": 64}}
    found = simulated(workload(gpus=2, tp_size=2, sequence_parallel=True).replace("model", gemma))
    scattered = [size for name, size in collectives(found) if name == "nccl::reduce_scatter"]
    assert len(scattered) == 4 * LAYERS  # its embeddings and output layer share weights, and stay whole


def test_gradients_flow_through_norms_that_compute_in_another_dtype() -> None:
    bfloat16 = workload(gpus=2, tp_size=2, sequence_parallel=True).replace("model.dtype", "bfloat16")
    held = predict(bfloat16, timed=False).memory.components
    # Two states of each weight: all of them have gradients. The rest is a buffer of the positions.
    assert held.optimizer_states > 1.99 * held.weights
