"""Points of calibrations, priced when a family of kernels is first looked up."""

from __future__ import annotations

from collections import defaultdict
from math import log

import pytest

from trainatomy.catalog.calibrations import from_text, shipped
from trainatomy.catalog.gpus import find_gpu
from trainatomy.operators.cost import kernel_work
from trainatomy.operators.cost.kernel import chip_of, physical_seconds
from trainatomy.operators.cost.plans import Plan, is_alike, plan_distance, plans_of
from trainatomy.timing import efficiency
from trainatomy.timing.cost_model import cost_model_of, kernel_cost
from trainatomy.timing.efficiency import (
    EfficiencyPoint,
    EfficiencyPoints,
    FamilyPoints,
    point_microseconds,
)

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
            found[".".join(names[:length])].append((work.features, ratio, point.kernels, point.local, work.plans))
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


def test_points_are_searched_once_for_the_same_features(monkeypatch):
    monkeypatch.setattr(efficiency, "_MOST_KEPT", 2)
    points = FamilyPoints(EfficiencyPoint((float(size),), 0.5, 1) for size in range(8))
    found = points.nearest((2.0,), 3)
    assert points.nearest((2.0,), 3) is found
    for size in (3.0, 4.0, 5.0):
        points.nearest((size,), 3)
    assert points.nearest((2.0,), 3) == found
    assert len(points._found) <= 2


def test_a_local_point_counts_for_sizes_near_its_own_only():
    usual = [EfficiencyPoint((float(size),), 0.5, 1) for size in range(8)]
    points = FamilyPoints((*usual, EfficiencyPoint((3.2,), 2.0, 4, local=True)))
    own, beside, far = (points.nearest((size,), 3) for size in (3.2, 3.65, 3.75))
    assert own[0][1].local and own[0][1].log_efficiency == 2.0 and any(point.local for _, point in beside)
    assert len(far) == 3 and not any(point.local for _, point in far)
    assert points.mean == 0.5


def test_a_library_that_runs_a_slow_kernel_for_few_shapes_does_so_around_them():
    """Up to 16 images cuDNN did not split the depth of this gradient: 470 us for 15 images, 501 for 16, 285 for 48."""
    text = "aten::convolution_backward(f16[{0},64,64,64],f16[{0},3,64,64],f16[64,3,3,3])->f16[64,3,3,3],f16[64];"
    settings = "bias_sizes=[64];padding=[1, 1];output_mask=[False, True, True]"
    few, many = (
        kernel_cost(from_text(text.format(images) + settings), cost_model_of(find_gpu("h200"))) for images in (14, 48)
    )
    assert few.seconds == pytest.approx(440e-6, rel=0.15) and many.seconds == pytest.approx(285e-6, rel=0.15)


def test_points_of_another_plan_are_farther_and_local_ones_of_the_same_reach_farther():
    same, other = (Plan(49, "", 7),), (Plan(33, "", 7),)
    near = EfficiencyPoint((4.1,), 0.1, 1, plans=other)
    far = EfficiencyPoint((4.9,), 0.9, 1, plans=same)
    local = EfficiencyPoint((3.2,), 2.0, 4, local=True, plans=same)
    points = FamilyPoints((near, far, local))
    assert [point for _, point in points.nearest((4.0,), 3, same)] == [local, far, near]
    assert [point for _, point in points.nearest((4.0,), 3)] == [near, far]
    assert [point for _, point in points.nearest((4.0,), 3, other)] == [near, far]


@pytest.mark.parametrize(
    ("one", "other", "distance", "alike"),
    [
        ("49/7", "49/7", 0.0, True),
        ("49/7", "", 0.0, False),
        ("49/8", "49/2", 1.0, False),
        ("71,68", "71,34/2", 4.0, False),
        ("71,34/4", "71,34/2", 0.25, True),
        ("71~0a1,34/4", "71~fff,34/2", 2.25, False),
    ],
)
def test_plans_are_compared_product_by_product(one, other, distance, alike):
    def said(text):
        return plans_of(from_text(f"aten::convolution(f32[1,8,4,4],f32[8,8,1,1])->f32[1,8,4,4];plans={text}"))

    assert ",".join(map(str, said(one))) == one
    assert plan_distance(said(one), said(other)) == pytest.approx(distance)
    assert is_alike(said(one), said(other)) is alike
