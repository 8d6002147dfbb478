"""The command line: output streams and exit codes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

import pytest
from typer.testing import CliRunner

import trainatomy.api.predicting
from trainatomy import errors
from trainatomy.catalog.gpus import gpus
from trainatomy.cli import main
from trainatomy.cli.app import app
from trainatomy.cli.manual import MOST_USED
from trainatomy.results.prediction import Prediction

COMMAND = [sys.executable, "-m", "trainatomy"]
TINY = ["--model-class", "GPT2LMHeadModel", "--config", "n_layer=1"]


@pytest.fixture
def predicted_workloads(monkeypatch: pytest.MonkeyPatch, prediction: Prediction) -> list[Any]:
    """Replace ``predict`` by a fixed prediction and return the list of workloads that it receives."""
    seen: list[Any] = []

    def predict(training: Any, *_: Any) -> Prediction:
        seen.append(training.what)
        print("a library says something on stdout")
        return prediction

    for module in (trainatomy.api, trainatomy.api.predicting):
        monkeypatch.setattr(module, "predict_training", predict)
    return seen


def failing(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    def predict(training: Any, *_: Any) -> NoReturn:
        raise error

    for module in (trainatomy.api, trainatomy.api.predicting):
        monkeypatch.setattr(module, "predict_training", predict)


@pytest.fixture
def workload(tmp_path: Path) -> str:
    file = tmp_path / "workload.yaml"
    file.write_text("model: {class: GPT2LMHeadModel}\ntrain: {per_device_train_batch_size: 2, bf16: true}\ngpu: t4\n")
    return str(file)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"trainatomy {trainatomy.__version__}\n"


@pytest.mark.parametrize(
    "arguments", [["--help"], ["-h"], ["predict", "--help"], ["compare", "-h"], ["gpus", "--help"]]
)
def test_help(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 0
    assert "Usage: trainatomy" in capsys.readouterr().out


def test_help_is_shown_without_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    captured = capsys.readouterr()
    assert "Usage: trainatomy" in captured.out
    assert captured.err == ""


def test_help_cuts_no_name(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    main(["predict", "--help-all"])
    text = capsys.readouterr().out
    assert "--gradient-accumulation-steps INT" in text
    assert "--[no-]gradient-checkpointing" in text
    assert "…" not in text
    assert "output-dir" not in text


def test_help_is_brief_and_in_the_order_of_importance(capsys: pytest.CaptureFixture[str]) -> None:
    main(["predict", "--help"])
    brief = capsys.readouterr().out
    main(["predict", "--help-all"])
    whole = capsys.readouterr().out
    places = [brief.index(f"\n{word}") for word in ("Arguments", "Most used", "Run", "Output", "All options")]
    assert places == sorted(places)
    assert [f"--{name} " in brief.replace("[no-]", "") for name in MOST_USED] == [True] * len(MOST_USED)
    assert "Samples per batch (default: 8)." in brief
    assert "--ema-decay" not in brief
    assert "--ema-decay" in whole
    assert len(brief.splitlines()) < len(whole.splitlines()) / 3


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["fit", "--model", "gpt2", "--allow", "loar"], "--allow: unknown value 'loar'; did you mean lora?"),
        (["fit", "--model", "gpt2", "--keep", "batch,attn"], "--keep: unknown value 'attn'"),
        (["fit", "--model", "gpt2", "--maximize", "x"], "--maximize: unknown value 'x'; known: batch, sequence-length"),
        (["gpus", "--for", "--model", "gpt2"], "--for needs a value (WORKLOAD.yaml), but --model follows it"),
    ],
)
def test_errors_name_the_option_as_it_is_typed(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    assert capsys.readouterr().err.startswith(f"error: {said}")


def test_the_application_runs_under_typers_runner(predicted_workloads: list[Any], workload: str) -> None:
    result = CliRunner().invoke(app(), ["predict", workload, "--json"])
    assert result.exit_code == 0
    assert json.loads(result.stdout)["fits"] is True


@pytest.mark.parametrize(
    "spelling",
    [
        "--per-device-train-batch-size 3 --bf16 false --fp16",
        "--per_device_train_batch_size=3 --no_bf16 --fp16 True",
        "--per_device_train_batch_size 3 --fp16",
    ],
)
def test_options_override_the_file(spelling: str, workload: str, predicted_workloads: list[Any]) -> None:
    assert main(["predict", workload, *spelling.split()]) == 0
    train = predicted_workloads[0].train
    assert (train.per_device_train_batch_size, train.fp16, train.bf16) == (3, True, False)
    assert predicted_workloads[0].gpu == "t4"


def test_options_alone_describe_a_training(predicted_workloads: list[Any]) -> None:
    assert (
        main(
            [
                "predict",
                *TINY,
                "--config",
                "n_head=4",
                "--gpu",
                "v100",
                "--output_dir",
                "out",
                "--do_train",
                "--optim",
                "adafactor",
            ]
        )
        == 0
    )
    assert predicted_workloads[0].model.config == {"n_layer": 1, "n_head": 4}
    assert predicted_workloads[0].train.optim == "adafactor"


def test_stdout_contains_only_json(
    workload: str, predicted_workloads: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["predict", workload, "--json"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["schema"] == "trainatomy/prediction/1"
    assert "a library says something" in captured.err


def test_compare_keeps_the_order(
    workload: str, tmp_path: Path, predicted_workloads: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    rows = tmp_path / "rows.yaml"
    rows.write_text("model: {class: GPT2LMHeadModel}\nrows: [{name: a}, {name: b}]\n")
    assert main(["compare", str(rows), workload, "--json", "--gpu", "h100"]) == 0
    assert len(json.loads(capsys.readouterr().out)["rows"]) == 3
    assert [each.name for each in predicted_workloads] == ["a", "b", None]
    assert {each.gpu for each in predicted_workloads} == {"h100"}


@pytest.mark.parametrize(
    ("options", "gpu", "era", "published"),
    [
        ([], "v100-16gb", "2022", True),
        (["--gpu", "v100-16gb", "--era", "2022"], "v100-16gb", "2022", True),
        (["--gpu", "h200"], "h200", None, False),
        (["--era", "2022", "--gpu", "a100"], "a100", "2022", False),
    ],
)
def test_the_notebook(
    options: list[str],
    gpu: str,
    era: str | None,
    published: bool,
    predicted_workloads: list[Any],
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["compare", "notebook", *options, "--json"]) == 0
    assert [(each.gpu, each.era) for each in predicted_workloads] == [(gpu, era)] * 9
    assert (json.loads(capsys.readouterr().out)["published"] is not None) is published


def test_published_figures_are_shown_for_the_notebook(
    predicted_workloads: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compare", "notebook"]) == 0
    out = capsys.readouterr().out
    assert "14949" in out and "5363" in out


def test_check_has_a_code_of_its_own(
    workload: str, too_big: Prediction, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(trainatomy.api, "predict_training", lambda *_: too_big)
    assert main(["predict", workload, "--json"]) == 0
    capsys.readouterr()
    assert main(["predict", workload, "--json", "--check"]) == 8
    captured = capsys.readouterr()
    assert json.loads(captured.out)["fits"] is False
    assert captured.err == "error: does not fit on RTX 2060 6 GB (6.00 GiB): needs 8.00 GiB, 2.00 GiB short\n"


def test_gpus_and_models(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["gpus", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["rows"]) == len(gpus())
    assert main(["gpus"]) == 0
    listed = capsys.readouterr().out
    assert [gpu.id for gpu in gpus() if gpu.id not in listed] == []
    assert main(["gpus", "v100"]) == 0
    assert "datasheet" in capsys.readouterr().out
    assert main(["models"]) == 0
    assert "google-bert/bert-large-uncased" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["predikt"], 2, "Did you mean 'predict'"),
        (["predict", "--fp17", *TINY], 2, "--fp16"),
        (["predict", "--gpu"], 2, "--gpu"),
        (["predict", "--calibration"], 2, "trainatomy predict --help"),
        (["compare"], 2, "notebook"),
        (["predict", "missing.yaml"], 2, "missing.yaml: no such file"),
        (["predict", *TINY, "--gpu", "h1000"], 2, "h100"),
        (["compare", "notebook", "--gpu", "v1000"], 2, "v100"),
        (["predict", *TINY, "--optim", "adamv_torch"], 2, "adamw_torch"),
        (["predict", *TINY, "--per-device-train-batch-size", "0"], 2, "--per-device-train-batch-size"),
        (["predict", *TINY, "--per-device-train-batch-size", "many"], 2, "--per-device-train-batch-size"),
        (["predict", *TINY, "--fp16", "--bf16"], 2, "fp16"),
        (["predict"], 2, "--model"),
        (["compare", "notebook", "other.yaml"], 2, "cannot be combined with files"),
        (["gpus", "h1000"], 2, "h100"),
    ],
)
def test_bad_input(arguments: list[str], code: int, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert message in captured.err
    assert "Traceback" not in captured.err


@pytest.mark.parametrize(
    "kind",
    [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.TrainatomyError)],
)
def test_every_error_has_its_code(
    kind: type[errors.TrainatomyError],
    workload: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    failing(monkeypatch, kind("what was asked, what was found, what to do"))
    assert main(["predict", workload, "--json"]) == kind.exit_code
    captured = capsys.readouterr()
    message = "what was asked, what was found, what to do"
    error = {"exit_code": kind.exit_code, "kind": kind.__name__, "message": message}
    assert json.loads(captured.out) == {"schema": "trainatomy/error/1", "error": error}
    assert captured.err == "error: what was asked, what was found, what to do\n"


def test_a_bug_is_one_line_without_debug(
    workload: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    failing(monkeypatch, ZeroDivisionError("division by zero"))
    assert main(["predict", workload]) == 70
    message = capsys.readouterr().err
    assert message.count("\n") == 1 and "ZeroDivisionError: division by zero" in message and "--debug" in message
    for arguments in (["--debug", "predict", workload], ["predict", workload, "--debug"]):
        assert main(arguments) == 70
        assert "Traceback" in capsys.readouterr().err


def test_interrupted(workload: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    failing(monkeypatch, KeyboardInterrupt())
    assert main(["predict", workload]) == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_ctrl_c_in_a_separate_process() -> None:
    code = (
        "import signal, sys, time, trainatomy.api\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a process in the background has it ignored
        "def predict(*_, **__):\n    print('started', file=sys.stderr, flush=True)\n    time.sleep(30)\n"
        "trainatomy.api.predict_training = predict\n"
        "from trainatomy.cli import main\n"
        f"sys.exit(main(['predict', *{TINY}]))"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    assert process.stderr.readline() == "started\n"
    time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=20)
    assert (process.returncode, out, err) == (130, "", "interrupted\n")


@pytest.mark.parametrize("arguments", [["models", "--json"], ["gpus"], ["--help"], ["predict", "--help"]])
def test_a_broken_pipe(arguments: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as nobody:
        ran = subprocess.run([*COMMAND, *arguments], stdout=nobody, stderr=subprocess.PIPE, text=True, check=False)
    assert (ran.returncode, ran.stderr) == (141, "")


def test_output_has_no_colour_in_a_pipe() -> None:
    environment = {**os.environ, "COLUMNS": "80", "TERM": "xterm-256color"}
    ran = subprocess.run([*COMMAND, "gpus"], capture_output=True, text=True, check=True, env=environment)
    assert "\x1b" not in ran.stdout
    assert max(map(len, ran.stdout.splitlines())) <= 80
