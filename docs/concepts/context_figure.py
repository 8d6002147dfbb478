"""The picture of docs/context.md: five figures for one run, and the memory outside PyTorch enlarged."""

from __future__ import annotations

from typing import Any

from concepts.context import FP32, RUN, figures, outside, records, shortfall, where
from concepts.drawing import AMBER, BLUE, FAINT, GREY, INK, ORANGES, PALE, area, box, line, picture, text
from concepts.page import mib
from trainatomy.catalog.gpus import find_gpu
from trainatomy.units import exact_bytes, human_bytes


def context_picture() -> str:
    """Draw docs/context.svg."""
    run = next(row for row in records("h200-held-out") if row["name"] == RUN)
    left, right, top, step, high = 180.0, 850.0, 118.0, 44.0, 28.0
    scale = (right - left) / run["nvml_used_bytes"]
    begin = left + run["idle_bytes"] * scale
    low = top + 4 * step + high
    subtitle = f"BERT-large, {RUN_SETTINGS}, at its peak on {where(run)}"
    shapes = [text(24, 36, "One run, five figures for its memory", 19, bold=True), text(24, 58, subtitle, 12, FAINT)]
    shapes += _key(left, 84, KEY) + _zoom(run, begin, outside(run) * scale, low, low + 44, left, right)
    for number, (name, _, size, _) in enumerate(reversed(figures(run))):
        y = top + number * step
        shapes += [
            text(left - 14, y + 19, name.partition(";")[0], 13, anchor="end"),
            *_bar(run, 4 - number, y, high, left, scale),
        ]
        shapes.append(text(right + 12, y + 19, human_bytes(size), 13, bold=True))
        if "nvidia-smi" in name:
            shapes.append(text(left - 14, y + 33, "nvidia-smi", 11, FAINT, "end"))
        elif "process" in name:
            shapes.append(text(right + 12, y + 33, f"{mib(shortfall())} less", 11, FAINT))
    return picture(960, int(low) + 180, f"Five figures for one run, from {human_bytes(size)} down", shapes)


KEY = (
    ("tensors and workspaces", BLUE),
    ("PyTorch's cache", PALE),
    ("context and libraries", AMBER),
    ("driver", GREY),
)
RUN_SETTINGS = "SGD with momentum, batch 5 × 300 tokens, fp32"


def _bar(run: dict[str, Any], number: int, y: float, high: float, left: float, scale: float) -> list[str]:
    """Draw the parts that figure ``number`` counts, aligned with the largest figure."""
    driver, context = run["idle_bytes"], outside(run)
    lacking = context - (run["process_bytes"] - run["peak_reserved_bytes"]) if number == 2 else 0
    cache = run["peak_reserved_bytes"] - run["peak_allocated_bytes"]
    parts = (
        ("driver", driver, 0, GREY, number < 1),
        ("context and libraries", context - lacking, lacking, AMBER, number < 3),
        ("PyTorch, allocated", run["peak_allocated_bytes"], 0, BLUE, True),
        ("PyTorch, cache", cache, 0, PALE, number < 4),
    )
    shapes, at = [], left
    for name, size, skipped, fill, counted in parts:
        at += skipped * scale
        if counted:
            shapes.append(box(at, y, size * scale, high, fill, f"{name}: {exact_bytes(size)} bytes"))
        at += size * scale
    return shapes


def _key(x: float, y: float, entries: tuple[tuple[str, str], ...]) -> list[str]:
    shapes = []
    for name, fill in entries:
        shapes += [box(x, y, 12, 12, fill), text(x + 18, y + 11, name, 12)]
        x += 34 + 6.6 * len(name)
    return shapes


def _zoom(
    run: dict[str, Any], begin: float, width: float, above: float, y: float, left: float, right: float
) -> list[str]:
    """Draw the context of the run at full width, split by what loads it."""
    context = find_gpu("h200").context()
    parts = [("first tensor", context.first_tensor_bytes), *((NAMES[name], context.loads_bytes[name]) for name in FP32)]
    scale, at = (right - left) / outside(run), left
    shapes = [
        area(((begin, above), (begin + width, above), (right, y), (left, y)), "#fdf3e7"),
        text(24, y + 18, "outside PyTorch", 13),
        text(24, y + 34, mib(outside(run)), 13, bold=True),
    ]
    for number, ((name, size), fill) in enumerate(zip(parts, ORANGES, strict=True)):
        shapes.append(box(at, y, size * scale, 30, fill, f"{name}: {exact_bytes(size)} bytes"))
        middle, deep = at + size * scale / 2, y + 48 + 20 * max(number - 1, 0)
        if number:
            shapes.append(line(((middle, y + 30), (middle, deep - 4), (middle - 6, deep - 4)), FAINT))
        label, anchor = f"{name}, {mib(size)}", "end" if number else "middle"
        shapes.append(text(middle - 10 if number else middle, deep, label, 12, INK, anchor))
        at += size * scale
    return shapes


NAMES = {
    "kernels": "PyTorch's kernels",
    "cublas": "cuBLAS in the forward thread",
    "cublas_backward": "cuBLAS in the backward thread",
    "training": "kernels of backward and optimizer",
}
