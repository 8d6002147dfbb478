"""``predict --why-oom`` and the hint at it: shown where a search can vary the training, harmless elsewhere."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import trainatomy.api
from trainatomy.cli import main
from trainatomy.cli.predict import hint
from trainatomy.requests.fitting import FitRequest, refusal
from trainatomy.results.fit import Fit
from trainatomy.results.prediction import Prediction
from trainatomy.search.space import space_of
from trainatomy.workload.schema import Workload

TINY: dict[str, Any] = {
    "model": {
        "class": "GPT2LMHeadModel",
        "config": {"model_type": "gpt2", "n_layer": 2, "n_embd": 64, "n_head": 2, "vocab_size": 512},
        "dtype": "float32",
    },
    "data": {"sequence_length": 64},
    "gpu": {"base": "t4", "memory_bytes": "256 MiB"},
}
LLAMA: dict[str, Any] = {
    "class": "LlamaForCausalLM",
    "config": {
        "model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 64,
        "num_attention_heads": 2, "vocab_size": 512,
    },
    "dtype": "float32",
}  # fmt: skip
VARIED: list[dict[str, Any]] = [
    {},
    {"loop": "pytorch"},
    {"train": {"bf16": True}},
    {"train": {"fsdp": True}, "parallel": {"gpus": 2}},
    {
        "train": {"deepspeed": {"train_micro_batch_size_per_gpu": "auto", "zero_optimization": {"stage": 2}}},
        "parallel": {"gpus": 2},
    },
]
NOT_VARIED: list[dict[str, Any]] = [
    {"mode": "inference"},
    {"mode": "generation", "generation": {"max_new_tokens": 8}},
    {"model": LLAMA, "loop": "pytorch", "parallel": {"gpus": 2, "pp_size": 2}},
]


@pytest.fixture
def shortages(monkeypatch: pytest.MonkeyPatch, nothing_fits: Fit) -> list[Prediction]:
    """Return the predictions for which remedies are searched for; the search is answered at once."""
    asked: list[Prediction] = []

    def answer(workload: Any, *, request: Any, progress: Any, prediction: Prediction) -> Any:
        asked.append(prediction)
        return nothing_fits.shortage

    monkeypatch.setattr(trainatomy.api, "why_out_of_memory", answer)
    monkeypatch.setattr("trainatomy.cli.predict.start_importing", lambda jobs, **options: None)
    return asked


def run(tmp_path: Path, changes: dict[str, Any], *options: str) -> int:
    file = tmp_path / "train.yaml"
    file.write_text(json.dumps({**TINY, **changes}), encoding="utf-8")
    return main(["predict", str(file), *options])


@pytest.mark.parametrize("changes", VARIED)
def test_what_a_hint_names_is_accepted(changes: dict[str, Any]) -> None:
    workload = Workload.from_mapping({**TINY, **changes})
    assert refusal(workload) is None
    allowed = ("precision",) if "--allow precision" in hint(workload) else ()
    assert space_of(workload, FitRequest(allow=allowed)).size > 1
    assert space_of(workload, FitRequest(), as_given=True).size > 1


def test_a_hint_is_shown_where_a_search_can_vary_the_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path, {}) == 0
    assert "--why-oom lists every change" in capsys.readouterr().err


@pytest.mark.parametrize("changes", NOT_VARIED)
def test_where_it_cannot_the_prediction_is_shown_without_the_hint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], shortages: list[Prediction], changes: dict[str, Any]
) -> None:
    assert run(tmp_path, changes, "--why-oom") == 0
    out, err = capsys.readouterr()
    assert out.startswith("does not fit") and "GPU memory at the peak" in out
    assert "nothing was varied" in err and "--why-oom lists" not in err and not shortages


def test_the_training_is_predicted_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], shortages: list[Prediction]
) -> None:
    assert run(tmp_path, {}, "--why-oom", "--json") == 0
    (asked,) = shortages
    found = json.loads(capsys.readouterr().out)
    assert asked.memory.device_bytes == found["memory"]["device_bytes"] and asked.timeline
    assert found["timeline"] == [] and found["shortage"]["remedies"]


@pytest.mark.parametrize("changes", [*VARIED, *NOT_VARIED])
def test_what_a_search_needs_is_imported_while_the_training_is_predicted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]
) -> None:
    begun: list[Any] = []

    def predict(*arguments: Any) -> Any:
        begun.append("prediction")
        raise KeyboardInterrupt

    monkeypatch.setattr("trainatomy.cli.predict.start_importing", lambda jobs, **options: begun.append(options))
    monkeypatch.setattr(trainatomy.api, "predict_training", predict)
    run(tmp_path, changes, "--why-oom")
    imports = [] if changes in NOT_VARIED else [{"deepspeed": "deepspeed" in changes.get("train", {})}]
    assert begun == [*imports, "prediction"]
