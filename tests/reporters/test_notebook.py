"""The notebook of the guides runs from its first cell to its last."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")

NOTEBOOK = Path(__file__).parents[2] / "examples" / "guide.ipynb"


@pytest.fixture
def notebook() -> Any:
    read = nbformat.read(NOTEBOOK, as_version=4)
    assert all(not cell.get("outputs") for cell in read.cells), "clear the outputs"
    return read


def assert_complete(texts: list[str]) -> None:
    trainings = next(text for text in texts if "all together" in text)
    assert trainings.count("fits") == 6


def test_the_cells_run(
    notebook: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Run the cells in this process, which has loaded the libraries: they are plain Python."""
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "guide"}
    texts = []
    for cell in notebook.cells:
        if cell.cell_type == "code":
            exec(compile(cell.source, NOTEBOOK.name, "exec"), names)
            texts.append(capsys.readouterr().out)
    assert_complete(texts)


@pytest.mark.slow  # the kernel loads the libraries once more
def test_the_notebook_runs_in_a_kernel(notebook: Any, tmp_path: Path) -> None:
    resources = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(notebook, timeout=120, kernel_name="python3", resources=resources).execute()
    assert_complete(["".join(output.get("text", "") for output in cell.get("outputs", [])) for cell in notebook.cells])
