"""Notebooks run as scripts: their code cells, without lines for IPython or a shell."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from trainatomy.errors import FactoryError, WorkloadError
from trainatomy.reporters.script_sentences import script_sentences
from trainatomy.scripts.command import read_command
from trainatomy.scripts.job import Job, Outcome
from trainatomy.scripts.notebook import read_notebook, source_of
from trainatomy.scripts.run import run_job

CELLS = [
    "%matplotlib inline\n!pip install -q \\\n  torch\nimport torch",
    "%%bash\nls -l\nrm -rf /",
    "model = torch.nn.Linear(16, 16).cuda()\noptimizer = torch.optim.SGD(model.parameters(), 0.1)\nmodel?",
    "%%time\nif True:\n    %env A=b\n    files = !ls\ndisplay(files, get_ipython().system('ls'))\n"
    "wide = (100\n    % 7)\nassert open('beside.txt').read() == 'here'",
    "for step in range(9):\n    model(torch.ones(4, 16, device='cuda')).sum().backward()\n    optimizer.step()\n"
    "    optimizer.zero_grad()",
]


def notebook(path: Path, cells: list[Any], **metadata: Any) -> Path:
    listed = [{"cell_type": "markdown", "source": ["# Title"]}]
    listed += [{"cell_type": "code", "source": cell.splitlines(keepends=True), "outputs": [None]} for cell in cells]
    path.write_text(json.dumps({"cells": listed, "metadata": metadata, "nbformat": 4}))
    return path


def run(path: Path) -> Outcome:
    return run_job(Job(read_command([str(path)]), ("t4",)), "t4")


def test_a_notebook_trains_in_its_folder(tmp_path: Path) -> None:
    (tmp_path / "beside.txt").write_text("here")
    path = notebook(tmp_path / "train.ipynb", CELLS)
    found = run(path)
    assert found.message == ""
    assert found.prediction is not None and found.prediction.script is not None
    assert (found.prediction.script.ending, found.prediction.script.steps) == ("steps", 3)
    assert found.prediction.name == "train.ipynb"
    said = "\n".join(script_sentences(found.prediction.script))
    left_out = ("%matplotlib inline", "!pip install -q \\", "%%bash", "model?", "%%time", "%env A=b", "files = !ls")
    assert f"were left out: {', '.join(f'`{line}`' for line in left_out)}" in said


def test_an_error_names_its_cell_and_line(tmp_path: Path) -> None:
    found = run(notebook(tmp_path / "a.ipynb", ["import torch", "\n\nraise ValueError('no')"]))
    assert found.message == "a.ipynb cell 2:3 raised ValueError: no"
    assert found.exit_code == FactoryError.exit_code
    assert run(notebook(tmp_path / "a.ipynb", ["x = ("])).message.startswith("a.ipynb cell 1:1 raised SyntaxError")


def test_lines_for_a_shell_are_no_code(tmp_path: Path) -> None:
    path = notebook(tmp_path / "a.ipynb", ["%pip install peft\nimport timm", "from transformers import Trainer"])
    assert source_of(path) == "pass\nimport timm\nfrom transformers import Trainer"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "cannot be read as a notebook"),
        ("[]", "cannot be read as a notebook"),
        ('{"cells": [{"cell_type": "code"}]}', "jupyter nbconvert --to script a.ipynb"),
        ('{"cells": [], "metadata": {"language_info": {"name": "R"}}}', "a notebook of R"),
    ],
)
def test_what_is_no_notebook_of_python_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "a.ipynb"
    path.write_text(text)
    with pytest.raises(WorkloadError, match=message):
        read_notebook(path)
