"""Values among measured points: the nearest, a line, a decision tree."""

from __future__ import annotations

import pytest

from trainatomy.lookup import leaf, mean_of_nearest, on_line

LINE = [(1.0, 10.0), (2.0, 20.0), (4.0, 30.0)]


@pytest.mark.parametrize(("at", "value"), [(1.0, 10.0), (1.5, 15.0), (2.0, 20.0), (3.0, 25.0), (4.0, 30.0)])
def test_values_lie_on_the_line_between_points(at: float, value: float) -> None:
    for before in (True, False):
        assert on_line(LINE, at, before=before, after=not before) == value


def test_a_line_stays_or_goes_on_beyond_its_ends() -> None:
    assert (on_line(LINE, 0.0), on_line(LINE, 5.0)) == (10.0, 30.0)
    assert (on_line(LINE, 0.0, before=True), on_line(LINE, 5.0, after=True)) == (0.0, 35.0)
    assert on_line(LINE[:1], 5.0, before=True, after=True) == 10.0


def test_near_points_count_more_and_a_prior_at_any_distance() -> None:
    assert mean_of_nearest([(0.0, 3.0)], 0.1) == pytest.approx(3.0)
    assert mean_of_nearest([(1.0, 0.0), (2.0, 1.0)], 0.0) == pytest.approx(0.25 / 1.25)
    assert mean_of_nearest([(1.0, 0.0)], 0.0, prior=8.0, prior_weight=3.0) == pytest.approx(6.0)


def test_a_decision_tree_compares_values_with_limits() -> None:
    tree = [1, 5.0, "low", [0, 2.0, "narrow", "wide"]]
    assert [leaf(tree, values) for values in ((9.0, 5.0), (2.0, 6.0), (3.0, 6.0))] == ["low", "narrow", "wide"]
    assert leaf("always", ()) == "always"
