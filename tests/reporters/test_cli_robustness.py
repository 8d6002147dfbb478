"""The command line under a closed or full stdout, noisy user code, and options of other tools."""

from __future__ import annotations

import gc
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import trainatomy.api.predicting
from trainatomy import cli
from trainatomy.cli import main
from trainatomy.cli.unused_imports import skip_collections, skip_unused_imports
from trainatomy.results.prediction import Prediction
from trainatomy.workload import Workload
from trainatomy.workload.arguments import arguments

GPT2 = ["predict", "--model", "gpt2"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["predict", "gpt2"], "gpt2: no such file; for a model of that name write --model gpt2"),
        (["predict", "train.py"], "`trainatomy run train.py`"),
        (["predict", "train.py"], "--model-factory train.py:FUNCTION"),
        (["ops", "encoder"], "encoder: no such file; did you mean encoder-layer?"),
        (["compare", "notebooks"], "notebooks: no such file; did you mean notebook?"),
        (["compare", "gpt2"], "gpt2: no such file; for a model of that name write --model gpt2"),
        ([*GPT2, "--batch-size", "4"], "--per-device-train-batch-size"),
        ([*GPT2, "--lr", "1e-3"], "--learning-rate"),
        ([*GPT2, "--max_length", "128"], "--sequence-length"),
        ([*GPT2, "--per-device-train-batch-size", "1000000000"], "is too large for any GPU"),
        ([*GPT2, "--steps", "10000000"], "--steps: must be at most 10000"),
        ([*GPT2, "--torch", "1.0"], "torch 1.0 cannot be simulated"),
        ([*GPT2, "--calibration", "none.json"], "No such file"),
        (["history", "--since", "yesterday"], "yesterday"),
    ],
)
def test_common_mistakes_get_a_helpful_message(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and message in captured.err


@pytest.mark.parametrize(("redirection", "code"), [(">&-", 0), ("> /dev/full", 1)])
def test_stdout_that_cannot_be_written(redirection: str, code: int) -> None:
    command = f"{sys.executable} -m trainatomy gpus {redirection}"
    ran = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=False)
    assert ran.returncode == code
    assert "Traceback" not in ran.stderr and "Exception ignored" not in ran.stderr
    assert ("No space left on device" in ran.stderr) is (code == 1)


def test_output_of_user_code_is_not_in_the_json(
    monkeypatch: pytest.MonkeyPatch, prediction: Prediction, capfd: pytest.CaptureFixture[str]
) -> None:
    def predict(*_: Any) -> Prediction:
        os.write(1, b"from a file descriptor\n")
        print("from print")
        return prediction

    monkeypatch.setattr(trainatomy.api, "predict_training", predict)
    assert main([*GPT2, "--json"]) == 0
    captured = capfd.readouterr()
    assert json.loads(captured.out)["fits"] is True
    assert "from a file descriptor" in captured.err and "from print" in captured.err


def test_a_sweep_notes_where_a_larger_batch_reserves_less(
    monkeypatch: pytest.MonkeyPatch, prediction: Prediction, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def predict(training: Any, *_: Any) -> Prediction:
        size = training.what.train.per_device_train_batch_size
        less = replace(prediction.memory, peak_reserved_bytes=prediction.memory.peak_reserved_bytes - size)
        return replace(prediction, memory=less) if size == 4 else prediction

    monkeypatch.setattr(trainatomy.api.predicting, "predict_training", predict)
    file = tmp_path / "w.yaml"
    file.write_text("model: {class: GPT2LMHeadModel}\n")
    sweep = ["compare", str(file), "--json", "--sweep"]
    assert main([*sweep, "per_device_train_batch_size=2,4"]) == 0
    assert "batch size 4 reserves less memory than 2" in capsys.readouterr().err
    assert main([*sweep, "per_device_train_batch_size=1,2"]) == 0
    assert capsys.readouterr().err == ""


def test_many_steps_are_announced(
    monkeypatch: pytest.MonkeyPatch, prediction: Prediction, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(trainatomy.api, "predict_training", lambda *_: prediction)
    assert main([*GPT2, "--steps", "3000", "--json"]) == 0
    assert "3,000 steps are executed one by one" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "trust", "hidden"),
    [
        ({}, False, "peft bitsandbytes torchao datasets sklearn scipy"),
        ({}, True, ""),
        ({"model.lora": {}}, False, "torchao datasets sklearn scipy"),
        ({"model.quantization": {"load_in_4bit": True}, "mode": "inference"}, False, "datasets sklearn scipy"),
        ({"model.config.quantization_config": {"quant_method": "gptq"}}, False, "datasets sklearn scipy"),
        ({"model.id": "somebody/on-the-hub"}, False, "datasets sklearn"),
        ({"model.class": "DetrForObjectDetection"}, False, "peft bitsandbytes torchao datasets sklearn"),
        ({"model.class": "FNetForMaskedLM"}, False, "peft bitsandbytes torchao datasets sklearn"),
        ({"train.optim": "adamw_bnb_8bit"}, False, "peft torchao datasets sklearn scipy"),
        ({"train.optim": "torch.optim.SGD"}, False, ""),
        *(
            ({"train.optim": name}, False, "")
            for name, package in arguments().optimizers.items()
            if package not in (None, "bitsandbytes", "torchao")
        ),
        ({"train.optim": "mine:make"}, False, ""),
        ({"data.compute_metrics": "mine:metrics"}, False, ""),
        ({"data": {"factory": "a:b"}}, False, ""),
        ({"loop": "sft"}, False, "peft bitsandbytes torchao sklearn scipy"),
        ({"loop": "sft", "trl.activation_offloading": True}, False, "torchao sklearn scipy"),
    ],
)
def test_libraries_are_hidden_where_nothing_needs_them(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], trust: bool, hidden: str
) -> None:
    workload = Workload.from_mapping({"model": {"id": "gpt2"}}).replace(changes)
    modules: dict[str, Any] = {}
    monkeypatch.setattr("trainatomy.cli.unused_imports.sys", SimpleNamespace(modules=modules))
    assert skip_unused_imports([workload], trust_remote_code=trust) == () and modules == {}
    monkeypatch.setattr(cli, "owns_process", True)
    assert skip_unused_imports([workload], trust_remote_code=trust) == tuple(hidden.split())
    assert modules == dict.fromkeys(hidden.split())


