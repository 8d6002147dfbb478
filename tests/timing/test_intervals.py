"""The interval of a step: factors where the GPU bounds it, a slower host where the CPU does."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from trainatomy.catalog.calibrations import from_text
from trainatomy.catalog.files import read_yaml
from trainatomy.catalog.gpus import find_gpu
from trainatomy.catalog.machines import reference_host
from trainatomy.reporters import sentences
from trainatomy.results.operations import Operation, Operations
from trainatomy.results.time import PacedStep, Time
from trainatomy.timing import step
from trainatomy.timing.intervals import interval_basis, interval_seconds, slow_pace
from trainatomy.timing.step import RankStep, predict_step_time

DOCS = Path(__file__).parents[2] / "docs"
KNOWN = read_yaml("intervals.yaml")
SMALL, LARGE = (
    "aten::add.Tensor(f32[8], f32[8])->f32[8]",
    "aten::mm(bf16[16384,16384], bf16[16384,16384])->bf16[16384,16384]",
)


def time_of(text: str, gpu: str = "h200") -> Time:
    """Predict 200 operations in a row."""
    operations = Operations(calls=(from_text(text),), operations=(Operation(0, 0, "forward", "", 0, 1),) * 200)
    rank_step = RankStep(operations, find_gpu(gpu), loop="inference", tf32=None, samples=1)
    return predict_step_time(rank_step, tokens_per_sample=None)


def test_only_steps_that_wait_for_the_cpu_may_take_as_long_as_on_a_slow_host() -> None:
    small, large = time_of(SMALL), time_of(LARGE)
    assert small.slow_host is not None and small.bound_by == "host" and large.bound_by == "arithmetic"
    assert small.slow_host.step_seconds == pytest.approx(slow_pace() * small.step_seconds, rel=0.02)
    assert small.interval_seconds[1] == pytest.approx(KNOWN["hosts"]["beyond"] * small.slow_host.step_seconds)
    assert large.interval_seconds == pytest.approx([large.step_seconds * end for end in KNOWN["calibrated"]["gpu"]])


def test_the_slow_host_is_named_where_it_makes_a_step_longer() -> None:
    small, large = sentences.slow_host(time_of(SMALL)), sentences.slow_host(time_of(LARGE))
    assert small is not None and f"{slow_pace():.1f} times as long" in small[1] and large is None
    assert "without other work" in sentences.host(time_of(SMALL))


def test_a_host_that_was_calibrated_is_not_taken_for_a_slow_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step, "_host_section", lambda calibration: {"reference": reference_host().id})
    found = time_of(SMALL)
    assert found.slow_host is None
    assert found.interval_seconds == pytest.approx([found.step_seconds * end for end in KNOWN["calibrated"]["host"]])
    assert "without other work" not in sentences.host(found)


def test_an_interval_is_never_narrower_than_the_factors_say() -> None:
    quick = PacedStep(slow_pace(), 1.0)
    assert interval_seconds(1.0, quick, "host", "uncalibrated") == tuple(KNOWN["uncalibrated"]["host"])
    slow = replace(quick, step_seconds=3.0)
    assert interval_seconds(1.0, slow, "host", "uncalibrated")[1] == 3.0 * KNOWN["hosts"]["beyond"]


def test_convolutions_widen_the_interval_on_gpus_without_a_calibration() -> None:
    convolution = "aten::convolution(f16[256,256,56,56],f16[256,256,3,3])->f16[256,256,56,56];padding=[1, 1]"
    for gpu, basis in (("rtx-4090", KNOWN["uncalibrated"]["convolutions"]), ("h200", KNOWN["calibrated"]["gpu"])):
        found = time_of(convolution, gpu)
        assert found.bound_by == "arithmetic"
        assert found.interval_seconds == pytest.approx([found.step_seconds * end for end in basis])
    product = time_of(LARGE, "rtx-4090")
    assert product.interval_seconds == pytest.approx(
        [product.step_seconds * end for end in KNOWN["uncalibrated"]["gpu"]]
    )
    assert interval_basis("host", "uncalibrated", 1.0) == "host"


def test_the_page_on_the_pace_of_hosts_says_how_far_the_interval_reaches() -> None:
    page = " ".join((DOCS / "run-conditions.md").read_text(encoding="utf-8").split())
    hosts = KNOWN["hosts"]
    assert f"reaches to {hosts['beyond']} times the step on a host that takes {hosts['pace']} times as long" in page
