"""The two pictures of docs/time.md."""

from __future__ import annotations

from collections.abc import Callable
from math import log10

from concepts.drawing import BLUE, FAINT, INK, ORANGES, RULE, box, dot, line, picture, text
from concepts.step import BATCHES, GPU_ID, LENGTH, attainable, layer, milliseconds, predicted, timed, whole_step
from trainatomy.catalog.gpus import find_gpu
from trainatomy.operators.operator import GROUPS as PUBLISHED_GROUPS
from trainatomy.reporters.labels import GROUPS

Scale = Callable[[float], float]


def roofline_picture() -> str:
    """Draw docs/roofline.svg: the layer's three groups under the GPU's roofline, with logarithmic axes."""
    one = find_gpu(GPU_ID)
    peak, bandwidth = one.rates["fp16"], one.bandwidth_bytes_per_second
    left, right, top, bottom = 84.0, 736.0, 104.0, 424.0
    low, high, least, most = 0.1, 2000.0, 1e11, 3e15

    def x(intensity: float) -> float:
        return left + (right - left) * log10(intensity / low) / log10(high / low)

    def y(rate: float) -> float:
        return bottom - (bottom - top) * log10(rate / least) / log10(most / least)

    ridge = peak / bandwidth
    share = attainable()
    shapes = [
        text(24, 36, "Roofline of the three groups of operations", 19, bold=True),
        text(
            24,
            58,
            f"BERT-large's encoder layer, batch 8 × 512, fp16, forward and backward, predicted on {one.name}",
            12,
            FAINT,
        ),
        *_grid(x, y, (left, right, top, bottom)),
        line(((x(low), y(bandwidth * low)), (x(ridge), y(peak)), (x(high), y(peak))), INK, 2),
        line(((x(share * ridge), y(share * peak)), (x(high), y(share * peak))), FAINT, 1, "5 4"),
        text(
            x(high) - 6,
            y(peak) - 8,
            f"data sheet: {peak / 1e12:.0f} TFLOP/s; large products reach {100 * share:.0f} %",
            12,
            INK,
            "end",
        ),
        text(x(1.25), y(bandwidth * 0.9), f"data sheet: {bandwidth / 1e12:.1f} TB/s", 12, INK),
    ]
    colours = dict(zip(PUBLISHED_GROUPS, (BLUE, ORANGES[0], ORANGES[2]), strict=True))
    for group, row in whole_step(layer(GPU_ID)).items():
        assert row.intensity is not None and row.seconds
        place = x(row.intensity), y(row.flop / row.seconds)
        label = f"{100 * (row.seconds_share or 0):.0f} % of the time, {100 * row.flop_share:.2f} % of the FLOP"
        at, deep, anchor = (right - 6, 30, "end") if row.intensity > ridge else (place[0] + 13, 14, "start")
        shapes += [
            dot(*place, 7, colours[group]),
            text(at, place[1] + deep, GROUPS[group], 13, INK, anchor, bold=True),
            text(at, place[1] + deep + 16, label, 12, FAINT, anchor),
        ]
    return picture(760, 480, "Roofline of the encoder layer's three groups of operations", shapes)


def _grid(x: Scale, y: Scale, frame: tuple[float, float, float, float]) -> list[str]:
    left, right, top, bottom = frame
    shapes = []
    for intensity, name in ((0.1, "0.1"), (1, "1"), (10, "10"), (100, "100"), (1000, "1000")):
        shapes += [
            line(((x(intensity), top), (x(intensity), bottom)), "#e8ecf0"),
            text(x(intensity), bottom + 18, name, 12, FAINT, "middle"),
        ]
    for rate, name in ((1e12, "1"), (1e13, "10"), (1e14, "100"), (1e15, "1000")):
        shapes += [
            line(((left, y(rate)), (right, y(rate))), "#e8ecf0"),
            text(left - 8, y(rate) + 4, name, 12, FAINT, "end"),
        ]
    shapes += [line(((left, top), (left, bottom), (right, bottom)), RULE)]
    shapes += [
        text((left + right) / 2, bottom + 40, "FLOP per byte moved", 12, FAINT, "middle"),
        text(24, top - 10, "TFLOP/s", 12, FAINT),
    ]
    return shapes


def clocks_picture() -> str:
    """Draw docs/clocks.svg: CPU and GPU time of a step by batch size."""
    left, right, top, step = 150.0, 700.0, 118.0, 74.0
    times = [timed(predicted(batch)) for batch in BATCHES]
    scale = (right - left) / max(time.step_seconds for time in times)
    shapes = [
        text(24, 36, "CPU and GPU time of a step", 19, bold=True),
        text(
            24,
            58,
            f"BERT-base, {LENGTH} tokens, bf16, AdamW, through the Trainer, predicted on {find_gpu(GPU_ID).name}",
            12,
            FAINT,
        ),
        *_swatches(left, 84),
    ]
    for number, (batch, time) in enumerate(zip(BATCHES, times, strict=True)):
        y, end = top + number * step, left + time.step_seconds * scale
        shapes += [
            text(left - 14, y + 22, f"batch {batch}", 13, INK, "end", bold=True),
            text(left - 14, y + 38, "CPU-bound" if time.bound_by == "host" else "GPU-bound", 11, FAINT, "end"),
            box(left, y, time.host_seconds * scale, 20, ORANGES[0]),
            box(left, y + 24, time.gpu_seconds * scale, 20, BLUE),
            line(((end, y - 5), (end, y + 49)), INK, 1.5),
            text(end + 8, y + 26, milliseconds(time.step_seconds), 13, INK, bold=True),
        ]
    return picture(800, int(top + len(BATCHES) * step + 6), "CPU and GPU time of a step by batch size", shapes)


def _swatches(x: float, y: float) -> list[str]:
    shapes = []
    for name, fill in (("CPU launches", ORANGES[0]), ("GPU computes", BLUE)):
        shapes += [box(x, y, 12, 12, fill), text(x + 18, y + 11, name, 12)]
        x += 150
    return [*shapes, line(((x + 4, y - 2), (x + 4, y + 14)), INK, 1.5), text(x + 12, y + 11, "end of the step", 12)]
