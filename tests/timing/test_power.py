"""Power of a step, and the time that its limit costs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from trainatomy.api import predict
from trainatomy.catalog.gpus import find_gpu, gpu_from_mapping, gpus, power_of
from trainatomy.errors import WorkloadError
from trainatomy.reporters import sentences
from trainatomy.results.time import Power, Time
from trainatomy.workload.schema import Workload

WIDE = {"vocab_size": 512, "n_embd": 4096, "n_head": 32, "n_layer": 2, "n_positions": 1024}


def step(gpu: Any = "h200", **train: Any) -> Time:
    workload = Workload.from_mapping(
        {
            "loop": "pytorch", "gpu": gpu, "model": {"class": "GPT2LMHeadModel", "config": WIDE},
            "data": {"sequence_length": 1024}, "train": {"per_device_train_batch_size": 64, "bf16": True, **train},
        }
    )  # fmt: skip
    time = predict(workload).time
    assert time is not None
    return time


def test_large_products_need_more_power_than_the_limit() -> None:
    power = step().power
    assert power is not None
    assert power.watts == power.limit_watts == 700 < power.full_clock_watts
    assert power.slowdown == pytest.approx((power.full_clock_watts / 700) ** 0.5)


def test_a_lower_limit_costs_time() -> None:
    whole, halved = step(), step({"base": "h200", "power_limit_watts": 350})
    assert whole.power is not None and halved.power is not None
    assert halved.power.full_clock_watts == pytest.approx(whole.power.full_clock_watts)
    assert 1.2 < halved.step_seconds / whole.step_seconds < 2**0.5 + 0.01


def test_a_step_within_the_limit_is_as_without() -> None:
    narrow = {"gradient_checkpointing": False, "per_device_train_batch_size": 1}
    within = step(**narrow)
    assert within.power is not None
    assert within.power.slowdown == 1 and within.power.watts == within.power.full_clock_watts < 700
    unlimited = gpu_from_mapping({"power_limit_watts": 5000}, "h200")
    assert step({"base": "h200", "power_limit_watts": 5000}, **narrow).step_seconds == within.step_seconds
    assert unlimited.power_limit_watts == 5000


def test_a_limit_is_refused_where_it_would_change_nothing() -> None:
    for mapping in (
        {"gpu": {"base": "a100-80gb", "power_limit_watts": 200}},
        {"gpu": {"base": "h200", "power_limit_watts": 500}, "loop": "pytorch", "parallel": {"gpus": 2, "pp_size": 2}},
    ):
        with pytest.raises(WorkloadError, match=r"gpu\.power_limit_watts: is (not )?simulated"):
            Workload.from_mapping({"model": {"class": "LlamaForCausalLM"}, **mapping})


def test_a_report_says_what_the_limit_costs() -> None:
    assert sentences.power(Power(300.0, 606.0, 300.0, 1.42)) == (
        "of 300 W, without it 606 W: arithmetic takes 42 % longer at lower clocks"
    )
    assert sentences.power(Power(300.0, 300.0, 700.0, 1.0)) == "of 700 W"


def test_power_is_unknown_where_no_gpu_of_its_kind_was_measured() -> None:
    assert step("a100-80gb").power is None
    known = [gpu.id for gpu in gpus() if power_of(gpu) is not None]
    assert known == ["h100-sxm", "h100-96gb", "h200"]
    assert power_of(replace(find_gpu("h200"), power_limit_watts=None)) is None
