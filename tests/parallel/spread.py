"""A small training that is spread over GPUs, and what its trace says."""

from __future__ import annotations

from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from trainatomy.results.trace import AllocationTrace
from trainatomy.simulator.simulation import Simulation
from trainatomy.workload.schema import Workload

LAYERS = 2
STEPS = 2
"""The second step is like all that follow: it begins with optimizer states."""
HIDDEN, INNER, VOCABULARY = 256, 512, 1000
CONFIG = {
    "num_hidden_layers": LAYERS,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "vocab_size": VOCABULARY,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
}


def workload(loop: str = "pytorch", train: dict[str, Any] | None = None, **parallel: Any) -> Workload:
    return Workload.from_mapping(
        {
            "loop": loop,
            "model": {"class": "LlamaForCausalLM", "config": CONFIG},
            "data": {"sequence_length": 64},
            "train": {"per_device_train_batch_size": 2, **(train or {})},
            "gpu": "h200",
            "steps": STEPS,
            "parallel": parallel,
        }
    )


def labelled(trace: AllocationTrace, label: str) -> int:
    """Bytes that were requested for tensors with a label and are held after backward or the optimizer, at most."""
    ends = {mark.event for mark in trace.marks if mark.name in ("backward end", "optimizer end")}
    held: dict[int, int] = {}
    most = 0
    for index, event in enumerate(trace.events):
        if index in ends:
            most = max(most, sum(size for number, size in held.items() if trace.labels.get(number) == label))
        if event.action == "alloc":
            held[event.allocation] = event.bytes
        else:
            held.pop(event.allocation, None)
    return most


def collectives(simulation: Simulation) -> list[tuple[str, int]]:
    """Kind and bytes of each collective of the last step, in order."""
    calls = [simulation.operations.calls[one.call] for one in simulation.operations.operations]
    return [(c.name, int(dict(c.numbers)["bytes"])) for c in calls if c.name.startswith("nccl::")]


def weight_bytes(simulation: Simulation) -> int:
    return simulation.parameters * 4


def shards_embeddings() -> bool:
    """Return whether plans of transformers for tensor parallelism shard the embeddings (5.18 and later)."""
    with torch.device("meta"):
        plan = LlamaForCausalLM(LlamaConfig(**CONFIG)).tp_plan
    return any(name.endswith("embed_tokens") for name in plan)
