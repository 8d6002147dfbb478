"""How fast a host is: the trainings that tell, the factors that come of them, and what the clock makes of those."""

from __future__ import annotations

from dataclasses import replace
from statistics import geometric_mean

import pytest

from trainatomy.clock.issue import PARTS, from_microseconds, host_seconds
from trainatomy.clock.step import time_of
from trainatomy.facts.calibrations import Calibration
from trainatomy.facts.cards import card
from trainatomy.facts.hosts import reference_host
from trainatomy.gpu.calibration import expected, host
from trainatomy.results.operations import Operations
from trainatomy.world.simulate import simulate


@pytest.fixture(scope="module")
def encoder() -> Operations:
    workload = expected.trainings()[0]
    return simulate(workload, card("h200")).operations


def calibration(factors: dict[str, float], reference: str) -> Calibration:
    environment = {"gpu": "NVIDIA H200", "date": "2026-11-21", "capability": [9, 0]}
    return Calibration(environment, (), {"host": {"reference": reference, "factors": factors}}, "by hand")


def seconds(operations: Operations, found: Calibration | None) -> float:
    time = time_of(
        operations, card("h200"), loop="trainer", tf32=False, samples=1, tokens_per_sample=16, calibration=found
    )
    assert time.bound_by == "host"
    return time.host_seconds


def test_factors_are_means_of_ratios_by_part() -> None:
    measured = [{"forward": 2000.0, "backward": 3000.0, "optimizer": 90.0}, {"forward": 8000.0, "backward": 3000.0}]
    reference = [{"forward": 1000.0, "backward": 3000.0, "optimizer": 90.0}, {"forward": 1000.0, "backward": 6000.0}]
    assert host.factors(measured, reference) == {"graph": 4.0, "backward": round(geometric_mean((1, 0.5)), 3)}


def test_a_slower_host_makes_a_slower_step(encoder: Operations) -> None:
    known = reference_host()
    same = seconds(encoder, calibration(dict.fromkeys(PARTS, 1.0), known.id))
    slow = seconds(encoder, calibration(dict.fromkeys(PARTS, 2.0), known.id))
    costs = from_microseconds(known.microseconds)
    waits = same - sum(host_seconds(encoder, costs, "trainer").values())
    assert slow - waits == pytest.approx(2 * (same - waits), rel=1e-6)


def test_without_factors_the_host_is_as_on_a_typical_occasion(encoder: Operations) -> None:
    known = reference_host()
    typical = calibration(dict.fromkeys(PARTS, known.typical), known.id)
    assert seconds(encoder, None) == pytest.approx(seconds(encoder, typical))
    assert min(known.occasions) < known.typical < max(known.occasions)
    assert replace(known, occasions=(1.0, 4.0)).typical == pytest.approx(2.0)


def test_a_part_without_a_factor_is_as_on_a_typical_occasion(encoder: Operations) -> None:
    known = reference_host()
    some = calibration({"graph": known.typical}, known.id)
    assert seconds(encoder, some) == pytest.approx(seconds(encoder, None))
    empty = replace(some, sections={"host": {"reference": known.id}})
    assert seconds(encoder, empty) == pytest.approx(seconds(encoder, None))


def test_factors_against_another_reference_do_not_count(encoder: Operations) -> None:
    other = calibration(dict.fromkeys(PARTS, 3.0), "another")
    assert seconds(encoder, other) == pytest.approx(seconds(encoder, None))


def test_trainings_run_and_every_phase_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "TIMED", 2)
    plain = [one for one in expected.trainings() if one.loop == "pytorch"]
    assert plain
    (steps,) = host.run_trainings(plain, device="cpu")
    assert len(steps) == 2 * host.ROUNDS
    assert all(step[phase] > 0 for step in steps for phase in ("forward", "backward", "optimizer", "other"))


def test_what_the_reference_needs_is_predicted_in_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "EXPECTED_TIME_LIMIT", 0.01)
    with pytest.raises(RuntimeError, match=r"took more than 0 s to predict"):
        host._expected("h200")
    monkeypatch.setattr(host, "EXPECTED_TIME_LIMIT", 60)
    with pytest.raises(RuntimeError, match=r"could not be predicted: .*no-such-card"):
        host._expected("no-such-card")
