"""The time of collectives: NCCL's model, the measured points, and what was kept out of both."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from statistics import median

import pytest

from trainatomy.catalog import links as catalog
from trainatomy.catalog.calibrations import CollectivePoint, shipped
from trainatomy.catalog.files import read_yaml
from trainatomy.catalog.gpus import find_gpu, gpus
from trainatomy.catalog.links import Point, bus_bytes, find_link, links_of, points_of, with_points
from trainatomy.errors import WorkloadError
from trainatomy.operators.cost import communication
from trainatomy.operators.cost.communication import collective_seconds
from trainatomy.results.operations import Array, Call
from trainatomy.timing.cost_model import cost_model_of, kernel_cost

H200 = find_gpu("h200")
MEASURED = [point for link in read_yaml("links.yaml")["links"] for point in points_of(link) if not point.algorithm]
GIB = 2**30


def predicted(point: Point) -> float:
    return collective_seconds(point.collective, point.bytes, point.ranks, point.nodes, point.links)


@pytest.fixture
def forgets(monkeypatch: pytest.MonkeyPatch):
    """Leave a point out of those that predictions rest on."""

    def forget(left_out: Point | None) -> None:
        monkeypatch.setattr(
            communication, "points_of", lambda link: tuple(point for point in points_of(link) if point != left_out)
        )
        communication._relevant_points.cache_clear()
        collective_seconds.cache_clear()

    yield forget
    monkeypatch.undo()
    communication._relevant_points.cache_clear()
    collective_seconds.cache_clear()


def test_measured_points_are_met() -> None:
    for point in MEASURED:  # messages below 4 MiB are mostly bounded by latency, and their points lie close together
        assert predicted(point) == pytest.approx(point.seconds, rel=0.02 if point.bytes >= 2**22 else 0.2)


def test_a_point_is_predicted_from_the_others(forgets) -> None:
    errors = []
    for point in MEASURED:
        forgets(point)
        errors.append(abs(predicted(point) / point.seconds - 1))
    assert median(errors) < 0.12
    assert max(errors) < 0.5  # 1 MiB, where latency ends, and the smallest message between four machines


@pytest.mark.parametrize("check", read_yaml("links.yaml")["checks"], ids=lambda check: check["gpu"])
def test_machines_that_no_figure_was_taken_from_are_met(check: dict) -> None:
    links = links_of(find_gpu(check["gpu"]), check["ranks"])
    size, ranks = check["bytes"], check["ranks"]
    seconds = collective_seconds(check["collective"], size, ranks, 1, links)
    assert bus_bytes(check["collective"], size, ranks) / seconds / 1e9 == pytest.approx(
        check["bus_gb_per_second"], rel=0.05
    )


@pytest.mark.parametrize("gpu", gpus(), ids=lambda gpu: gpu.id)
@pytest.mark.parametrize("kind", ["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send"])
def test_every_gpu_has_a_link_and_larger_messages_take_longer(gpu, kind: str) -> None:
    assert gpu.link in read_yaml("links.yaml")["links"]
    for ranks, nodes in ((2, 1), (8, 1), (16, 2), (1024, 128)):
        links = links_of(gpu, ranks // nodes, nodes)
        times = [collective_seconds(kind, 2**power, ranks, nodes, links) for power in range(16, 34)]
        # Points carry the steps between NCCL's protocols on an H200 over to other links.
        assert all(0 < one <= 1.2 * other for one, other in pairwise(times))
        assert times[-1] > 10 * times[0]


def test_links_order_the_same_collective() -> None:
    def seconds(intra: str | None, gpus_: int = 8, nodes: int = 1, inter: str | None = None) -> float:
        return collective_seconds("all_gather", GIB, gpus_ * nodes, nodes, links_of(H200, gpus_, nodes, intra, inter))

    assert seconds("nvlink4") < seconds("pcie5") < seconds("pcie5-host") < seconds("pcie3-host")
    assert seconds(None) == seconds("nvlink4")
    assert seconds(None, 8, 4, "infiniband-ndr") < seconds(None, 8, 4, "ethernet-100") < seconds(None, 8, 4, "1 GB/s")


def test_a_bridge_joins_pairs_only() -> None:
    pair, four = (links_of(find_gpu("rtx-a6000"), count) for count in (2, 4))
    assert pair.within(2).id == "nvlink3-bridge" and four.within(4).id == "pcie4"


def test_gpus_of_a_machine_share_its_network_card() -> None:
    one, eight = (links_of(H200, count, 2, None, "ethernet-100").inter for count in (1, 8))
    assert one is not None and eight is not None
    assert one.bytes_per_second == 8 * eight.bytes_per_second


@pytest.mark.parametrize(("text", "speed"), [("50 GB/s", 50e9), ("400 Gb/s", 50e9), ("25e9", 25e9), ("1000 B/s", 1e3)])
def test_a_link_can_be_given_by_its_speed(text: str, speed: float) -> None:
    assert find_link(text) == text
    assert links_of(H200, 8, 1, text).intra.bytes_per_second == speed


@pytest.mark.parametrize("text", ["nvlnk4", "0", "fast", "50 GiB/s"])
def test_an_unknown_link_is_refused(text: str) -> None:
    with pytest.raises(WorkloadError, match=f"unknown link '{text}'; did you mean"):
        find_link(text)


def test_ones_own_points_come_first() -> None:
    links = links_of(H200, 2)
    mine = with_points(links, [CollectivePoint("all_reduce", 2, 1, GIB, 1.0)])
    assert collective_seconds("all_reduce", GIB, 2, 1, mine) == pytest.approx(1.0)
    assert collective_seconds("all_reduce", GIB, 2, 1, links) < 0.01
    across = replace(links_of(H200, 2, 2), measured=mine.measured)
    assert collective_seconds("all_reduce", GIB, 4, 2, across) < 0.1, "it was not measured between machines"


def test_what_joins_the_machines_is_assumed_where_nobody_says() -> None:
    assert links_of(H200, 8, 2).assumed and not links_of(H200, 8, 2, None, "efa-400").assumed
    assert not links_of(H200, 8).assumed
    assert catalog.generation_of(find_gpu("a100")) == "ampere"


def test_a_calibration_of_several_gpus_decides() -> None:
    links = links_of(H200, 2)
    mine = replace(shipped()["h200"], collectives=(CollectivePoint("all_reduce", 2, 1, GIB, 1.0),))
    numbers = (("bytes", str(GIB)), ("ranks", "2"), ("nodes", "1"))
    array = Array((GIB // 4,), (1,), "float32", 4, 0)
    call = Call("nccl::all_reduce", (array,), (array,), numbers=numbers)
    assert kernel_cost(call, cost_model_of(H200, mine, links=links)).seconds == pytest.approx(1.0)
    assert kernel_cost(call, cost_model_of(H200, links=links)).seconds < 0.01
    assert kernel_cost(call, cost_model_of(H200)).seconds == 0
