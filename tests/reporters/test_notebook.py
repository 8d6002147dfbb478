"""The notebook of the guides runs from its first cell to its last."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")

NOTEBOOK = Path(__file__).parents[2] / "examples" / "guide.ipynb"
SMALL = {
    "SIZES": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64},
    "LENGTH": 16,
}
"""Values of the notebook that a test replaces, for speed."""


@pytest.fixture
def notebook() -> Any:
    return nbformat.read(NOTEBOOK, as_version=4)


def assert_complete(texts: list[str]) -> None:
    """Check that the trainings are there, and that what the guides call smaller is smaller."""
    trainings = next(text for text in texts if "all together" in text)
    assert trainings.count("fits") == 6
    needs = {name.strip(): int(size.replace(",", "")) for name, size in re.findall(r"(.{24}) *([\d,]+) MiB", trainings)}
    assert needs["vanilla"] > needs["accumulation"] > needs["checkpointing"] > needs["all together"]
    assert needs["vanilla"] > max(needs["fp16"], needs["Adafactor"])


def texts(notebook: Any) -> list[str]:
    return ["".join(output.get("text", "") for output in cell.get("outputs", [])) for cell in notebook.cells]


def test_the_notebook_is_stored_with_its_outputs(notebook: Any) -> None:
    assert_complete(texts(notebook))


def test_the_cells_run(
    notebook: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Run the cells in this process, which has loaded the libraries: they are plain Python."""
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "guide"}
    printed = []
    for cell in notebook.cells:
        if cell.cell_type == "code":
            exec(compile(cell.source, NOTEBOOK.name, "exec"), names)
            printed.append(capsys.readouterr().out)
            names |= {name: value for name, value in SMALL.items() if name in names}
    assert sum(text.count("fits") for text in printed) == 7


@pytest.mark.slow  # the kernel loads the libraries once more
def test_the_notebook_runs_in_a_kernel(notebook: Any, tmp_path: Path) -> None:
    resources = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(notebook, timeout=120, kernel_name="python3", resources=resources).execute()
    assert_complete(texts(notebook))
