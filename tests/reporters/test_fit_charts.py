"""Charts of a search: what is drawn, and that no text leaves the page."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from trainatomy.reporters.charts.fit import NAMED, draw, figure
from trainatomy.reporters.charts.gpus import draw_gpus, gpus_figure
from trainatomy.reporters.charts.style import drawing
from trainatomy.reporters.settings import FIT_MARKS
from trainatomy.results.fit import Candidate, Change, Fit, FitAcross

MakeCandidate = Callable[..., Candidate]


def drawn(axes: Axes, name: str) -> list[list[float]]:
    """Return the points that the legend calls ``name``."""
    lines = [line for line in axes.lines if line.get_label() == FIT_MARKS[name]]
    return [list(map(float, point)) for line in lines for point in line.get_xydata()]


def check_texts(page: Figure) -> None:
    """Check that every text lies on the page."""
    page.canvas.draw()
    texts = [*page.texts, *(text for axes in page.axes for text in axes.texts)]
    boxes = [text.get_window_extent() for text in texts if text.get_text()]
    width, height = page.bbox.width, page.bbox.height
    assert all(box.x0 >= 0 and box.x1 <= width and box.y0 >= 0 and box.y1 <= height for box in boxes)


def test_every_executed_candidate_is_a_point(fit: Fit) -> None:
    with drawing():
        (axes,) = figure(fit).axes
    assert drawn(axes, "fits") == [[each.device_bytes / 2**30, each.samples_per_second] for each in fit.candidates]
    assert drawn(axes, "too_large") == [[20.0, pytest.approx(16 / 0.38)]]
    assert drawn(axes, "best") == [[12.0, 40.0]]
    assert drawn(axes, "tie") == [[11.5, pytest.approx(16 / 0.402)]]
    assert drawn(axes, "front") == [[each.device_bytes / 2**30, each.samples_per_second] for each in fit.front]
    limits = [line.get_xdata()[0] for line in axes.lines if list(line.get_ydata()) == [0, 1]]  # type: ignore[index,arg-type]
    assert limits == [16.0, 17.0]


def test_best_and_ties_are_named(fit: Fit) -> None:
    with drawing():
        page = figure(fit)
    texts = [text.get_text() for text in page.texts]
    assert "best: batch 8 × 2 accumulation steps, gradient checkpointing off: 40.0 samples/s, 12.0 GiB" in texts
    assert "1: expandable segments" in texts
    check_texts(page)


def test_many_ties_are_counted(fit: Fit) -> None:
    with drawing():
        texts = [text.get_text() for text in figure(replace(fit, ties=fit.ties * (NAMED + 2))).texts]
    assert "and 2 more may be as fast" in texts


@pytest.mark.parametrize("count", [1, 5, 60])
def test_any_number_of_candidates(count: int, fit: Fit, candidate: MakeCandidate) -> None:
    empty = Change("attention", "eager", {})
    made = tuple(candidate((empty,), 3 + 0.4 * index, 0.4 + 3 / (2 + index)) for index in range(count))
    fitting, large = tuple(each for each in made if each.fits), tuple(each for each in made if not each.fits)
    with drawing():
        page = figure(replace(fit, candidates=fitting, too_large=large, ties=(), best=fitting[-1]))
        check_texts(page)
    assert len(drawn(page.axes[0], "fits")) == len(fitting)


def test_far_larger_candidates_are_counted(fit: Fit, candidate: MakeCandidate) -> None:
    huge = candidate(fit.too_large[0].changes, 200, 0.3)
    with drawing():
        (axes,) = figure(replace(fit, too_large=(*fit.too_large, huge))).axes
    assert "1 more need up to 200.0 GiB" in [text.get_text() for text in axes.texts]
    assert axes.get_xlim()[1] < 30


def test_a_search_in_which_nothing_fits_can_be_drawn(nothing_fits: Fit) -> None:
    with drawing():
        page = figure(nothing_fits)
        check_texts(page)
    assert "nothing fits" in [text.get_text() for text in page.texts]
    assert drawn(page.axes[0], "best") == []


def test_gpus_have_bars_and_prices(across: FitAcross) -> None:
    with drawing():
        page = gpus_figure(across)
        check_texts(page)
    speed, cost = page.axes
    assert [bar.get_width() for bar in speed.patches] == [40.0, 32.0]
    assert [bar.get_width() for bar in cost.patches] == [pytest.approx(3.0 / 3600 / 40 * 1e6)]
    words = [text.get_text() for text in speed.texts]
    assert "does not fit" in words and "2.00 GiB short" in words
    without = replace(across, options=tuple(replace(each, cost_per_hour=None) for each in across.options))
    with drawing():
        assert len(gpus_figure(without).axes) == 1


def test_the_same_value_gives_the_same_file(fit: Fit, across: FitAcross) -> None:
    assert draw(fit, "svg") == draw(fit, "svg")
    assert draw(fit, "png").startswith(b"\x89PNG")
    assert draw_gpus(across, "svg").startswith(b"<?xml")
