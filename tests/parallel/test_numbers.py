"""Trainings on two processes of this machine compute what one process computes."""

from __future__ import annotations

from typing import Any

import pytest

from trainatomy.measurement.process.pool import TimeLimit
from trainatomy.measurement.process.ranks import RankProcesses, RankTask

CONFIG = {
    "num_hidden_layers": 4, "hidden_size": 32, "intermediate_size": 32, "vocab_size": 64, "num_attention_heads": 2,
    "num_key_value_heads": 2, "tie_word_embeddings": False,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
PARAMETERS = 4 * 9 + 3


@pytest.mark.parametrize(
    ("parallel", "whole"),
    [
        ({"tp_size": 2}, True),
        ({"tp_size": 2, "sequence_parallel": True}, True),
        ({"tp_size": 2, "strategy": "fsdp2", "model": "Qwen3ForCausalLM"}, True),
        ({"tp_size": 2, "enable_expert_parallel": True}, True),
        ({"pp_size": 2}, False),
        ({"pp_size": 2, "pp_schedule": "GPipe", "pp_microbatches": 2}, False),
        ({"pp_size": 2, "pp_schedule": "Interleaved1F1B"}, False),
        ({"pp_size": 2, "pp_schedule": "InterleavedZeroBubble"}, False),
    ],
    ids=lambda one: "-".join(map(str, one.values())) if isinstance(one, dict) else "",
)
def test_losses_and_gradients_are_those_of_the_whole_model(
    processes: RankProcesses, parallel: dict[str, Any], whole: bool
) -> None:
    has_experts = "enable_expert_parallel" in parallel
    mixture = {"class": "Qwen3MoeForCausalLM", "config": {**CONFIG, **EXPERTS}}
    name = parallel.get("model", "LlamaForCausalLM")
    degrees = {name: value for name, value in parallel.items() if name != "model"}
    workload = {
        "model": mixture if has_experts else {"class": name, "config": CONFIG},
        "loop": "pytorch",
        "data": {"sequence_length": 8},
        "train": {"per_device_train_batch_size": 4},
        "parallel": {"gpus": 2, **degrees},
    }
    task = RankTask("numbers", "rank_tasks:gradients_beside_one_process", {"workload": workload})
    answers = processes.run(task, TimeLimit(120.0), lambda _: None)
    found: list[Any] = [answer.result for answer in answers]
    assert max(one["difference"] for one in found) < 1e-5
    if name == "LlamaForCausalLM" and not has_experts:
        assert sum(one["parameters"] for one in found) == PARAMETERS * (2 if whole else 1)
