"""The public names exist and are imported lazily."""

from __future__ import annotations

import ast
import builtins
import inspect
import subprocess
import sys

import pytest

import trainatomy

HEAVY = ("torch", "transformers", "pydantic", "accelerate", "rich", "typer")


@pytest.mark.parametrize("name", trainatomy.__all__)
def test_every_public_name_is_there(name: str) -> None:
    assert getattr(trainatomy, name) is not None
    assert name in dir(trainatomy)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="predicted"):
        _ = trainatomy.predicted


FUNCTIONS = [name for name in trainatomy.__all__ if inspect.isfunction(getattr(trainatomy, name))]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_return_types_of_public_functions_are_public(name: str) -> None:
    annotation = ast.parse(str(inspect.signature(getattr(trainatomy, name)).return_annotation))
    named = {node.id for node in ast.walk(annotation) if isinstance(node, ast.Name)}
    assert named - {"Any", *dir(builtins)} <= set(trainatomy.__all__)


@pytest.mark.parametrize("statement", ["import trainatomy", "from trainatomy.results.prediction import Prediction"])
def test_importing_is_light(statement: str) -> None:
    code = f"import sys; {statement}; print([name for name in {HEAVY} if name in sys.modules])"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert loaded.stdout.strip() == "[]"


def test_help_needs_no_torch_and_no_schema() -> None:
    code = (
        "import sys; from trainatomy.cli import main; code = main(['--help']); "
        "print(code, [name for name in ('torch', 'transformers', 'pydantic') if name in sys.modules], file=sys.stderr)"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stderr.strip() == "0 []"
    assert "predict" in ran.stdout
