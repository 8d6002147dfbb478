"""cuBLAS workspaces that each call takes and frees, as torch 2.15 does."""

from __future__ import annotations

import copy
import os

import pytest

from trainatomy.simulator.simulate import simulate
from trainatomy.workload import Workload

SIZES = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 256}
WORKSPACE = 32 * 2**20


def lives(torch: str) -> list[int]:
    """Return for how many events each cuBLAS workspace of a training on an H200 is allocated; 0 if it stays."""
    workload = Workload.from_mapping(
        {
            "model": {"class": "LlamaForCausalLM", "config": {**SIZES, "num_key_value_heads": 1, "vocab_size": 200}},
            "steps": 1,
            "data": {"sequence_length": 32},
            "gpu": "h200",
            "software": {"torch": torch},
        }
    )
    events = simulate(workload, workload.resolve_gpu()).trace.events
    freed = {event.allocation: index for index, event in enumerate(events) if event.action == "free"}
    taken = [(index, event) for index, event in enumerate(events) if event.bytes == WORKSPACE]
    return [freed.get(event.allocation, index) - index for index, event in taken if event.action == "alloc"]


def test_each_product_frees_its_workspace() -> None:
    found = lives("2.15")
    assert len(found) >= 2 * 3 * 7  # linear layers, in forward and twice in backward
    assert set(found) == {1}


def test_before_two_threads_keep_one_each() -> None:
    assert lives("2.14") == [0, 0]


def test_an_environment_variable_keeps_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", copy.deepcopy(os.environ))  # as Dataset.map does with several processes
    monkeypatch.setenv("TORCH_CUBLAS_WORKSPACE_CACHE", "1")
    assert lives("2.15") == [0, 0]
