"""Predictions that are kept, so that an interrupted comparison continues."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path

import pytest

from trainatomy import api
from trainatomy.requests.predicting import PredictRequest
from trainatomy.results.prediction import Prediction
from trainatomy.runs.predicting import Kept
from trainatomy.workload.schema import Workload

CONFIG = {"num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 16, "vocab_size": 32}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 2}


def workload(size: int = 1) -> Workload:
    return Workload.from_mapping(
        {
            "loop": "pytorch",
            "model": {"class": "LlamaForCausalLM", "config": CONFIG | HEADS},
            "data": {"sequence_length": 8},
            "train": {"per_device_train_batch_size": size},
        }
    )


class Counting:
    """Predicts, and counts how often; is interrupted after some predictions."""

    def __init__(self, most: int = 99) -> None:
        self.calls = 0
        self._most = most

    def __call__(self, described: Workload) -> Prediction:
        if self.calls == self._most:
            raise KeyboardInterrupt
        self.calls += 1
        return api.predict(described)


def test_an_interrupted_comparison_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [workload(size) for size in (1, 2, 3)]
    counting = Counting(most=2)
    monkeypatch.setattr("trainatomy.api.comparing.predict_row", lambda options, each: counting(each))
    with pytest.raises(KeyboardInterrupt):
        api.compare(rows, keep=tmp_path)
    assert len(list(tmp_path.iterdir())) == 2
    counting = Counting()
    found = api.compare(rows, keep=tmp_path)
    assert counting.calls == 1
    assert [row.prediction.memory for row in found.rows if row.prediction] == [
        api.predict(each).memory for each in rows
    ]


def test_what_is_kept_is_what_was_predicted(tmp_path: Path) -> None:
    kept = Kept(Counting(), PredictRequest(), f"file://{tmp_path}")
    first = kept(workload())
    again = pickle.loads(pickle.dumps(kept))(workload())
    assert again == first


def test_other_options_and_workloads_are_predicted_anew(tmp_path: Path) -> None:
    counting = Counting()
    kept = Kept(counting, PredictRequest(), str(tmp_path))
    names = {kept.name_of(workload()), kept.name_of(workload(2))}
    names.add(replace(kept, options=PredictRequest(timeline=True)).name_of(workload()))
    assert len(names) == 3
    kept(workload())
    (file,) = tmp_path.iterdir()
    file.write_text("{")
    kept(workload())
    assert counting.calls == 2


def test_predictions_with_the_users_code_are_not_kept(tmp_path: Path) -> None:
    counting = Counting()
    described = workload().replace("train.optim", "torch.optim.SGD")
    for _ in range(2):
        Kept(counting, PredictRequest(), str(tmp_path))(described)
    assert counting.calls == 2 and not list(tmp_path.iterdir())
