"""The time of bitsandbytes' kernels for quantised weights, beside what an H200 measured."""

from __future__ import annotations

from dataclasses import replace
from statistics import median

import pytest

from trainatomy.catalog.calibrations import Point, from_text, shipped
from trainatomy.catalog.gpus import find_gpu
from trainatomy.operators.cost import kernel_work
from trainatomy.timing.cost_model import cost_model_from, cost_model_of, kernel_cost

CALIBRATION, GPU = shipped()["h200"], find_gpu("h200")
MEASURED = [
    point
    for point in CALIBRATION.points
    if point.call.name.startswith("bitsandbytes::") and "optimizer" not in point.call.name
]


def error_without(left_out: Point) -> float:
    """Return the error of a kernel predicted from the other shapes alone."""
    others = [point for point in MEASURED if point.hot != left_out.hot]
    model = cost_model_from(GPU, replace(CALIBRATION, points=others))
    return abs(kernel_cost(left_out.call, model).seconds * 1e6 / left_out.hot - 1)


def test_kernels_that_are_left_out_are_predicted_from_the_others() -> None:
    errors = sorted(map(error_without, MEASURED))
    assert len(errors) == 85
    assert median(errors) < 0.1
    assert errors[round(0.9 * len(errors))] < 0.35


def test_outputs_of_kernels_are_written_and_not_read() -> None:
    call = from_text("bitsandbytes::dequantize_4bit(u8[8388608,1],f32[262144],bf16[4096,4096]!)->")
    work = kernel_work(call, cost_model_of(GPU).chip)
    assert work.bytes == 8388608 + 4 * 262144 + 2 * 4096**2


@pytest.mark.parametrize(("gpu", "rows", "least"), [("h200", 1, 3), ("h200", 4, 8), ("a100-80gb", 4, 3)])
def test_few_rows_times_packed_weights_take_longer_than_reading_them(gpu: str, rows: int, least: float) -> None:
    call = from_text(f"bitsandbytes::gemm_4bit(bf16[{rows},5120],u8[13107200,1],f32[409600],bf16[{rows},5120]!)->")
    model = cost_model_of(find_gpu(gpu))
    cost = kernel_cost(call, model)
    assert cost.seconds > least * cost.bytes_seconds
