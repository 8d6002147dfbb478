"""Labels of a rank's measured trace compared with a simulated rank, where every label is known."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
from executed import simulated
from note_taker import differences, run
from spread import workload

from trainatomy.measurement.process.job import WARM_UP_STEPS, Task
from trainatomy.measurement.process.pool import TimeLimit

if TYPE_CHECKING:
    from forked_ranks import Ranks

FSDP1 = {"fsdp": True, "fsdp_config": {"version": 1}}
CASES: dict[str, Any] = {
    "ddp": {},
    "ddp view": {"gradient_as_bucket_view": True},
    "ddp unused": {"find_unused_parameters": True},
    "ddp bf16": {"train": {"bf16": True, "gradient_accumulation_steps": 2}},
    "zero1": {"strategy": "zero1"},
    "fsdp2": {"strategy": "fsdp2"},
    "fsdp2 mixed": {"strategy": "fsdp2", "mp_policy": {"param_dtype": "bfloat16", "reduce_dtype": "float32"}},
    "fsdp2 kept": {"strategy": "fsdp2", "reshard_after_forward": False},
    "fsdp1": {"strategy": "fsdp1"},
    "fsdp1 mixed": {"strategy": "fsdp1", "mp_policy": {"param_dtype": "bfloat16"}},
    "tensor": {"tp_size": 2},
    "trainer ddp": {"loop": "trainer"},
    "trainer fsdp2": {"loop": "trainer", "train": {"fsdp": True, "bf16": True}},
    "trainer fsdp1": {"loop": "trainer", "train": {**FSDP1, "bf16": True}},
}


@pytest.mark.parametrize("case", CASES)
def test_a_measured_rank_has_the_labels_of_a_simulated_one(monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    settings = {"loop": "pytorch", "train": {}, **CASES[case]}
    loop, train = settings.pop("loop"), settings.pop("train")
    described = workload(loop, train, gpus=2, **settings)
    simulated, real = run(monkeypatch, described.to_mapping(), tracked=WARM_UP_STEPS)
    wrong = differences(simulated, real)
    assert not wrong, wrong
    found = Counter(real.labels.values())
    assert found["communication_buffer"]
    assert bool(found["gathered_weight"]) is ("fsdp" in case)


@pytest.mark.parametrize("parallel", [{}, {"strategy": "fsdp2"}, {"strategy": "fsdp1"}, {"strategy": "zero1"}], ids=str)
def test_real_ranks_gather_and_make_buckets_as_often_as_simulated_ones(
    two_processes: Ranks, parallel: dict[str, Any]
) -> None:
    described = workload(gpus=2, **parallel).replace({"model.config.num_hidden_layers": 1, "steps": 3})
    task = Task("communication", "rank_tasks:communication_on_cpu", {"workload": described.to_mapping()})
    answers = two_processes.run(task, TimeLimit(120.0), lambda _: None)
    trace = simulated(described).trace
    sizes = {event.allocation: event.bytes for event in trace.events if event.action == "alloc"}
    gathered = sorted(size for number, size in sizes.items() if trace.origins[number].operation == "resize_")
    for answer in answers:
        assert answer.went_well, answer
        found = answer.result
        assert found["gathered"] == gathered
        # The reducer and the weights that it broadcasts; in each step buffers, and buckets that may be made anew.
        assert found["buckets"] == (0 if "fsdp" in str(parallel) else 2 + 3 * 2)
        assert bool(found["collectives"]) is (parallel != {}), "DDP calls NCCL in C++"
