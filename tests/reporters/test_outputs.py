"""Files to write are checked by every command before its work begins."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from trainatomy.cli import main
from trainatomy.cli.app import COMMANDS, load
from trainatomy.cli.options import check_writable

GPT2 = ["--model", "gpt2", "--gpu", "t4"]
WITH_FILES = [
    (["predict", *GPT2], "--html", "r.html"),
    (["predict", *GPT2], "--trace", "t.json"),
    (["predict", *GPT2], "--snapshot", "s.pickle"),
    (["predict", *GPT2], "--plot", "p.svg"),
    (["fit", *GPT2], "--output", "w.yaml"),
    (["fit", *GPT2], "--plot", "p.svg"),
    (["fit", *GPT2], "--html", "r.html"),
    (["compare", "notebook"], "--plot", "p.svg"),
    (["compare", "notebook"], "--html", "r.html"),
    (["ops", *GPT2], "--html", "r.html"),
    (["measure", *GPT2], "--trace", "t.tape"),
    (["measure", *GPT2], "--html", "r.html"),
    (["calibrate"], "--output", "c.json"),
    (["show", "last"], "--html", "r.html"),
    (["run"], "--script-output", "out.txt"),
    (["run"], "--trace", "t.json"),
    (["run"], "--html", "r.html"),
]


def command(arguments: list[str], option: str, file: Path) -> list[str]:
    script = ["train.py"] if arguments[0] == "run" else []
    return [*arguments, option, str(file), *script]


@pytest.mark.parametrize(("arguments", "option", "name"), WITH_FILES)
def test_a_folder_that_is_not_there_is_found_at_once(
    arguments: list[str],
    option: str,
    name: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / "missing" / name
    assert main(command(arguments, option, file)) == 2
    assert f"error: {option} {file}: there is no folder {file.parent}\n" in capsys.readouterr().err


def test_every_option_that_takes_a_file_to_write_is_checked() -> None:
    names = {"--html", "--trace", "--snapshot", "--plot", "--output", "--script-output"}
    found = {
        (entry.name, option.opts[0]): option.callback is not None
        for entry in COMMANDS
        for option in load(entry.name).params
        if option.opts[0] in names
    }
    assert all(found.values()) and {(arguments[0], option) for arguments, option, _ in WITH_FILES} <= set(found)


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda folder: (folder / "file").touch() or folder / "file" / "r.html", "is no folder"),
        (lambda folder: folder, "is a folder; name a file"),
    ],
)
def test_what_else_is_no_place_for_a_file(make: Any, problem: str, tmp_path: Path) -> None:
    with pytest.raises(Exception, match=problem):
        check_writable("--html", make(tmp_path))


def test_files_without_permission_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "old.html").touch()
    monkeypatch.setattr("os.access", lambda *_: False)  # tests may run as root, who may write everywhere
    for name, problem in (("old.html", "the file cannot be written"), ("new.html", "folder .* cannot be written")):
        with pytest.raises(Exception, match=problem):
            check_writable("--html", tmp_path / name)


def test_a_file_that_can_be_written_is_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "old.html").touch()
    monkeypatch.chdir(tmp_path)
    for name in ("old.html", "new.html", tmp_path / "new.html", "/dev/null"):
        check_writable("--html", Path(name))
