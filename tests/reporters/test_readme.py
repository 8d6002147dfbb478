"""The Python code in README.md runs, and the tests named in ARCHITECTURE.md exist."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

import trainatomy

ROOT = Path(__file__).parents[2]
BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text("utf-8"), re.DOTALL)
LIVE = next(block for block in BLOCKS if "class Net" in block)


@pytest.mark.parametrize("block", BLOCKS, ids=["a workload", "a live module"])
def test_python_of_the_readme_runs(block: str, capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(block, "README.md", "exec"), {"__name__": "readme"})
    assert capsys.readouterr().out.startswith("fits ")


def test_a_live_module_is_left_as_it_was() -> None:
    import torch

    names: dict[str, Any] = {"__name__": "readme"}
    exec(compile(LIVE.partition("batch =")[0], "README.md", "exec"), names)
    module = names["Net"]()
    before = {name: (id(tensor), tensor._version, tensor.clone()) for name, tensor in module.named_parameters()}
    batch = {"x": torch.zeros(4, 1024), "y": torch.zeros(4, dtype=torch.long)}
    trainatomy.predict(module, batch=batch, optimizer="sgd", gpu="rtx-4090")
    for name, parameter in module.named_parameters():
        identity, version, values = before[name]
        assert (id(parameter), parameter._version) == (identity, version)
        assert parameter.device.type == "cpu"
        assert torch.equal(parameter, values)
        assert parameter.grad is None


def test_the_packages_are_the_layers_of_import_linter() -> None:
    table = (ROOT / "ARCHITECTURE.md").read_text("utf-8").partition("## Packages")[2].partition("\n## ")[0]
    names = re.findall(r"`(\w+)(?:/|\.py)`", "\n".join(re.findall(r"^- (`[^:]+):", table, re.MULTILINE)))
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["importlinter"]
    layer = {
        name: number for number, alike in enumerate(settings["contracts"][0]["layers"]) for name in alike.split(" | ")
    }
    assert sorted(names) == sorted(layer) and names == sorted(names, key=layer.__getitem__)


def test_the_tests_of_the_invariants_exist() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text("utf-8")
    named, file = 0, ""
    for path, test in re.findall(r"`([\w/]+\.py)?(?:::(test_\w+))?`", text.partition("## Invariants")[2]):
        file = path or file
        source = (ROOT / "tests" / file).read_text("utf-8")
        assert not test or f"def {test}(" in source, f"{file}::{test}"
        named += 1
    assert named > 15
