"""Compare kernels that move data with published times: ``python lab/public/moving.py --neusight FOLDER``.

Prints which share of the data sheet's bandwidth adding large tensors reaches (``attained`` in efficiency.yaml), and the
errors of the predicted times of NeuSight's test set.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from products import sources

from trainatomy.catalog.calibrations import array
from trainatomy.catalog.gpus import find_gpu
from trainatomy.results.operations import Call
from trainatomy.timing.cost_model import cost_model_of, kernel_cost

OPERATIONS = ("add", "mul", "relu", "gelu", "tanh", "softmax", "ln")
LONG = 0.3
"""Milliseconds from which an addition of tensors tells the bandwidth."""


def call_of(operation: str, rows: int, columns: int) -> Call:
    """Return the call of an operation on a matrix in fp32."""
    x, y, out = (array("f32", rows, columns, storage=place) for place in range(3))
    if operation == "ln":
        weight, bias = (array("f32", columns, storage=place) for place in (3, 4))
        mean, deviation = (array("f32", rows, 1, storage=place) for place in (5, 6))
        return Call("aten::native_layer_norm", (x, weight, bias), (out, mean, deviation), (columns,))
    if operation == "softmax":
        return Call("aten::_softmax", (x,), (out,), numbers=(("dim", "-1"),))
    return Call(f"aten::{operation}", (x, y) if operation in ("add", "mul") else (x,), (out,))


def share_of(rows: pd.DataFrame, gpu: str) -> float:
    """Return the share of the data sheet's bandwidth that additions of large tensors reach."""
    long = rows[(rows.OPName == "add") & (rows.Latency > LONG)]
    speed = 12 * long.B * long.H / (long.Latency * 1e-3)
    return float((speed / find_gpu(gpu).bandwidth_bytes_per_second).median())


def errors_of(rows: pd.DataFrame, gpu: str, operation: str) -> Any:
    """Return predicted over published seconds of the rows of an operation, less 1."""
    model = cost_model_of(find_gpu(gpu))
    sizes = zip(rows.B, rows.H, strict=True)
    predicted = [kernel_cost(call_of(operation, *each), model).seconds for each in sizes]
    return np.array(predicted) / (rows.Latency.to_numpy() * 1e-3) - 1


def main() -> int:
    """Print the shares and the errors of every GPU."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--neusight", type=Path, required=True)
    folder, known = parser.parse_args().neusight, sources()["neusight"]
    every = pd.read_csv(folder / known["test"].format(operation="vec"))
    print(f"| GPU | share, trained | share, test | {' | '.join(OPERATIONS)} |\n|---{'|--:' * (len(OPERATIONS) + 2)}|")
    for name, gpu in known["gpus"].items():
        rows, trained = every[every.Device == name], ""
        if not len(rows):
            continue
        if name in known["trained"]:
            trained = f"{share_of(pd.read_csv(folder / known['train'].format(operation='add', gpu=name)), gpu):.3f}"
        cells = []
        for operation in OPERATIONS:
            some = rows[rows.OPName == operation]
            if not len(some):
                cells.append("")
                continue
            errors = errors_of(some, gpu, operation)
            cells.append(f"{100 * np.median(errors):+.0f}, {100 * np.quantile(np.abs(errors), 0.9):.0f} %")
        print(f"| {gpu} | {trained} | {share_of(rows, gpu):.3f} | {' | '.join(cells)} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
