"""Machines of clouds: their data, and what their names say of a workload."""

import datetime

import pytest

from trainatomy.catalog.files import read_yaml
from trainatomy.catalog.gpus import find_gpu
from trainatomy.catalog.instances import find_instance, instances, is_instance
from trainatomy.catalog.links import find_link
from trainatomy.errors import WorkloadError
from trainatomy.workload.overrides import merge
from trainatomy.workload.schema import Workload

ALL = tuple(instances().values())
BERT = {"model": {"id": "google-bert/bert-base-uncased"}}


def described(**keys):
    return Workload.from_mapping({**BERT, **keys})


@pytest.mark.parametrize("one", ALL, ids=lambda one: one.id)
def test_every_machine_is_plausible_and_has_its_sources(one):
    gpu = find_gpu(one.gpu)
    assert gpu.id == one.gpu and 1 <= one.gpus <= 16 and one.source
    assert one.host_memory_bytes >= 0.4 * one.gpus * gpu.memory_bytes and one.vcpus >= 4
    assert not one.network or find_link(one.network)
    if one.usd_per_hour is not None:
        assert 0.2 < one.usd_per_hour / one.gpus < 20
        assert one.price_source and one.price_region and datetime.date.fromisoformat(one.price_date)


def test_names_are_unique_and_what_is_left_out_is_not_listed():
    families = read_yaml("instances.yaml")["families"]
    assert sum(len(family["instances"]) for family in families) == len(ALL)
    assert not set(read_yaml("instances.yaml")["left_out"]) & set(instances())


@pytest.mark.parametrize("one", ALL, ids=lambda one: one.id)
def test_a_machine_is_predicted_as_its_gpus(one):
    named, by_hand = described(instance=one.id), described(gpu=one.gpu, parallel={"gpus": one.gpus})
    assert named.resolve_gpu() is by_hand.resolve_gpu() and named.parallel == by_hand.parallel
    assert Workload.from_mapping(named.to_mapping()) == named


def test_names_are_found_however_written():
    assert find_instance("P5.48XLARGE").id == find_instance("p5-48xlarge").id == "p5.48xlarge"
    assert find_instance("NC24ads_A100_v4").id == "Standard_NC24ads_A100_v4"
    assert described(instance="P5.48xlarge").instance == "p5.48xlarge"


def test_what_is_unknown_or_left_out_is_explained():
    with pytest.raises(WorkloadError, match=r"unknown instance 'p5.49xlarge'; did you mean .*p5.48xlarge"):
        described(instance="p5.49xlarge")
    for name, why in read_yaml("instances.yaml")["left_out"].items():
        assert is_instance(name)
        with pytest.raises(WorkloadError) as error:
            described(instance=name)
        assert why in str(error.value)
    with pytest.raises(WorkloadError, match=r"that is a machine: --instance p5\.48xlarge"):
        find_gpu("p5.48xlarge")


def test_gpus_that_the_machine_has_not_are_refused():
    with pytest.raises(WorkloadError, match=r"gpu: is a100, and p5.48xlarge has h100-sxm"):
        described(instance="p5.48xlarge", gpu="a100")
    with pytest.raises(WorkloadError, match=r"parallel.gpus: is 16, and p5.48xlarge has 8 GPUs"):
        described(instance="p5.48xlarge", parallel={"gpus": 16})
    with pytest.raises(WorkloadError, match=r"--gpu: is a100, and p5.48xlarge has h100-sxm"):
        merge(None, {"model": BERT["model"]["id"], "instance": "p5.48xlarge", "gpu": "a100"})


def test_a_training_may_use_a_part_of_the_machine():
    few = described(instance="p5.48xlarge", parallel={"gpus": 1})
    assert few.parallel.gpus == 1 and Workload.from_mapping(few.to_mapping()) == few
    assert described(instance="p4d.24xlarge", gpu="a100-40gb:3g.20gb").parallel.gpus == 1
    changed = described(instance="p5.48xlarge", gpu={"memory_bytes": "70 GiB"})
    assert changed.resolve_gpu().device_name == find_gpu("h100-sxm").device_name


def test_the_later_of_a_machine_and_a_gpu_counts():
    workload = described(instance="p5.48xlarge").replace("gpu", "l4")
    assert (workload.instance, workload.gpu, workload.parallel.gpus) == (None, "l4", 8)
    assert merge(described(instance="p5.48xlarge"), {"gpu": "l4"}) == workload
    back = workload.replace("instance", "g2-standard-24")
    assert (back.gpu, back.parallel.gpus) == ("l4", 2)
    assert merge(workload, {"instance": "p5.48xlarge", "gpus": "4"}).parallel.gpus == 4


def test_several_machines_have_the_link_of_their_cloud():
    both = described(instance="p5.48xlarge", parallel={"nodes": 2})
    assert both.parallel.link.inter == "efa-400"
    own = {"nodes": 2, "link": {"inter": "ethernet-100"}}
    assert described(instance="p5.48xlarge", parallel=own).parallel.link.inter == "ethernet-100"
    assert described(instance="p5.48xlarge").parallel.link.inter is None
