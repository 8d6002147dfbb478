"""The options --html, --open, --trace and --snapshot of the commands."""

from __future__ import annotations

import json
import pickle
import webbrowser
from pathlib import Path

import pytest

import trainatomy
from trainatomy.cli import main

TINY = """\
model:
  id: google-bert/bert-base-uncased
  class: BertForSequenceClassification
  config: {num_hidden_layers: 1, hidden_size: 64, intermediate_size: 128, num_attention_heads: 2}
data: {sequence_length: 16}
train: {per_device_train_batch_size: 2}
gpu: t4
"""


@pytest.fixture
def workload(tmp_path: Path) -> str:
    file = tmp_path / "tiny.yaml"
    file.write_text(TINY)
    return str(file)


def test_predict_writes_all_files(workload: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page, trace, snapshot = (tmp_path / name for name in ("r.html", "t.json", "s.pickle"))
    options = ["--html", str(page), "--trace", str(trace), "--snapshot", str(snapshot)]
    assert main(["predict", workload, "--json", *options]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["verdict"] == "fits"  # nothing but JSON on stdout
    assert f"note: report written to {page}" in printed.err
    html = page.read_text(encoding="utf-8")
    assert 'id="chart-timeline"' in html and 'id="chart-roofline"' in html
    assert "The command that made this report" in html
    assert json.loads(trace.read_bytes())["traceEvents"]
    assert pickle.loads(snapshot.read_bytes())["segments"]


def test_compare_and_ops_write_reports(workload: str, tmp_path: Path) -> None:
    page = tmp_path / "r.html"
    assert main(["compare", workload, "--sweep", "per_device_train_batch_size=1,2", "--html", str(page)]) == 0
    assert "2 of 2 predicted training runs fit." in page.read_text(encoding="utf-8")
    assert main(["ops", workload, "--html", str(page)]) == 0
    assert 'id="chart-groups"' in page.read_text(encoding="utf-8")


def test_a_sweep_needs_no_file(capsys: pytest.CaptureFixture[str]) -> None:
    model = ["--model-class", "BertForMaskedLM", "--config", "num_hidden_layers=1", "--config", "hidden_size=24"]
    model += ["--sequence-length", "16", "--gpu", "t4"]
    assert main(["compare", *model, "--sweep", "per_device_train_batch_size=1,2", "--json"]) == 0
    names = [row["name"] for row in json.loads(capsys.readouterr().out)["rows"]]
    assert names == ["per_device_train_batch_size=1", "per_device_train_batch_size=2"]
    assert main(["compare", "--sweep", "per_device_train_batch_size=1,2"]) == 2
    assert "no model: give --model" in capsys.readouterr().err


def test_a_training_that_does_not_fit_still_has_its_report(workload: str, tmp_path: Path) -> None:
    page = tmp_path / "r.html"
    small = Path(workload).with_name("small.yaml")
    small.write_text(TINY.replace("gpu: t4", "gpu: {base: t4, memory_bytes: 340 MiB}"))
    assert main(["predict", str(small), "--check", "--html", str(page)]) == 8
    assert "does not fit" in page.read_text(encoding="utf-8")


def test_open_opens_the_report(workload: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    monkeypatch.setattr(webbrowser, "open", lambda address: bool(opened.append(address)) or True)
    assert main(["predict", workload, "--open"]) == 0
    (address,) = opened
    assert address.startswith("file://") and Path(address.removeprefix("file://")).is_file()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--html", "report.pdf"], "must be .html"),
        (["--html", "no-such-folder/r.html"], "no-such-folder"),
        (["--trace", "no-such-folder/t.json"], "no-such-folder"),
    ],
)
def test_impossible_files_are_refused_at_once(
    workload: str, options: list[str], text: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainatomy.api, "predict_training", None)
    assert main(["predict", workload, *options]) == 2
    assert text in " ".join(capsys.readouterr().err.split())


def test_history_as_openmetrics(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "records"
    folder.mkdir()
    assert main(["history", "--records", str(folder), "--openmetrics"]) == 0
    assert capsys.readouterr().out.endswith("# EOF\n")
    assert main(["history", "--records", str(folder), "--openmetrics", "--json"]) == 2
