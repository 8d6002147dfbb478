"""Fit the constants of matrix products to published times, and judge them by other tables.

    python lab/public/products.py --aiconfigurator FOLDER --neusight FOLDER [--write]

The folders are checkouts of ai-dynamo/aiconfigurator and sitar-lab/NeuSight (``sources.yaml`` says at which commits
they were read).  Products in 16 bits are fitted to the table of vLLM and judged by those of SGLang and TensorRT-LLM,
which timed the same sizes by other programs.  NeuSight's products in fp32 are only compared: constants that were fitted
to its training set were no better on its test set, nor on whole steps.  ``--write`` writes catalog/products.yaml.

A table's own bias (what it starts from: warm caches, CUDA graphs, the profiler) is what it says of an H100 and an H200,
which were measured by us, more than we do.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import yaml
from scipy.optimize import minimize

from trainatomy.catalog.calibrations import array
from trainatomy.catalog.gpus import find_gpu
from trainatomy.operators.cost.kernel import chip_of
from trainatomy.operators.cost.matmul import OWN_TILES, Kernels, ProductConstants, ProductSizes, Speed, seconds_of
from trainatomy.results.operations import Call
from trainatomy.timing.cost_model import cost_model_of, kernel_cost

HERE = Path(__file__).parent
CATALOG = HERE.parents[1] / "src" / "trainatomy" / "catalog"
FITTED, JUDGED = 700, 1500
"""Products of a table that constants are fitted to, and that they are judged by; drawn by a seed."""
START = ProductConstants(0.9, 20.0, 2.5e-6, 120.0, 3e-6, 0.9)
TIES = 0.003
"""Weight of the squared logarithms of constants over those of START: of what fits alike, the nearest counts."""
REFERENCES = ("h100-sxm", "h200")
SMALLEST, LARGEST = 512, 20_000
"""Rows and columns of a weight; batches have at least half as many rows."""


@dataclass(frozen=True)
class Table:
    """Published times of products: ``rows`` has columns batch, m, n, k and seconds."""

    name: str
    gpu: str
    kind: str
    rows: pd.DataFrame
    bias: float = 1.0

    def drawn(self, count: int) -> pd.DataFrame:
        """Return some of the rows."""
        return self.rows.sample(min(count, len(self.rows)), random_state=1)


def sources() -> Any:
    """Return what sources.yaml says."""
    return yaml.safe_load((HERE / "sources.yaml").read_text(encoding="utf-8"))


def half_tables(folder: Path) -> Iterator[Table]:
    """Yield aiconfigurator's tables of bf16 products, without their bias."""
    known = sources()["aiconfigurator"]
    found: dict[tuple[str, str], Table] = {}
    for name, gpu in known["gpus"].items():
        for framework, version in known["versions"][name].items():
            path = folder / known["path"].format(gpu=name, framework=framework, version=version)
            rows = pd.read_parquet(path)
            rows = rows[(rows.gemm_dtype == "bfloat16") & (rows.m >= SMALLEST // 2)]
            rows = rows[rows[["n", "k"]].ge(SMALLEST).all(axis=1) & rows[["n", "k"]].le(LARGEST).all(axis=1)]
            rows = rows.groupby(["m", "n", "k"], as_index=False).latency.min()
            rows = rows.assign(batch=1, seconds=rows.latency * 1e-3)
            found[name, framework] = Table(f"{framework} {version}", gpu, "half", rows)
    frameworks = {framework for _, framework in found}
    bias = {
        each: float(
            np.exp(
                np.mean(
                    [np.median(log_errors(t)) for (_, by), t in found.items() if by == each and t.gpu in REFERENCES]
                )
            )
        )
        for each in frameworks
    }
    for (_, framework), table in found.items():
        yield Table(table.name, table.gpu, table.kind, table.rows, bias[framework])


def single_tables(folder: Path) -> Iterator[Table]:
    """Yield NeuSight's tables of fp32 products: those named *train* and *test*."""
    known = sources()["neusight"]
    for name, gpu in known["gpus"].items():
        for operation in ("linear", "bmm"):
            parts = {"test": folder / known["test"].format(operation=operation)}
            if name in known["trained"]:
                parts["train"] = folder / known["train"].format(operation=operation, gpu=name)
            for part, path in parts.items():
                rows = pd.read_csv(path)
                rows = rows[(rows.Device == name) & (rows[["M", "N", "K"]].min(axis=1) >= 64)]
                rows = rows.rename(columns={"B": "batch", "M": "m", "N": "n", "K": "k"})
                rows = rows.assign(seconds=rows.Latency * 1e-3)[["batch", "m", "n", "k", "seconds"]]
                rows = rows[rows.seconds >= known["shortest"]]
                if len(rows):
                    yield Table(f"{operation}, {part}", gpu, "fp32", rows)


def call_of(kind: str, batch: int, m: int, n: int, k: int) -> Call:
    """Return the call: a linear layer, whose weight is transposed, or products of several contiguous matrices."""
    dtype = "bf16" if kind == "half" else "f32"
    if batch > 1:
        shapes = (batch, m, k), (batch, k, n), (batch, m, n)
        a, b, out = (array(dtype, *shape, storage=place) for place, shape in enumerate(shapes))
        return Call("aten::bmm", (a, b), (out,))
    a, b = array(dtype, m, k, storage=0), array(dtype, k, n, strides=(1, k), storage=1)
    return Call("aten::mm", (a, b), (array(dtype, m, n, storage=2),))


def _sizes(rows: pd.DataFrame) -> list[ProductSizes]:
    return [ProductSizes(*map(int, row)) for row in rows[["batch", "m", "n", "k"]].to_numpy()]


def log_errors(table: Table) -> Any:
    """Return the logarithms of published over predicted seconds, as the package predicts them today."""
    rows, model = table.drawn(JUDGED), cost_model_of(find_gpu(table.gpu))
    predicted = [kernel_cost(call_of(table.kind, *sizes), model).seconds for sizes in _sizes(rows)]
    return np.log(rows.seconds.to_numpy() / table.bias / predicted)


def fit(tables: Sequence[Table]) -> ProductConstants:
    """Return the constants by which the mean error of the logarithm of the tables' bf16 products is least.

    What the L2 cache holds is not read from memory: the published products ran again and again.
    """
    (gpu,) = {find_gpu(table.gpu).id for table in tables}
    chip, kind, size = chip_of(find_gpu(gpu), None), tables[0].kind, 2
    speed = Speed(float(chip.rate("bf16")), chip.multiprocessors, chip.bandwidth, chip.issue_rate)
    rows = pd.concat([table.drawn(FITTED // len(tables)) for table in tables])
    sizes, seconds = _sizes(rows), rows.seconds.to_numpy() / tables[0].bias
    memory = [max(each.elements * size - chip.l2_bytes, 0) for each in sizes]

    def loss(logs: Any) -> float:
        kernels = Kernels(ProductConstants(*np.exp(logs) * START), OWN_TILES[kind])
        predicted = [
            seconds_of.__wrapped__(kernels, speed, *each)
            for each in zip(memory, [size] * len(sizes), sizes, strict=True)
        ]
        return float(np.mean(np.abs(np.log(predicted / seconds))) + TIES * np.sum(np.square(logs)))

    simplex = np.vstack([np.zeros(len(START)), 0.4 * np.eye(len(START))])
    found = minimize(
        loss,
        np.zeros(len(START)),
        method="Nelder-Mead",
        options={"initial_simplex": simplex, "maxfev": 450, "fatol": 1e-4},
    )
    print(f"{gpu}, {kind}: mean error of the logarithm {found.fun:.3f}", file=sys.stderr)
    return ProductConstants(*(float(f"{value:.3g}") for value in np.exp(found.x) * START))


def row_of(table: Table) -> str:
    """Return a line of the page: the errors of a table's products."""
    errors = np.exp(-log_errors(table)) - 1
    sizes = np.abs(errors)
    figures = (np.median(errors), np.median(sizes), np.quantile(sizes, 0.9))
    return (
        f"| {table.gpu} | {table.kind} | {table.name} | {len(table.rows)} | "
        + " | ".join(f"{100 * value:.1f} %" for value in figures)
        + " |"
    )


def main() -> int:
    """Fit, or judge what the package predicts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--aiconfigurator", type=Path, required=True)
    parser.add_argument("--neusight", type=Path, required=True)
    parser.add_argument("--write", action="store_true", help="fit, and write catalog/products.yaml")
    asked = parser.parse_args()
    tables = [*half_tables(asked.aiconfigurator), *single_tables(asked.neusight)]
    if asked.write:
        known = sources()
        found: dict[str, dict[str, Any]] = {}
        for capability, kinds in known["fitted"].items():
            for kind, choice in kinds.items():
                chosen = [
                    t
                    for t in tables
                    if t.kind == kind and t.gpu == choice["gpu"] and t.name.startswith(tuple(choice["tables"]))
                ]
                constants = fit(chosen)._asdict()
                entry = {"gpu": choice["gpu"], "constants": constants, "source": choice["source"]}
                found.setdefault(capability, {})[kind] = entry
        text = known["header"] + yaml.safe_dump(
            {"architectures": found}, sort_keys=False, width=140, default_flow_style=None
        )
        (CATALOG / "products.yaml").write_text(text, encoding="utf-8")
        return 0
    print("| GPU | type | table | products | median | absolute | nine in ten |\n|---|---|---|--:|--:|--:|--:|")
    for table in tables:
        print(row_of(table))
    return 0


if __name__ == "__main__":
    sys.exit(main())
