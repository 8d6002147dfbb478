"""Points of calibrations, priced when a family of kernels is first looked up."""

from __future__ import annotations

from collections import defaultdict
from math import log

import pytest

from trainatomy.catalog.calibrations import shipped
from trainatomy.catalog.gpus import find_gpu
from trainatomy.operators.cost import kernel_work
from trainatomy.timing import efficiency
from trainatomy.timing.chips import chip_of
from trainatomy.timing.efficiency import EfficiencyPoints, physical_seconds, point_microseconds

CALIBRATION = shipped()["h100-sxm"]
CHIP = chip_of(find_gpu("h100-sxm"), None)


def all_at_once() -> dict[str, list[tuple]]:
    """Return the points of all families, priced in the order of the file."""
    found = defaultdict(list)
    for point in CALIBRATION.points:
        work = kernel_work(point.call, CHIP._replace(tf32=point.tf32, cudnn_tf32=True))
        if not work.launches:
            continue
        own = point_microseconds(point) * 1e-6 - work.beside
        ratio = log(own / physical_seconds(work, CHIP))
        names = work.family.split(".")
        for length in range(len(names), 0, -1):
            found[".".join(names[:length])].append((work.features, ratio, point.kernels))
    return found


def test_points_do_not_depend_on_what_was_looked_up_before():
    expected = all_at_once()
    assert len(expected) > 300
    for families in (sorted(expected), sorted(expected, reverse=True)):
        points = EfficiencyPoints(CALIBRATION.points, CHIP)
        assert {family: list(points[family]) for family in families} == expected
    assert dict(EfficiencyPoints(CALIBRATION.points, CHIP)) == {name: tuple(each) for name, each in expected.items()}


def test_only_points_that_may_belong_to_a_family_are_priced(monkeypatch):
    priced = []

    def recorded(call, chip):
        priced.append(call.name)
        return kernel_work(call, chip)

    monkeypatch.setattr(efficiency, "kernel_work", recorded)
    points = EfficiencyPoints(CALIBRATION.points, CHIP)
    assert points and not priced
    assert points["matmul.half"]
    assert "aten::mm" in priced and "aten::convolution" not in priced
    priced.clear()
    assert points["matmul.fp32"] and not priced
    assert "" not in points and not priced  # the parent of a family that has no points
    assert "unknown" not in points  # a root that no module lists may be of any module
    assert "aten::convolution" in priced and "aten::mm" not in priced


@pytest.mark.parametrize("gpu_id", list(shipped()))
def test_every_module_of_costs_lists_its_families(gpu_id):
    assert len(EfficiencyPoints(shipped()[gpu_id].points, CHIP)) > 300


def test_a_family_that_its_module_does_not_list_is_an_error(monkeypatch):
    monkeypatch.setattr(efficiency, "FAMILIES", {"matmul": ("grouped",)})
    with pytest.raises(ValueError, match="matmul also returns families of many vectors, matmul"):
        _ = EfficiencyPoints(CALIBRATION.points, CHIP)["grouped"]


def test_the_nearest_points_are_those_of_a_search_through_all():
    points = EfficiencyPoints(CALIBRATION.points, CHIP)
    for family in ("matmul", "convolution", "traffic", "normalisation"):
        every = points[family]
        for asked in (every[0].features, (0.0, 0.0, 0.0), tuple(2.3 + each for each in every[-1].features)):

            def distance(point, asked=asked):
                return sum((a - b) ** 2 for a, b in zip(point.features, asked, strict=False))

            expected = sorted(every, key=distance)[:6]
            assert every.nearest(asked, 6) == [(distance(point), point) for point in expected]
        assert every.mean == pytest.approx(sum(point.log_efficiency for point in every) / len(every))
