"""Trainings on several processes of this machine compute what one process computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from forked_ranks import Ranks

from trainatomy.measurement.process.job import Task
from trainatomy.measurement.process.pool import TimeLimit
from trainatomy.simulator.parallel.recorder import local
from trainatomy.simulator.simulate import simulate, topology_of
from trainatomy.training.model import build_model
from trainatomy.workload.schema import Workload

HIDDEN, INNER, VOCABULARY = 32, 48, 64
CONFIG = {
    "num_hidden_layers": 4, "hidden_size": HIDDEN, "intermediate_size": INNER, "vocab_size": VOCABULARY,
    "num_attention_heads": 2, "num_key_value_heads": 2, "tie_word_embeddings": False,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
SHAPES = dict[str, list[int]]


def described(model: str, gpus: int, parallel: dict[str, Any]) -> dict[str, Any]:
    return {
        "model": {"class": model, "config": CONFIG | (EXPERTS if "Moe" in model else {})},
        "loop": "pytorch",
        "data": {"sequence_length": 8},
        "train": {"per_device_train_batch_size": 4},
        "parallel": {"gpus": gpus, **parallel},
        "gpu": "h200",
    }


def trained(processes: Ranks, workload: dict[str, Any]) -> list[SHAPES]:
    """Train in the processes as one process does; return the shapes of what each rank holds."""
    task = Task("numbers", "rank_tasks:gradients_beside_one_process", {"workload": workload})
    answers = sorted(processes.run(task, TimeLimit(120.0), lambda _: None), key=lambda answer: answer.rank)
    found: list[Any] = [answer.result for answer in answers]
    assert max(one["difference"] for one in found) < 1e-5
    return [one["shapes"] for one in found]


def shapes_in_simulation(workload: dict[str, Any], rank: int) -> SHAPES:
    """Return the shapes of what a simulated rank holds."""
    given = Workload.from_mapping(workload)
    with torch.device("meta"):
        model = build_model(given)
    place = topology_of(given, rank)
    simulate(given, given.resolve_gpu(), model=lambda: model, topology=place, steps=1, operations=False)
    return {name: list(local(parameter).shape) for name, parameter in model.named_parameters()}


@pytest.mark.parametrize(
    ("model", "parallel"),
    [
        ("LlamaForCausalLM", {"tp_size": 2}),
        ("LlamaForCausalLM", {"tp_size": 2, "sequence_parallel": True}),
        ("Qwen3ForCausalLM", {"tp_size": 2, "strategy": "fsdp2"}),
        ("Qwen3MoeForCausalLM", {"tp_size": 2, "enable_expert_parallel": True}),
        ("LlamaForCausalLM", {"pp_size": 2}),
        ("LlamaForCausalLM", {"pp_size": 2, "pp_schedule": "GPipe", "pp_microbatches": 2}),
        ("LlamaForCausalLM", {"pp_size": 2, "pp_schedule": "LoopedBFS"}),
        ("LlamaForCausalLM", {"pp_size": 2, "pp_schedule": "Interleaved1F1B"}),
        ("LlamaForCausalLM", {"pp_size": 2, "pp_schedule": "InterleavedZeroBubble"}),
    ],
    ids=lambda one: "-".join(map(str, one.values())) if isinstance(one, dict) else one,
)
def test_losses_and_gradients_are_those_of_the_whole_model(
    two_processes: Ranks, model: str, parallel: dict[str, Any]
) -> None:
    workload = described(model, 2, parallel)
    assert trained(two_processes, workload) == [shapes_in_simulation(workload, rank) for rank in range(2)]


@pytest.mark.parametrize(
    ("model", "parallel"),
    [
        ("LlamaForCausalLM", {"pp_schedule": "GPipe", "strategy": "fsdp2"}),
        ("LlamaForCausalLM", {"pp_schedule": "InterleavedZeroBubble", "sequence_parallel": True}),
        ("Qwen3ForCausalLM", {"pp_schedule": "Interleaved1F1B"}),
    ],
    ids=lambda one: "-".join(map(str, one.values())) if isinstance(one, dict) else one,
)
def test_stages_whose_layers_are_shared_compute_what_the_whole_model_does(
    four_processes: Ranks, model: str, parallel: dict[str, Any]
) -> None:
    workload = described(model, 4, {"pp_size": 2, "tp_size": 2, **parallel})
    shapes = trained(four_processes, workload)
    assert [shapes[rank] for rank in (0, 3)] == [shapes_in_simulation(workload, rank) for rank in (0, 3)]
    first, last = shapes[0], shapes[2]
    assert not set(first) & set(last)
    assert first["model.layers.0.mlp.gate_proj.weight"] == [INNER // 2, HIDDEN]
    assert last["lm_head.weight"] == [VOCABULARY // 2, HIDDEN]
