"""The user's functions: lookup by name, and errors that point to the user's code."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from trainatomy.errors import FactoryError, WorkloadError
from trainatomy.training import factory

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "neighbour_of_user.py").write_text("VALUE = 7\n")
    path = tmp_path / "user.py"
    path.write_text(
        "import neighbour_of_user\n\n\ndef build():\n    return neighbour_of_user.VALUE\n\n\n"
        "def broken():\n    import torch\n    return torch.zeros(2) + torch.zeros(3)\n\n\nNUMBER = 3\n"
    )
    return path


def test_a_file_can_import_its_neighbours(file: Path) -> None:
    assert factory.load(f"{file}:build", "model.factory")() == 7


def test_a_module_is_imported_by_its_name(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(file.parent)
    assert factory.load("user:build", "model.factory")() == 7


def test_an_error_shows_the_users_frame(file: Path) -> None:
    build = factory.load(f"{file}:broken", "model.factory")
    with pytest.raises(FactoryError) as error, factory.user_code("model.factory: user.py:broken"):
        build()
    text = str(error.value)
    assert f"{file}:10, in broken" in text
    assert "RuntimeError" in text
    assert "return torch.zeros(2) + torch.zeros(3)" in text
    assert "trainatomy/" not in text


@pytest.mark.parametrize(
    ("source", "words"),
    [("1 / 0\n", "ZeroDivisionError"), ("def build(:\n", "SyntaxError"), ("import not_there_at_all\n", "not_there")],
)
def test_an_error_while_importing_is_the_users(tmp_path: Path, source: str, words: str) -> None:
    path = tmp_path / "bad.py"
    path.write_text(source)
    with pytest.raises(FactoryError, match=words) as error:
        factory.load(f"{path}:build", "data.factory")
    assert f"{path}:1" in str(error.value)


@pytest.mark.parametrize(
    ("reference", "words"),
    [
        ("{file}:bild", "did you mean build"),
        ("{file}:NUMBER", "not a function"),
        ("{folder}/none.py:build", "no file"),
        ("no_such_package_anywhere.module:build", "no module"),
        ("subprocess:check_output", "belongs to Python itself"),
        ("os.path:join", "belongs to Python itself"),
    ],
)
def test_missing_names_are_workload_errors(file: Path, reference: str, words: str) -> None:
    with pytest.raises(WorkloadError, match=words):
        factory.load(reference.format(file=file, folder=file.parent), "model.factory")


@pytest.mark.parametrize("source", ["import sys\nsys.exit(0)\n", "raise SystemExit\n"])
def test_leaving_python_while_importing_is_an_error(tmp_path: Path, source: str) -> None:
    path = tmp_path / "leaves.py"
    path.write_text(source)
    with pytest.raises(FactoryError, match=r"called sys\.exit") as error:
        factory.load(f"{path}:build", "model.factory")
    assert str(path) in str(error.value)


def test_leaving_python_in_a_factory_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "leaves.py"
    path.write_text("import sys\n\n\ndef build():\n    sys.exit(0)\n")
    build = factory.load(f"{path}:build", "model.factory")
    with pytest.raises(FactoryError, match=r"model\.factory: leaves called sys\.exit\(0\)") as error:
        factory.call(build, "model.factory: leaves", ())
    assert f"{path}:5, in build" in str(error.value)


def test_a_factory_is_refused_whose_signature_does_not_fit() -> None:
    with pytest.raises(FactoryError, match=r"called with no arguments, but its signature is \(size\)"):
        factory.call(lambda size: size, "model.factory", ())
    with pytest.raises(FactoryError, match=r"called with one argument, the batch size, but its signature is \(\)"):
        factory.call(lambda: 1, "data.factory", (4,))
    assert factory.call(lambda size, extra=1: size + extra, "data.factory", (4,)) == 5
