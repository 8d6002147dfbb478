"""The host's bill of a predicted training: its phases, its limits, and what would lower it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import GPT2Config

import trainatomy
from trainatomy.catalog.host import CudaFootprint, Footprint
from trainatomy.cli import main
from trainatomy.errors import WorkloadError
from trainatomy.prediction.host import host_bill
from trainatomy.prediction.host_facts import HostFacts, limits_here
from trainatomy.reporters.text.fit import host_of
from trainatomy.results.host import HostBill, HostLimits, HostPhase, block_bytes
from trainatomy.simulator.simulation import HostUse
from trainatomy.workload.schema import Workload

MIB = 1 << 20
GIB = 1 << 30

FACTS = HostFacts(
    libraries=Footprint(400 * MIB, 200 * MIB),
    cuda=CudaFootprint(
        Footprint(20 * MIB, 80 * MIB), Footprint(250 * MIB, 250 * MIB), Footprint(1000 * MIB, 1000 * MIB)
    ),
    processes=8,
    use=HostUse(weights=4 * GIB, stored=4 * GIB, is_built=False, batch=(3 * MIB, 3 * MIB)),
    loaded_by=8,
)
CONFIG = {"n_layer": 2, "n_embd": 64, "n_head": 2, "vocab_size": 1000}
TINY: dict[str, Any] = {
    "model": {"class": "GPT2LMHeadModel", "config": CONFIG},
    "data": {"sequence_length": 32},
    "train": {"per_device_train_batch_size": 4},
}


def _phase(bill: HostBill, name: str) -> HostPhase:
    return next(phase for phase in bill.phases if phase.name == name)


def _sizes(phase: HostPhase, component: str) -> dict[str, int]:
    parts = [part for process in phase.processes for part in process.parts if part.component == component]
    return {part.kind: part.bytes for part in parts}


def test_mapped_weights_are_resident_in_each_process_and_needed_in_none() -> None:
    loading = _phase(host_bill(FACTS), "loading")
    assert _sizes(loading, "weights") == {"mapped": 4 * GIB}
    assert loading.needed_bytes < 8 * GIB
    assert loading.fullest.resident_bytes > 4 * GIB


def test_a_cast_needs_a_copy_in_each_process_that_loads() -> None:
    use = replace(FACTS.use, weights=8 * GIB)
    cast = replace(FACTS, use=use)
    before = _phase(host_bill(FACTS), "loading").needed_bytes
    assert _phase(host_bill(cast), "loading").needed_bytes - before == 8 * 8 * GIB
    assert _phase(host_bill(replace(cast, loaded_by=1)), "loading").needed_bytes - before == 8 * GIB


def test_pinned_batches_are_blocks_of_powers_of_two() -> None:
    pinned = host_bill(replace(FACTS, workers=4, pins=True, processes=1)).pinned_bytes
    assert pinned == (4 * 2 + 2) * 2 * 4 * MIB
    assert [block_bytes(size) for size in (0, 1, 3, 4096, 4097)] == [0, 1, 4, 4096, 8192]


def test_batches_wait_in_shared_memory_in_whole_pages() -> None:
    use = replace(FACTS.use, batch=(100, 5000))
    training = _phase(host_bill(replace(FACTS, use=use, workers=3, processes=2)), "training")
    assert training.shm_bytes == 2 * (3 * 2 + 2) * 3 * 4096


def test_workers_share_their_parents_pages_and_copy_a_data_set_of_objects() -> None:
    bill = host_bill(replace(FACTS, processes=1, workers=4, dataset=GIB))
    worker = _phase(bill, "training").processes[1]
    assert worker.count == 4
    assert worker.own_bytes - GIB < 40 * MIB < worker.resident_bytes - GIB
    assert bill.fullest.needed_bytes > 5 * GIB


def test_an_evaluation_has_workers_beside_those_of_the_training() -> None:
    evaluation = _phase(host_bill(replace(FACTS, processes=1, workers=4, evaluates=True)), "evaluation")
    assert sum(process.count for process in evaluation.processes if process.role == "worker") == 8


def test_only_the_first_process_copies_what_it_saves() -> None:
    saving = _phase(host_bill(replace(FACTS, saved=5 * GIB, checkpoint=12 * GIB, kept=2)), "saving")
    assert [process.count for process in saving.processes] == [1, 7]
    assert _sizes(saving, "checkpoint") == {"anonymous": 5 * GIB}
    assert saving.disk_bytes == 36 * GIB


def test_a_remedy_is_the_bill_of_the_changed_training() -> None:
    facts = replace(FACTS, processes=1, loaded_by=1, workers=8, dataset=GIB)
    bill = host_bill(facts, HostLimits(memory_bytes=6 * GIB))
    assert bill.verdict == "does not fit"
    fewer = next(each for each in bill.remedies if (each.name, each.value) == ("workers", 2))
    assert fewer.fits
    assert fewer.needed_bytes == host_bill(replace(facts, workers=2)).fullest.needed_bytes
    assert not host_bill(facts, HostLimits(memory_bytes=600 * GIB)).remedies


def test_less_memory_in_dev_shm_than_batches_need() -> None:
    bill = host_bill(replace(FACTS, workers=8), HostLimits(shm_bytes=64 * MIB))
    assert [each.limit for each in bill.shortages] == ["shm"]
    assert {each.name for each in bill.remedies} >= {"workers", "prefetch"}


def _predict(**changes: Any) -> HostBill:
    found = trainatomy.predict(Workload.from_mapping(TINY), timed=False, layouts=False, **changes).host_bill
    assert found is not None
    return found


def test_a_prediction_knows_its_batches_and_its_checkpoint() -> None:
    bill = _predict(dataloader_num_workers=2, save_strategy="steps", save_total_limit=3, dataset_memory="1 GiB")
    assert [phase.name for phase in bill.phases] == ["libraries", "loading", "training", "saving"]
    training, saving = _phase(bill, "training"), _phase(bill, "saving")
    tensors = sum(1 for _ in ("input_ids", "labels"))
    assert bill.pinned_bytes == (2 * 2 + 2) * tensors * 4 * 32 * 8
    assert training.shm_bytes % 4096 == 0 < training.shm_bytes
    weights = _sizes(_phase(bill, "loading"), "weights")["mapped"]
    assert _sizes(saving, "checkpoint")["anonymous"] == pytest.approx(weights, rel=0.05)
    assert saving.disk_bytes == pytest.approx(4 * 3 * weights, rel=0.1)
    assert _sizes(training, "dataset") == {"anonymous": GIB}


def test_gathered_logits_lie_on_the_host() -> None:
    data = {"sequence_length": 32, "compute_metrics": True, "eval_samples": 16}
    phase = _phase(_predict(eval_strategy="steps", data=data), "evaluation")
    logits = 16 * 32 * 1000 * 4
    assert logits <= _sizes(phase, "outputs")["anonymous"] <= 2.1 * logits


def test_weights_that_are_cast_are_counted_twice(tmp_path: Path) -> None:
    GPT2Config(**CONFIG, dtype="bfloat16", architectures=["GPT2LMHeadModel"]).save_pretrained(tmp_path)
    model = {"id": str(tmp_path), "class": "GPT2LMHeadModel", "dtype": "float32"}
    sizes = _sizes(_phase(_predict(model=model), "loading"), "weights")
    assert sizes["anonymous"] == pytest.approx(2 * sizes["mapped"], rel=0.01)


def test_offloaded_activations_are_pinned_on_the_host() -> None:
    bill = _predict(loop="pytorch", activation_offloading="pinned")
    assert _sizes(_phase(bill, "training"), "activations")["pinned"] > 0


def test_fsdp_keeps_its_shards_and_states_on_the_host() -> None:
    parallel = {"gpus": 2, "strategy": "fsdp2", "offload_policy": "cpu"}
    bill = _predict(loop="pytorch", parallel=parallel, optim="adamw_torch_fused")
    sizes = _sizes(_phase(bill, "training"), "offloaded")
    parameters = trainatomy.predict(Workload.from_mapping(TINY), timed=False).bytes_per_parameter.parameters
    assert sizes["anonymous"] == pytest.approx(parameters * 4 / 2 * 2, rel=0.01)
    assert parameters * 4 / 2 * 2 <= sizes["pinned"] <= 2 * parameters * 4 / 2 * 2


def test_an_instance_has_the_limit() -> None:
    bill = _predict(instance="p5.48xlarge", parallel={"gpus": 1})
    assert (bill.limits.memory_bytes, bill.limits.memory_source) == (2048 * GIB, "p5.48xlarge")
    assert bill.verdict == "fits"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("100 MiB", "less than Python and its libraries take"),
        ("lots", "must be a size such as"),
        (0, "must be a size such as"),
    ],
)
def test_a_limit_that_makes_no_sense_is_refused(given: Any, message: str) -> None:
    with pytest.raises(WorkloadError, match=message):
        _predict(host_memory=given)


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_the_limits_of_a_container_are_found(tmp_path: Path) -> None:
    _write(tmp_path / "proc/meminfo", "MemTotal: 1048576 kB\n")
    assert limits_here(tmp_path, tmp_path).memory_bytes == GIB
    _write(tmp_path / "proc/self/cgroup", "0::/\n")
    _write(tmp_path / "sys/fs/cgroup/memory.current", "5")
    _write(tmp_path / "sys/fs/cgroup/memory.max", str(512 * MIB))
    found = limits_here(tmp_path, tmp_path)
    assert (found.memory_bytes, found.shm_bytes) == (512 * MIB, 0)
    assert found.shm_source == "this machine has none"


def test_json_has_the_verdict_and_what_is_needed(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    main(["predict", file, "--host-memory", "700 MiB", "--json"])
    bill = json.loads(capsys.readouterr().out)["host_bill"]
    assert bill["verdict"] == "does not fit"
    assert [each["limit"] for each in bill["shortages"]] == ["memory"]
    assert max(phase["needed_bytes"] for phase in bill["phases"]) == bill["shortages"][0]["needed_bytes"]


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "train.yaml"
    path.write_text(
        "model: {class: GPT2LMHeadModel, config: {n_layer: 2, n_embd: 64, n_head: 2, vocab_size: 1000}}\n"
        "data: {sequence_length: 32}\n"
    )
    return str(path)


def test_a_search_says_that_the_host_does_not_suffice() -> None:
    enough, little = (HostLimits(memory_bytes=size) for size in (900 * GIB, GIB))
    candidate: Any = SimpleNamespace(prediction=SimpleNamespace(host_bill=host_bill(FACTS, enough)))
    assert not list(host_of(candidate))
    candidate.prediction.host_bill = host_bill(FACTS, little)
    assert [part.title for part in host_of(candidate)] == ["Memory of the host"]


def test_why_oom_shows_the_host_without_a_limit(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    main(["predict", file])
    assert "Memory of the host" not in capsys.readouterr().out
    main(["predict", file, "--why-oom"])
    assert "host: needs" in capsys.readouterr().out


def test_the_page_says_that_the_host_does_not_suffice(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    status = main(["predict", file, "--host-memory", "600 MiB", "--dataset-memory", "8GiB", "--check"])
    out, error = capsys.readouterr()
    assert status == 8
    assert "does not fit: needs" in out and "data set" in out
    assert "the kernel kills the process (exit code -9, or 137)" in error


def test_an_optimizer_on_the_host_keeps_weights_gradients_and_states_there() -> None:
    pytest.importorskip("torchao")
    bill = _predict(loop="pytorch", optim="torchao.optim.CPUOffloadOptimizer")
    sizes = _sizes(_phase(bill, "training"), "offloaded")
    large = sum(count for count in _parameters_of_tiny() if count >= 4096)  # the others stay on the GPU
    assert sizes["anonymous"] == 2 * 4 * large
    assert 2 * 4 * large <= sizes["pinned"] <= 2 * 2 * 4 * large


def _parameters_of_tiny() -> list[int]:
    from transformers import GPT2LMHeadModel

    return [each.numel() for each in GPT2LMHeadModel(GPT2Config(**CONFIG)).parameters()]


@pytest.mark.parametrize(("missing", "evicted"), [(0, 0), (3 * GIB, 3 * GIB), (9 * GIB, 5 * GIB)])
def test_paged_states_come_to_the_host_as_far_as_the_gpu_lacks_room(missing: int, evicted: int) -> None:
    use = replace(FACTS.use, paged=5 * GIB)
    phase = _phase(host_bill(replace(FACTS, use=use, missing=missing, processes=1)), "training")
    assert _sizes(phase, "paged")["anonymous"] == evicted
    assert phase.high_bytes - phase.needed_bytes >= 5 * GIB - evicted


def test_files_on_a_drive_take_disk_space_of_every_process() -> None:
    facts = replace(FACTS, use=replace(FACTS.use, on_drive=2 * GIB))
    (shortage,) = host_bill(facts, HostLimits(disk_bytes=10 * GIB)).shortages
    assert (shortage.limit, shortage.component, shortage.needed_bytes) == ("disk", "offloaded", 16 * GIB)
