"""The commands history, show and diff."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from trainatomy.cli import main
from trainatomy.records.create import to_document
from trainatomy.results.record import Record

DATA = str(Path(__file__).parent / "data")
RECORDS = ["--records", DATA]


def test_history(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["history", *RECORDS, "--where", "train.fp16=true", "--where=train.bf16=false", "--gpu", "h200"]) == 0
    drawn = capsys.readouterr().out
    assert "1 record in" in drawn and "notebook-fp16" in drawn and "notebook-ckpt" not in drawn


def test_history_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["history", *RECORDS, "--last", "2", "--json"]) == 0
    value = json.loads(capsys.readouterr().out)
    assert value["schema"] == "trainatomy/history/1"
    assert [row["name"] for row in value["records"]] == ["notebook-ckpt", "notebook-fp16"]
    assert value["skipped"] == []


def test_the_environment_names_the_folder(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINATOMY_RECORDS", DATA)
    assert main(["show", "last"]) == 0
    assert "notebook-fp16" in capsys.readouterr().out


def test_show_draws_the_page_with_command_and_date(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "3da9", *RECORDS]) == 0
    drawn = capsys.readouterr().out
    assert "2026-11-21 10:30:00 UTC" in drawn
    assert "trainatomy measure notebook-vanilla.yaml" in drawn
    assert "580.159.04" in drawn and "8.36 GiB" in drawn


def test_show_as_json_is_the_file(capsys: pytest.CaptureFixture[str], vanilla: Record) -> None:
    assert main(["show", f"{DATA}/{vanilla.id}.json", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(to_document(vanilla))


def test_diff(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diff", "3da9", "c6fa", *RECORDS]) == 0
    assert capsys.readouterr().out.startswith("B uses 1.01 GiB less")
    assert main(["diff", "3da9", "c6fa", *RECORDS, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["changes"][0]["name"] == "train.fp16"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["show", "nothing", *RECORDS], "error: There is no record 'nothing' in "),
        (["show", "2026", *RECORDS], "matches 3 records"),
        (["diff", "last", "last~7", *RECORDS], "There is no last~7"),
        (["history", "--records", "/nowhere/at/all"], "There is no folder /nowhere/at/all"),
        (["history", "--records", "gopher://x"], "is not a folder of records"),
        (["show", f"{DATA}/../test_cli.py"], "There is no file"),
    ],
)
def test_errors_go_to_stderr(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert "Traceback" not in err


def test_a_condition_that_no_record_can_meet_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["history", *RECORDS, "--where", "train.fp61=true"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "did you mean train.fp16" in err
    assert "Traceback" not in err


def test_without_records_the_default_folder_is_just_empty(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TRAINATOMY_RECORDS", raising=False)
    monkeypatch.chdir(tmp_path)
    assert main(["history"]) == 0
    assert "No matching records in trainatomy-records" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", [["history"], ["show", "last"], ["diff", "last~1", "last"]])
def test_records_are_read_without_torch(command: list[str]) -> None:
    code = (
        "import sys; from trainatomy.cli import main; code = main(sys.argv[1:]); "
        "print(code, [name for name in ('torch', 'transformers') if name in sys.modules], file=sys.stderr)"
    )
    ran = subprocess.run([sys.executable, "-c", code, *command, *RECORDS], capture_output=True, text=True, check=True)
    assert ran.stderr.strip() == "0 []"
