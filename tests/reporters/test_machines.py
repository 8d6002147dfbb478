"""What the commands say of MIG instances and of the machines of clouds."""

from __future__ import annotations

import json

import pytest
from typer import BadParameter

from trainatomy.catalog.gpus import find_gpu, gpus
from trainatomy.catalog.instances import find_instance, instances
from trainatomy.catalog.mig import mig_profiles
from trainatomy.cli import main
from trainatomy.cli.prices import cost_per_hour
from trainatomy.workload import Workload


def shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main([*arguments]) == 0
    return capsys.readouterr().out


def on(name: str, nodes: int = 1) -> Workload:
    model = {"id": "google-bert/bert-base-uncased"}
    return Workload.from_mapping({"model": model, "instance": name, "parallel": {"nodes": nodes}})


def test_all_machines_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    listed = shown(capsys, "gpus", "--instances")
    assert [name for name in instances() if name not in listed] == []
    rows = json.loads(shown(capsys, "gpus", "--instances", "--json"))["rows"]
    assert [row["id"] for row in rows] == list(instances())


@pytest.mark.parametrize("name", ["p5.48xlarge", "a3-ultragpu-8g", "Standard_NC24ads_A100_v4"])
def test_one_machine_is_shown_with_its_sources(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    one, page = instances()[name], " ".join(shown(capsys, "gpus", name.lower()).split())
    assert f"{one.gpus} × {find_gpu(one.gpu).name}" in page and one.source[:30] in page
    assert one.price_date in page and ("not known" in page or f"{one.usd_per_hour:,.4g} USD" in page)
    (row,) = json.loads(shown(capsys, "gpus", name, "--json"))["rows"]
    assert (row["id"], row["usd_per_hour"]) == (name, one.usd_per_hour)


def test_the_mig_instances_of_a_card_are_named_and_shown(capsys: pytest.CaptureFixture[str]) -> None:
    for gpu in gpus():
        if mig_profiles(gpu):
            page = shown(capsys, "gpus", gpu.id)
            assert [part for part in mig_profiles(gpu) if f"{gpu.id}:{part}" not in page] == []
    assert "MIG" not in shown(capsys, "gpus", "t4")
    (row,) = json.loads(shown(capsys, "gpus", "h200:3g.71gb", "--json"))["rows"]
    assert (row["id"], row["slice_of"], row["multiprocessors"]) == ("h200:3g.71gb", "h200", 60)
    assert "assumed: " in shown(capsys, "gpus", "h200:3g.71gb")


def cost_of(workload: Workload, prices: dict[str, float]) -> tuple[float | None, str]:
    parallel, machine = workload.parallel, find_instance(str(workload.instance))
    return cost_per_hour(prices, workload.resolve_gpu().id, parallel.world_size, machine, parallel.nodes)


@pytest.mark.parametrize("one", instances().values(), ids=lambda one: one.id)
def test_the_list_price_counts_unless_another_is_given(one: object) -> None:
    workload = on(one.id, 2)
    cost, price = cost_of(workload, {})
    assert cost == (None if one.usd_per_hour is None else 2 * one.usd_per_hour)
    assert (one.price_date in price) == (cost is not None)
    assert cost_of(workload, {one.id: 7.0}) == (14.0, "the given price")
    assert cost_of(workload, {one.gpu: 3.0}) == (3.0 * 2 * one.gpus, "the given price")


def test_the_price_of_another_machine_or_gpu_is_refused() -> None:
    for name in ("g6.xlarge", "l4"):
        with pytest.raises(BadParameter, match=r"the prediction is for h100-sxm on p5\.48xlarge"):
            cost_of(on("p5.48xlarge"), {name: 1.0})
