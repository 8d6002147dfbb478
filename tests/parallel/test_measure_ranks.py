"""Trainings on two processes of this machine: real steps and collectives on the CPU, with fake CUDA and NVML."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from forked_ranks import Ranks

from trainatomy.measurement import measure as measuring
from trainatomy.measurement.measure import jobs_for
from trainatomy.measurement.process.job import Task
from trainatomy.measurement.process.pool import TimeLimit
from trainatomy.measurement.traces.breakdown import BUFFERS_NOTE
from trainatomy.workload.schema import Workload

if TYPE_CHECKING:
    from collections.abc import Mapping

    from trainatomy.results.measurement import Measurement

MIB = 2**20
CONFIG = {
    "num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 32, "vocab_size": 64, "num_attention_heads": 2,
    "num_key_value_heads": 2,
}  # fmt: skip


def workload(train: Mapping[str, Any] | None = None, loop: str = "pytorch", **parallel: Any) -> Workload:
    return Workload.from_mapping(
        {
            "model": {"class": "LlamaForCausalLM", "config": CONFIG},
            "data": {"sequence_length": 8},
            "loop": loop,
            "train": {"per_device_train_batch_size": 2, **(train or {})},
            "parallel": {"gpus": 2, **parallel},
        }
    )


class FakeGpus:
    """The launch, with the fake GPU in each task; ``more`` are arguments for it."""

    def __init__(self, processes: Ranks, more: Mapping[str, Any]) -> None:
        self.processes, self.more = processes, more

    def run(self, task: Task, *rest: Any) -> Any:
        arguments = {**task.arguments, **self.more}
        return self.processes.run(Task(task.name, "rank_tasks:measured_on_cpu", arguments), *rest)


def run(processes: Ranks, described: Workload, **more: Any) -> measuring.RankRuns:
    found: Any = FakeGpus(processes, more)
    return measuring.run_in_ranks(found, jobs_for(described, 5, components=False)[0], TimeLimit(120.0), lambda _: None)


STRATEGIES = [
    {"gradient_as_bucket_view": True},
    {"static_graph": True},
    {"strategy": "zero1"},
    {"strategy": "fsdp2", "reshard_after_forward": False, "mp_policy": {"param_dtype": "bfloat16"}},
    {"strategy": "fsdp1"},
    {"pp_size": 2, "pp_schedule": "GPipe"},
]
"""Besides those of which a recorded run is measured, too."""


def assert_every_rank_is_measured(found: Measurement) -> None:
    assert (found.rank, found.status, found.steps) == (0, "completed", 5)
    assert list(found.ranks) == [0, 1]
    assert [one.nccl_bytes for one in found.ranks.values()] == [100 * MIB, 101 * MIB]
    assert [one.step_seconds for one in found.ranks.values()] == [0.5, 0.5]
    assert found.samples_per_second == 2 / 0.5
    assert [stage.name for stage in found.stages][:3] == ["idle", "first tensor", "process group"]


@pytest.mark.parametrize("parallel", STRATEGIES, ids=lambda one: "-".join(map(str, one)))
def test_every_strategy_is_measured_in_every_rank(two_processes: Ranks, parallel: dict[str, Any]) -> None:
    assert_every_rank_is_measured(measuring.gathered(run(two_processes, workload(**parallel))))


@pytest.mark.parametrize("parallel", [{}, {"strategy": "fsdp2"}, {"tp_size": 2}, {"pp_size": 2}], ids=str)
def test_the_recorded_run_adds_a_breakdown_to_every_rank(
    two_processes: Ranks, tmp_path: Path, parallel: dict[str, Any]
) -> None:
    processes: Any = FakeGpus(two_processes, {})
    jobs = jobs_for(workload(**parallel), 5, components=True, trace=tmp_path / "trace.json.gz")
    found = measuring.measure_jobs(processes, jobs, TimeLimit(120.0), lambda _: None)
    assert_every_rank_is_measured(found)
    assert [rank.memory is not None for rank in found.ranks.values()] == [True, True], found.notes
    assert [rank.recorded_step_seconds for rank in found.ranks.values()] == [0.5, 0.5]
    assert BUFFERS_NOTE not in found.notes
    assert found.tape_file == str(tmp_path / "trace.json.gz")
    assert [path.name for path in tmp_path.iterdir()] == ["trace.json.gz"]


@pytest.mark.parametrize("train", [{}, {"fsdp": True}, {"fsdp": True, "fsdp_config": {"version": 1}}], ids=str)
def test_the_trainer_is_measured_in_every_rank(two_processes: Ranks, train: dict[str, Any]) -> None:
    found = measuring.gathered(run(two_processes, workload(train, loop="trainer")))
    assert (found.status, [one.steps for one in found.ranks.values()]) == ("completed", [5, 5])


@pytest.mark.parametrize("loop", ["pytorch", "trainer"])
def test_ranks_train_on_samples_of_different_lengths(two_processes: Ranks, loop: str) -> None:
    lengths = {"data": {"lengths": {3: 8, 5: 8, 8: 8}}, "steps": 5}
    found = measuring.gathered(run(two_processes, workload(loop=loop).replace(lengths)))
    assert (found.status, [one.steps for one in found.ranks.values()]) == ("completed", [5, 5])


def test_a_rank_that_runs_out_of_memory_is_the_result(two_processes: Ranks) -> None:
    found = measuring.gathered(run(two_processes, workload(strategy="fsdp2"), fails=1))
    assert (found.rank, found.status) == (1, "out of memory")
    assert found.out_of_memory is not None and found.out_of_memory.requested_bytes == 2 * 2**30
    assert found.other_ranks == ()
    assert found.notes[-1] == "rank 0 was stopped, and is not measured, because rank 1 ran out of memory"
