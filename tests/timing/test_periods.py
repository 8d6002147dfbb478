"""The mean step where steps of two kinds take turns."""

from __future__ import annotations

from dataclasses import replace

import pytest

from trainatomy.results.time import PacedStep, Time
from trainatomy.timing.step import mean_over_period

RARE = Time(1.0, (0.8, 1.5), 8, 80, "host", 0.4, 0.9, {"forward": 0.4}, 100, 100.0, 0.2, None, 50, "", "", ("aten::a",))


def test_the_mean_step_counts_each_kind_as_often_as_it_occurs() -> None:
    other = replace(
        RARE, step_seconds=0.2, bound_by="arithmetic", gpu_seconds=0.2, phases={"backward": 0.2}, flop=20, launches=10
    )
    rare, other = (
        replace(
            one,
            at_paces=(PacedStep(2.0, 2 * one.step_seconds),),
            general_rule_only=(name,),
            slow_host=PacedStep(3.0, 3 * one.step_seconds),
        )
        for one, name in ((RARE, "aten::a"), (other, "aten::b"))
    )
    found = mean_over_period(rare, other, 4)
    assert found.step_seconds == pytest.approx((1.0 + 3 * 0.2) / 4)
    assert found.at_paces == (PacedStep(2.0, pytest.approx(0.8)),)
    assert found.slow_host == PacedStep(3.0, pytest.approx(1.2))
    assert found.samples_per_second * found.step_seconds == pytest.approx(8)
    assert found.phases == {"forward": pytest.approx(0.1), "backward": pytest.approx(0.15)}
    assert (found.flop, found.launches, found.bound_by) == (40, 20, "host")
    assert found.model_flop_utilisation == pytest.approx(0.2) and found.attainable_utilisation is None
    assert found.general_rule_only == ("aten::a", "aten::b")
    assert mean_over_period(rare, other, 20).bound_by == "arithmetic"
