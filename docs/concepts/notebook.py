"""The notebook of the guides with the output of its cells, which run here one after the other."""

from __future__ import annotations

import io
import json
from contextlib import redirect_stdout
from typing import Any
from unittest import mock

from concepts.page import ROOT

NOTEBOOK = ROOT / "examples" / "guide.ipynb"


def guide() -> str:
    """Return the notebook as it is after a run from its first cell to its last, on a machine without a GPU."""
    notebook: dict[str, Any] = json.loads(NOTEBOOK.read_text("utf-8"))
    names: dict[str, Any] = {"__name__": "guide"}
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    with mock.patch("torch.cuda.is_available", return_value=False):
        for number, cell in enumerate(code, 1):
            with redirect_stdout(io.StringIO()) as printed:
                exec(compile("".join(cell["source"]), NOTEBOOK.name, "exec"), names)
            lines = printed.getvalue().splitlines(keepends=True)
            outputs = [{"name": "stdout", "output_type": "stream", "text": lines}] if lines else []
            cell.update(execution_count=number, outputs=outputs)
    return json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"
