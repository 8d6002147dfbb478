"""Add the kernels that ``quantised_on_gpu.py`` timed to a calibration, as the calls that a simulation writes.

``python benchmarks/timing/quantised_points.py records/quantised-h200.jsonl.gz CALIBRATION.json``
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))

from trainatomy.measurement.calibration.calibrate import write

_SHORT = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}
_BLOCK = 64
"""Weights that share a scale."""


def points(lines: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the calibration points in the lines of a file."""
    for line in lines:
        if line["part"] != "kernels" or "error" in line:
            continue
        for call, kernel in calls(line):
            found = [us for name, (_, us) in line["kernels"].items() if kernel in name]
            if len(found) == 1:
                yield {"call": f"bitsandbytes::{call}->", "us": found[0], "kernels": 1}


def calls(line: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the calls of a timed work, each with a part of the name of its kernel."""
    rows, columns, length = line["rows"], line["columns"], line.get("length")
    count = rows * columns
    packed, scales = f"u8[{count // 2},1]", count // _BLOCK
    if line["work"] == "int8":
        data, product = f"i8[{length},{columns}]", f"i32[{length},{rows}]"
        yield f"int8_vectorwise_quant(f16[{length},{columns}],{data}!,f32[{length}]!)", "kInt8VectorQuant"
        yield f"int8_linear_matmul({data},i8[{rows},{columns}],{product}!)", "gemm_s8"
        yield f"int8_mm_dequant({product},f32[{length}],f32[{rows}],f16[{length},{rows}]!)", "kdequant_mm_int32"
        return
    kind = _SHORT[line["dtype"]]
    if line["work"] == "gemm_4bit":
        operands = f"{kind}[{length},{columns}],{packed},f32[{scales}],{kind}[{length},{rows}]!"
        yield f"gemm_4bit({operands})", "gemm_4bit_"
    elif line["work"] == "quantize_4bit":
        yield f"quantize_4bit({kind}[{rows},{columns}],f32[{scales}]!,{packed}!)", "kQuantizeBlockwise"
    elif line["double"]:
        outer = f"u8[{scales}],f32[256],f32[{-(-scales // 256)}],f32[{scales}]!"
        yield f"dequantize_blockwise({outer})", "kDequantizeBlockwise<float, 512, 64, 8, 0>"
    else:
        yield f"dequantize_4bit({packed},f32[{scales}],{kind}[{rows},{columns}]!)", "kDequantizeBlockwise"


def main() -> None:
    """Add the points that a calibration does not have."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("calibration", type=Path)
    options = parser.parse_args()
    with gzip.open(options.file, "rt", encoding="utf-8") as file:
        found = list(points([json.loads(line) for line in file]))
    content = json.loads(options.calibration.read_text(encoding="utf-8"))
    kernels = content["sections"]["kernels"]
    known = {point["call"] for point in kernels["points"]}
    new = list({point["call"]: point for point in found if point["call"] not in known}.values())
    kernels["points"] += new
    kernels["added"] = [*kernels.get("added", []), {"points": len(new), "from": options.file.name}]
    write(content, options.calibration)
    print(f"{len(new)} points added")


if __name__ == "__main__":
    main()
