"""Predictions in separate processes: in order, with their errors, and independent of the state of this process."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from trainatomy import api
from trainatomy.errors import TrainatomyError, WorkloadError
from trainatomy.results.prediction import Prediction
from trainatomy.runs import pools, predicting
from trainatomy.runs.predicting import _parts, execution_key, jobs_for, predict_all
from trainatomy.workload.schema import Workload

TINY = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}


def workload(**config: object) -> Workload:
    return Workload.from_mapping(
        {
            "model": {"class": "BertForSequenceClassification", "config": {**TINY, **config}},
            "data": {"sequence_length": 8},
        }
    )


def test_few_trainings_are_predicted_here_and_many_by_all_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    assert [jobs_for(count) for count in (1, 3, 4, 30)] == [1, 1, 4, 4]
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    assert (jobs_for(30), jobs_for(2, 5), jobs_for(30, 20)) == (predicting.MAX_JOBS, 2, 20)
    with pytest.raises(WorkloadError, match=r"jobs: 0 is not a number of processes"):
        jobs_for(3, 0)


def test_processes_predict_what_this_one_does() -> None:
    several = [workload(), workload(num_hidden_layers=2), workload(hidden_size=33)]
    here, there = (predict_all(partial(api.predict, gpu="h200"), several, jobs) for jobs in (1, 2))
    for one, other in zip(here[:2], there[:2], strict=True):
        assert isinstance(one, Prediction) and isinstance(other, Prediction)
        assert (one.memory, one.time, one.name) == (other.memory, other.time, other.name)
    for found in (here[2], there[2]):
        assert isinstance(found, TrainatomyError) and "33" in str(found)
    assert str(here[2]) == str(there[2])


def test_a_process_that_dies_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pools, "PRELOADED", ("trainatomy.runs.server",))
    with pytest.raises(TrainatomyError, match=r"was killed, perhaps for lack of host memory; 2 ran in parallel"):
        predict_all(os._exit, [3, 3], 2)  # type: ignore[arg-type, list-item]


SCRIPT = """
import logging, warnings
from trainatomy.runs import pools, predicting
pools.PRELOADED = ("trainatomy.runs.server",)
if __name__ == "__main__":
    logging.disable(logging.ERROR)
    predicting.predict_all(print, ["one", "other"], 2)
    predicting.predict_all(warnings.warn, ["one", "other"], 2)
"""


def test_output_of_processes_goes_to_stderr(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path)), "PYTHONUNBUFFERED": ""}
    completed = subprocess.run(
        [sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, check=True, env=environment
    )
    assert completed.stdout == ""
    assert sorted(completed.stderr.split()) == ["one", "other"]


def test_trainings_may_share_an_execution_on_any_gpu_and_with_any_allocator() -> None:
    plain = workload().replace("gpu", "l4")
    same = (plain.replace("gpu", "a10"), plain.replace("allocator", "expandable_segments:True"))
    assert {execution_key(each) for each in same} == {execution_key(plain)}
    assert execution_key(plain) != execution_key(plain.replace("train.optim", "sgd"))
    own_code = plain.replace("data.factory", "batches.py:make")
    assert execution_key(own_code) != execution_key(own_code.replace("gpu", "rtx-4090"))


def test_rows_of_many_gpus_are_divided_among_processes_by_capability() -> None:
    names = ("h200", "t4", "a10", "l4", "a100-40gb", "v100-16gb", "rtx-3090")
    rows = [workload().replace("gpu", name) for name in names]
    parts = _parts(list(range(len(rows))), rows, 2)
    assert [[names[index] for index in part] for part in parts] == [
        ["v100-16gb", "t4", "a100-40gb"],
        ["a10", "rtx-3090", "l4", "h200"],
    ]
    assert _parts([0, 1, 2], rows, 2) == [[1, 2, 0]]