def test_garbage_is_left_in_a_process_of_the_command_lines_own(monkeypatch: pytest.MonkeyPatch) -> None:
    before = gc.get_threshold()
    try:
        skip_collections()
        assert gc.get_threshold() == before
        monkeypatch.setattr(cli, "owns_process", True)
        skip_collections()
        assert gc.get_threshold()[0] == 0 and gc.isenabled(), "a simulation still freezes what exists"
    finally:
        gc.set_threshold(*before)


@pytest.mark.parametrize("stored", [{}, {"quantization_config": {"load_in_4bit": True}}])
def test_a_folder_says_whether_its_weights_are_quantised(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, stored: dict[str, Any]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"} | stored), encoding="utf-8")
    workload = Workload.from_mapping({"model": {"id": str(tmp_path)}})
    monkeypatch.setattr("trainatomy.cli.unused_imports.sys", SimpleNamespace(modules={}))
    monkeypatch.setattr(cli, "owns_process", True)
    assert ("bitsandbytes" in skip_unused_imports([workload], trust_remote_code=False)) is not bool(stored)


def test_options_are_completed() -> None:
    environment = {**os.environ, "_TRAINATOMY_COMPLETE": "complete_bash", "COMP_CWORD": "2"}
    environment["COMP_WORDS"] = "trainatomy predict --gradient-acc"
    ran = subprocess.run([sys.executable, "-m", "trainatomy"], capture_output=True, text=True, env=environment)
    assert ran.stdout.split() == ["--gradient-accumulation-steps"]


@pytest.mark.parametrize(
    ("arguments", "option"),
    [
        ([*GPT2, "--compute-metrics", "--gpu", "t4"], "--compute-metrics"),
        (["predict", "--model", "--gpu", "t4"], "--model"),
        ([*GPT2, "--per_device_train_batch_size", "--gpu", "t4"], "--per_device_train_batch_size"),
        (["fit", "--model", "gpt2", "--allow", "--gpu", "t4"], "--allow"),
        (["compare", "notebook", "--sweep", "--gpu", "t4"], "--sweep"),
        (["gpus", "--for", "--gpu"], "--for"),
        (["history", "--records", "--gpu"], "--records"),
        (["run", "--script-output", "--gpu", "train.py"], "--script-output"),
    ],
)
def test_an_option_without_its_value_does_not_swallow_the_next_one(
    arguments: list[str], option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    assert re.match(rf"error: {option} needs a value( \(.+\))?, but --gpu follows it\n", capsys.readouterr().err)


def test_a_value_may_look_like_an_option_where_that_is_clear(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*GPT2, "--model-class=--gpu"]) == 2
    assert "has no '--gpu'" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["predict", "fit", "compare", "ops"])
def test_a_stray_word_after_a_switch_is_no_missing_file(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--fp16", "maybe"]) == 2
    message = "error: --fp16 takes true, false or no value; maybe is none of them, and no file\n"
    assert capsys.readouterr().err == message
