"""Charts: the shapes and texts that are drawn, and that equal values give equal files."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from xml.etree import ElementTree

import matplotlib
import pytest
from matplotlib.figure import Figure

from trainatomy.reporters.charts.comparison import draw, figure
from trainatomy.reporters.charts.style import drawing
from trainatomy.reporters.labels import COMPONENTS
from trainatomy.results.comparison import Comparison, ComparisonRow, PublishedFigures
from trainatomy.results.measurement import Measurement
from trainatomy.results.memory import Instant, OutOfMemoryPoint
from trainatomy.results.prediction import Prediction

MIB, GIB = 2**20, 2**30


@pytest.fixture
def measured(prediction: Prediction, measurement: Measurement) -> Comparison:
    """Return rows with two repeats, out of memory, a failure, and a run without a memory breakdown."""
    whole = replace(measurement, memory=prediction.memory, samples_per_second=16.0)
    faster = replace(whole, samples_per_second=20.0)
    point = OutOfMemoryPoint(Instant(0, "forward", "h.3", "aten::mm"), 300 * MIB, 5 * GIB, 6 * GIB)
    ran_out = replace(measurement, status="out of memory", device_bytes=None, out_of_memory=point)
    rows = (
        ComparisonRow("repeated", {}, prediction, measurements=(whole, faster)),
        ComparisonRow("ran out", {}, prediction, measurements=(ran_out,)),
        ComparisonRow("failed", {}, None, "cannot", errors=("died",)),
        ComparisonRow("no bill", {}, prediction, measurements=(measurement,)),
    )
    return Comparison(rows, repeats=2)


def texts(page: Figure) -> str:
    """Return all text in the figure."""
    legend = [text.get_text() for text in page.legends[0].get_texts()]
    inside = [text.get_text() for axes in page.axes for text in axes.texts]
    names = [label.get_text() for label in page.axes[0].get_yticklabels()]
    return "\n".join([*(text.get_text() for text in page.texts), *legend, *inside, *names])


def widths(page: Figure, panel: int, row: int) -> list[float]:
    """Return the lengths of the bars of a row, in stacking order."""
    bars = [patch for container in page.axes[panel].containers for patch in container]
    return [bar.get_width() for bar in bars if round(bar.get_y() + bar.get_height() / 2) == row]


def test_components_are_stacked_to_the_device_memory(measured: Comparison, prediction: Prediction) -> None:
    with drawing():
        page = figure(measured)
    drawn = widths(page, 0, 0)
    assert len(drawn) == len(COMPONENTS)
    assert drawn == [count / GIB for count in prediction.memory.components.as_dict().values()]
    assert sum(drawn) == pytest.approx(8)
    assert widths(page, 0, 3) == [8.0]


def test_out_of_memory_shows_the_live_memory(measured: Comparison) -> None:
    with drawing():
        page = figure(measured)
        drawn_texts = texts(page)
    assert widths(page, 0, 1) == [6.0]
    assert "out of memory" in drawn_texts and "300 MiB requested" in drawn_texts
    assert widths(page, 0, 2) == [] and "failed" in drawn_texts


def test_throughput_is_shown(measured: Comparison) -> None:
    with drawing():
        page = figure(measured)
    assert len(page.axes) == 2
    assert widths(page, 1, 0) == [18.0]
    assert "18.0" in texts(page)


def test_predictions_need_no_second_panel(prediction: Prediction, too_big: Prediction) -> None:
    published = ComparisonRow("known", {}, prediction, published=PublishedFigures(9 * GIB))
    with drawing():
        page = figure(Comparison((published, ComparisonRow("too big", {}, too_big)), source="a guide"))
        drawn_texts = texts(page)
    assert len(page.axes) == 1
    assert "does not fit" in drawn_texts and "published 9.00 GiB" in drawn_texts


def test_the_predicted_throughput_is_marked_or_shown(
    measured: Comparison, prediction: Prediction, timed: Callable[[Prediction, float], Prediction]
) -> None:
    quick = timed(prediction, 0.1)
    run, failed = replace(measured.rows[0], prediction=quick), measured.rows[2]
    others = (ComparisonRow("not run", {}, quick), ComparisonRow("too big", {}, replace(quick, fits=False)))
    rows = (run, *others, failed)
    with drawing():
        page = figure(Comparison(rows))
    assert [widths(page, 1, row) for row in range(4)] == [[18.0], [40.0], [], []]
    marks = [line.get_xydata().tolist() for line in page.axes[1].lines if line.get_marker() == "D"]
    assert marks == [[[40.0, 0.0]]]
    assert page.axes[1].get_xlim()[1] > 40.0


def test_labels_stay_inside(measured: Comparison) -> None:
    with drawing():
        page = figure(measured)
        page.canvas.draw()
        panel = page.axes[0].get_window_extent()
        reach = [text.get_window_extent().x1 for text in page.axes[0].texts]
    assert max(reach) <= panel.x1 + 2


@pytest.mark.parametrize(("ending", "start"), [("svg", b"<?xml"), ("png", b"\x89PNG"), ("pdf", b"%PDF")])
def test_the_same_value_gives_the_same_file(measured: Comparison, ending: str, start: bytes) -> None:
    first = draw(measured, ending)
    assert first.startswith(start)
    assert first == draw(measured, ending)


def test_svg_is_xml_whatever_rows_are_called(named: Callable[[str, int], Prediction]) -> None:
    prediction = named("a & b <c> $x_1$", 0)
    drawn = draw(Comparison((ComparisonRow(prediction.name, {}, prediction),)), "svg")
    assert ElementTree.fromstring(drawn).tag.endswith("svg")


def test_the_users_own_settings_are_left_alone(measured: Comparison) -> None:
    before = dict(matplotlib.rcParams)
    draw(measured, "svg")
    assert dict(matplotlib.rcParams) == before
