"""Constants of matrix products that were fitted to times which others published."""

from __future__ import annotations

import csv
from dataclasses import replace
from math import exp, log
from pathlib import Path
from statistics import median, quantiles

import pytest

from trainatomy.catalog.calibrations import Point, from_text, shipped
from trainatomy.catalog.gpus import find_gpu
from trainatomy.operators.cost.matmul import products_of
from trainatomy.timing.cost_model import cost_model_from, cost_model_of, kernel_cost

SAMPLE = Path(__file__).parents[1] / "data" / "published-products.csv"
HALF = "aten::mm(bf16[{m},{k}],bf16[{k},{n}|1,{k}])->bf16[{m},{n}]"
"""A linear layer: the weight is transposed."""


def seconds(gpu: str, m: int, n: int, k: int) -> float:
    return kernel_cost(from_text(HALF.format(m=m, n=n, k=k)), cost_model_of(find_gpu(gpu))).seconds


def errors(gpu: str) -> list[float]:
    with SAMPLE.open(encoding="utf-8") as file:
        rows = list(csv.DictReader(line for line in file if not line.startswith("#")))
    return [
        seconds(gpu, int(row["m"]), int(row["n"]), int(row["k"])) / (float(row["us"]) * 1e-6) - 1
        for row in rows
        if row["gpu"] == gpu
    ]


@pytest.mark.parametrize(
    ("gpu", "typical", "nine_in_ten"),
    [("a100-80gb", 0.06, 0.18), ("rtx-pro-6000-server", 0.06, 0.18), ("b200", 0.07, 0.18), ("l40s", 0.10, 0.24)],
)
def test_products_take_as_long_as_another_program_timed_them(gpu: str, typical: float, nine_in_ten: float) -> None:
    found = list(map(abs, errors(gpu)))
    assert len(found) == 48
    assert median(found) < typical
    assert quantiles(found, n=10)[-1] < nine_in_ten


def test_cards_of_an_architecture_differ_by_the_share_of_the_peak_that_they_attain() -> None:
    ada, known = find_gpu("l40s"), products_of((8, 9), "half")
    assert known is not None and known.gpu == "l40s"
    large = 8192, 8192, 8192
    alike = replace(ada, id="l4")  # held back by its power limit less than the L40S: 0.755 of the peak, not 0.70
    quicker = kernel_cost(from_text(HALF.format(m=8192, n=8192, k=8192)), cost_model_of(alike)).seconds
    assert quicker == pytest.approx(seconds("l40s", *large) * 0.70 / 0.755, rel=0.01)


def test_efficiencies_of_another_architecture_do_not_apply_and_those_of_the_card_itself_do() -> None:
    a100, h200 = find_gpu("a100-80gb"), shipped()["h200"]
    call = from_text(HALF.format(m=4096, n=4096, k=4096))
    points = tuple(
        Point(HALF.format(m=size, n=size, k=size), 1000.0 * (size / 4096) ** 3, None, 1, False)
        for size in (2048, 4096, 8192)
    )
    slower = replace(h200, points=points)
    by_other = kernel_cost(call, cost_model_from(a100, slower)).seconds
    assert by_other == pytest.approx(kernel_cost(call, cost_model_from(a100, h200)).seconds)
    own = replace(slower, environment={**h200.environment, "gpu": a100.device_name, "capability": [8, 0]})
    assert exp(abs(log(kernel_cost(call, cost_model_from(a100, own)).seconds / 1e-3))) < 1.1


def test_the_source_of_the_times_is_said() -> None:
    assert "matrix products in 16 bits as published of A100 80 GB" in cost_model_of(find_gpu("a100-40gb")).source
    assert "published" not in cost_model_of(find_gpu("h200")).source + cost_model_of(find_gpu("v100-16gb")).source


@pytest.mark.parametrize(("gpu", "share"), [("t4", 0.744), ("p100-16gb", 0.727), ("v100-16gb", 0.9)])
def test_moving_data_reaches_the_share_of_the_bandwidth_that_was_published(gpu: str, share: float) -> None:
    numbers = 2**28
    add = from_text(f"aten::add(f32[{numbers}],f32[{numbers}])->f32[{numbers}]")
    least = 12 * numbers / (find_gpu(gpu).bandwidth_bytes_per_second * share)
    assert kernel_cost(add, cost_model_of(find_gpu(gpu))).seconds == pytest.approx(least, rel=0.06)
