"""Write catalog/checked.yaml: what predictions for each GPU were held against that nobody had measured here.

    python lab/public/checked.py --aiconfigurator FOLDER --neusight FOLDER

Only what no figure was taken from: tables of other programs but for the cards that tell their bias, NeuSight's test set
of cards whose bandwidth its training set tells, and the half of the published steps that is held out.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import yaml
from moving import errors_of
from products import CATALOG, REFERENCES, half_tables, log_errors, sources

STEPS = Path(__file__).parents[1] / "timing" / "published.json"
HEADER = """\
# What predictions of time were held against, by GPU: published times that nothing was fitted to. Count, median and 90th
# percentile (of steps: the largest) of the absolute error. By lab/public/checked.py (lab/pages/public-kernels.md).
# products: of linear layers in bf16, by tables of aiconfigurator; moving: element-wise kernels in fp32, by NeuSight's
# test set (PyTorch 2.1); steps: whole steps of training or inference (lab/timing/published.yaml), the held-out half.
"""


def _entry(errors: Any, largest: float = 0.9) -> dict[str, Any]:
    sizes = np.abs(np.concatenate(errors))
    figures = {"median": np.median(sizes), "most": np.quantile(sizes, largest)}
    return {"count": len(sizes), **{name: round(float(value), 3) for name, value in figures.items()}}


def main() -> int:
    """Compare, and write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--aiconfigurator", type=Path, required=True)
    parser.add_argument("--neusight", type=Path, required=True)
    asked, known = parser.parse_args(), sources()
    found: dict[str, dict[str, list[Any]]] = defaultdict(lambda: defaultdict(list))
    for table in half_tables(asked.aiconfigurator):
        if not table.name.startswith("vllm") and table.gpu not in REFERENCES:
            found[table.gpu]["products"].append(np.exp(-log_errors(table)) - 1)
    every = pd.read_csv(asked.neusight / known["neusight"]["test"].format(operation="vec"))
    for name in known["neusight"]["trained"]:
        gpu = known["neusight"]["gpus"][name]
        for operation in ("mul", "relu", "gelu", "tanh"):
            rows = every[(every.Device == name) & (every.OPName == operation)]
            if len(rows):
                found[gpu]["moving"].append(errors_of(rows, gpu, operation))
    for step in json.loads(STEPS.read_text(encoding="utf-8"))["outcomes"]:
        if step["held_out"]:
            found[step["gpu"]]["steps"].append([step["predicted_seconds"] / step["published_seconds"] - 1])
    entries = {
        gpu: {kind: _entry(errors, 1.0 if kind == "steps" else 0.9) for kind, errors in kinds.items()}
        for gpu, kinds in sorted(found.items())
    }
    text = yaml.safe_dump({"gpus": entries}, sort_keys=False, width=140, default_flow_style=None)
    (CATALOG / "checked.yaml").write_text(HEADER + text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
