"""DeepSpeed's engine in two processes on the CPU, beside its simulation."""

from __future__ import annotations

from typing import Any

import pytest
from executed import simulated
from forked_ranks import Ranks
from spread import labelled, workload

from trainatomy.measurement.process.job import Task
from trainatomy.measurement.process.pool import TimeLimit

SECONDS = 300.0


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_two_processes_hold_what_is_simulated(two_processes: Ranks, stage: int) -> None:
    pytest.importorskip("deepspeed")
    zero: dict[str, Any] = {"stage": stage, "reduce_bucket_size": 100_000}
    config = {"zero_optimization": zero, "train_micro_batch_size_per_gpu": "auto", "gradient_clipping": "auto"}
    described = workload("trainer", {"deepspeed": config, "optim": "adamw_torch"}, gpus=2).replace("steps", 1)
    task = Task("deepspeed", "rank_tasks:deepspeed_sizes", {"workload": described.to_mapping()})
    answers = two_processes.run(task, TimeLimit(SECONDS))
    assert all(answer.went_well for answer in answers), [answer.log for answer in answers]
    trace = simulated(described).trace
    for answer in answers:
        assert answer.result is not None
        sizes = answer.result["sizes"]
        assert sizes["master_weight"] == labelled(trace, "master_weight")
        steps = 4 * 2  # on the CPU the optimizer's step counters are there too; on a GPU those of fused kernels are
        assert sizes["optimizer_state"] == pytest.approx(labelled(trace, "optimizer_state"), abs=steps)
        assert answer.result["events"] == ["ready", "micro_step_end", "optimizer_begin", "optimizer_end"]
