"""Write catalog/checked.yaml: what predictions for each GPU were held against that nobody had measured here.

    python lab/public/checked.py --aiconfigurator FOLDER --neusight FOLDER
    python lab/public/checked.py    whole steps only; the rest stays

Only what no figure was taken from: tables of other programs but for the cards that tell their bias, NeuSight's test set
of cards whose bandwidth its training set tells, and published steps: the half of lab/timing/published.yaml that is held
out and all of published_steps.yaml, where the GPU bounds them.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import yaml
from moving import errors_of
from products import CATALOG, REFERENCES, half_tables, log_errors, sources

STEPS = Path(__file__).parents[1] / "timing"
HEADER = """\
# What predictions of time were held against, by GPU: published times that nothing was fitted to. Count, median and 90th
# percentile of the absolute error. By lab/public/checked.py (lab/pages/public-kernels.md).
# products: of linear layers in bf16, by tables of aiconfigurator; moving: element-wise kernels in fp32, by NeuSight's
# test set (PyTorch 2.1); steps: whole steps of training or inference that the GPU bounds (the held-out half of
# lab/timing/published.yaml, and lab/pages/published-steps.md).
"""


def _entry(errors: Any) -> dict[str, Any]:
    sizes = np.abs(np.concatenate(errors))
    figures = {"median": np.median(sizes), "most": np.quantile(sizes, 0.9)}
    return {"count": len(sizes), **{name: round(float(value), 3) for name, value in figures.items()}}


def step_errors() -> Iterator[tuple[str, float]]:
    """Yield the card and the error of each published step that the GPU bounds and that nothing was fitted to."""
    old = json.loads((STEPS / "published.json").read_text(encoding="utf-8"))["outcomes"]
    new = json.loads((STEPS / "published_steps.json").read_text(encoding="utf-8"))["steps"]
    for step in (*(one for one in old if one["held_out"]), *new):
        if step["bound_by"] != "host":
            yield step["gpu"], step["predicted_seconds"] / step["published_seconds"] - 1


def kernel_errors(aiconfigurator: Path, neusight: Path) -> Iterator[tuple[str, str, Any]]:
    """Yield the card, the kind and the errors of tables of kernels."""
    known = sources()
    for table in half_tables(aiconfigurator):
        if not table.name.startswith("vllm") and table.gpu not in REFERENCES:
            yield table.gpu, "products", np.exp(-log_errors(table)) - 1
    every = pd.read_csv(neusight / known["neusight"]["test"].format(operation="vec"))
    for name in known["neusight"]["trained"]:
        gpu = known["neusight"]["gpus"][name]
        for operation in ("mul", "relu", "gelu", "tanh"):
            rows = every[(every.Device == name) & (every.OPName == operation)]
            if len(rows):
                yield gpu, "moving", errors_of(rows, gpu, operation)


def main() -> int:
    """Compare, and write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--aiconfigurator", type=Path)
    parser.add_argument("--neusight", type=Path)
    asked, path = parser.parse_args(), CATALOG / "checked.yaml"
    found: dict[str, dict[str, list[Any]]] = defaultdict(lambda: defaultdict(list))
    for gpu, error in step_errors():
        found[gpu]["steps"].append([error])
    kept = {} if asked.aiconfigurator else yaml.safe_load(path.read_text(encoding="utf-8"))["gpus"]
    if asked.aiconfigurator:
        for gpu, kind, errors in kernel_errors(asked.aiconfigurator, asked.neusight):
            found[gpu][kind].append(errors)
    entries = {
        gpu: {
            kind: _entry(found[gpu][kind]) if found[gpu][kind] else kept[gpu][kind]
            for kind in ("products", "moving", "steps")
            if found[gpu][kind] or (kind != "steps" and kind in kept.get(gpu, {}))
        }
        for gpu in sorted({*found, *kept})
    }
    text = yaml.safe_dump(
        {"gpus": {gpu: kinds for gpu, kinds in entries.items() if kinds}},
        sort_keys=False, width=140, default_flow_style=None,
    )  # fmt: skip
    path.write_text(HEADER + text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
