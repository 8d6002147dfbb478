"""MIG instances: GPUs with a part of a card, by the names of ``mig.yaml``."""

import pytest

from trainatomy.catalog.files import read_yaml
from trainatomy.catalog.gpus import find_gpu, gpu_of_driver, gpus
from trainatomy.catalog.mig import mig_profiles
from trainatomy.errors import WorkloadError
from trainatomy.timing.cost_model import cost_model_of
from trainatomy.workload.schema import Workload

DIVISIBLE = [gpu for gpu in gpus() if mig_profiles(gpu)]
PARTS = [(card, find_gpu(f"{card.id}:{profile}")) for card in DIVISIBLE for profile in mig_profiles(card)]
BERT = {"model": {"id": "google-bert/bert-base-uncased"}}


def test_every_table_is_of_known_cards_and_none_is_in_two():
    named = [gpu_id for table in read_yaml("mig.yaml")["tables"] for gpu_id in table["gpus"]]
    assert [find_gpu(gpu_id).id for gpu_id in named] == named and len(set(named)) == len(named)


@pytest.mark.parametrize(("card", "part"), PARTS, ids=lambda gpu: gpu.id)
def test_an_instance_is_a_part_of_its_card(card, part):
    compute, memory = part.id.partition(":")[2].removesuffix("gb").split("g.")
    whole = max(int(profile[0]) for profile in mig_profiles(card))
    assert part.memory_bytes == pytest.approx(int(memory) * 1e9, rel=0.08)  # names round what they have
    assert part.memory_bytes <= card.memory_bytes and part.bandwidth_bytes_per_second <= card.bandwidth_bytes_per_second
    assert part.multiprocessors <= card.multiprocessors and part.multiprocessors % 2 == 0
    assert part.multiprocessors / card.multiprocessors > 0.85 * int(compute) / (whole + 1)
    share = part.multiprocessors / card.multiprocessors
    assert part.rates == pytest.approx({name: rate * share for name, rate in card.rates.items()})
    ours, theirs = part.context(), card.context()
    assert ours.first_tensor_bytes == pytest.approx(theirs.first_tensor_bytes * share, abs=1)
    assert part.l2_bytes <= card.l2_bytes and part.slice_of == part.card == card.id
    assert "nvlink" not in part.links and not part.link


@pytest.mark.parametrize(("card", "part"), PARTS, ids=lambda gpu: gpu.id)
def test_no_figure_of_the_card_passes_for_one_of_the_instance(card, part):
    for name in ("memory_bytes", "bandwidth_bytes_per_second", "rates.fp16", "contexts.lazy.first_tensor_bytes"):
        assert part.source(name) not in ("unknown", card.source(name))
    for name in ("bandwidth_bytes_per_second", "rates.fp16", "contexts.lazy.first_tensor_bytes"):
        assert part.source(name).startswith("assumed: ")


def test_the_largest_instance_has_all_memory_slices():
    for card in DIVISIBLE:
        largest = find_gpu(f"{card.id}:{list(mig_profiles(card))[-1]}")
        assert largest.bandwidth_bytes_per_second == card.bandwidth_bytes_per_second


@pytest.mark.parametrize("name", ["H200:3g.71gb", "h200 : MIG 3g.71GB", "NVIDIA H200 MIG 3g.71gb", "h200-sxm:3g.71gb"])
def test_an_instance_is_found_however_written(name):
    assert find_gpu(name) is find_gpu("h200:3g.71gb")


def test_the_drivers_name_finds_the_instance():
    for _, part in PARTS:
        assert gpu_of_driver(part.device_name) is part
    assert gpu_of_driver("h200:3g.71gb") is None and gpu_of_driver("no such GPU") is None


def test_an_unknown_profile_lists_those_of_the_card():
    with pytest.raises(WorkloadError, match=r"no MIG profile '3g.40gb' of h200 is known; its profiles are 1g.18gb, "):
        find_gpu("h200:3g.40gb")
    with pytest.raises(WorkloadError, match=r"no MIG profile '1g.5gb' of t4 is known; cards with MIG: a30, "):
        find_gpu("t4:1g.5gb")
    with pytest.raises(WorkloadError, match="unknown GPU 'x100'"):
        find_gpu("x100:1g.5gb")


def test_times_are_extrapolated_from_the_calibration_of_the_card():
    model = cost_model_of(find_gpu("h100-sxm:3g.40gb"))
    assert not model.calibrated and model.source.startswith("calibration of NVIDIA H100")


def test_several_instances_in_a_machine_are_refused_and_one_in_each_is_not():
    workload = Workload.from_mapping({**BERT, "gpu": "h200:3g.71gb"})
    for strategy in ({}, {"strategy": "fsdp2"}):
        with pytest.raises(WorkloadError, match="a process sees one MIG instance"):
            Workload.from_mapping({**BERT, "loop": "pytorch", "gpu": "a30:1g.6gb", "parallel": {"gpus": 2, **strategy}})
    with pytest.raises(WorkloadError, match="a process sees one MIG instance"):
        workload.replace({"gpu": {"base": "h200:3g.71gb", "memory_bytes": "60 GiB"}, "parallel.gpus": 2})
    assert workload.replace("parallel.nodes", 2).parallel.world_size == 2
