"""What notes say of the GPU and the precision of a training."""

from __future__ import annotations

import pytest
import torch.nn as nn
from executed import simulated

from trainatomy.catalog.gpus import find_gpu, gpus
from trainatomy.catalog.instances import find_instance
from trainatomy.catalog.versions import parse_version
from trainatomy.results.prediction import LeadingNote
from trainatomy.simulator.notes import _link_notes, notes_of, notes_on, version_notes
from trainatomy.simulator.simulate import execute
from trainatomy.workload import Workload
from trainatomy.workload.dialects.translation import Origin

GPT2 = {"class": "GPT2LMHeadModel", "config": {"n_layer": 1, "n_embd": 16, "n_head": 2, "vocab_size": 50}}


@pytest.mark.parametrize(
    ("gpu", "train", "dtype", "said"),
    [
        ("t4", {"bf16": True}, "float32", "no arithmetic units for bf16: its products are timed at the rate of fp32"),
        ("t4", {}, "bfloat16", "fp16 runs on its tensor cores"),
        ("k80", {"fp16": True}, "float32", "no arithmetic units for fp16"),
        ("t4", {"fp16": True}, "float32", None),
        ("a100", {"bf16": True}, "float32", None),
    ],
)
def test_a_precision_without_units_is_noted(gpu: str, train: dict[str, bool], dtype: str, said: str | None) -> None:
    described = {"model": {**GPT2, "dtype": dtype}, "data": {"sequence_length": 4}, "train": train, "gpu": gpu}
    notes = [note for note in simulated(Workload.from_mapping(described)).notes if "arithmetic units" in note]
    assert notes == [] if said is None else len(notes) == 1 and said in notes[0]


@pytest.mark.parametrize(
    ("torch", "gpu", "said"),
    [
        ("2.13", "k80", "no build of PyTorch 2.13 has kernels for GPUs of compute capability 3.7"),
        ("2.13", "v100", "the build of PyTorch 2.13 on PyPI has no kernels for GPUs of compute capability 7.0"),
        ("2.13", "p4", "the build of PyTorch 2.13 on PyPI has no kernels for GPUs of compute capability 6.1"),
        ("2.13", "gtx-1080-ti", "the build of PyTorch 2.13 on PyPI has no kernels for GPUs of compute capability 6.1"),
        ("2.10", "p100-16gb", "the build of PyTorch 2.10 on PyPI has no kernels for GPUs of compute capability 6.0"),
        ("2.10", "v100", None),
        ("2.13", "t4", None),
        ("2.13", "rtx-5090", None),
        ("1.10", "k80", None),
    ],
)
def test_builds_without_kernels_for_the_gpu_are_noted(torch: str, gpu: str, said: str | None) -> None:
    found = [note for note in version_notes(parse_version(torch), find_gpu(gpu).capability) if "kernels" in note]
    assert found == [] if said is None else len(found) == 1 and found[0].startswith(said)


def test_a_prediction_has_the_note() -> None:
    described = {"model": {**GPT2, "dtype": "float32"}, "data": {"sequence_length": 4}, "gpu": "k80"}
    assert any("has kernels for" in note for note in simulated(Workload.from_mapping(described)).notes)


@pytest.mark.parametrize("gpu", [one.id for one in gpus() if one.unified_memory] + ["h200"])
def test_memory_that_is_also_the_hosts_is_noted(gpu: str) -> None:
    notes = said_of({"gpu": gpu})
    assert any("one memory" in note and isinstance(note, LeadingNote) for note in notes) == (gpu != "h200")


@pytest.mark.parametrize("name", ["p5.48xlarge", "a3-ultragpu-8g", "g6.xlarge"])
def test_a_machine_is_described_with_its_price(name: str) -> None:
    machine = find_instance(name)
    (note,) = [note for note in said_of({"instance": name}) if note.startswith(f"{name} ({machine.provider})")]
    listed = machine.usd_per_hour
    assert ("no list price is known" if listed is None else f"{listed:,.2f} USD an hour") in note
    assert f"{machine.vcpus} virtual processors" in note and "reference host" in note
    assert "are used" not in note
    few = said_of({"instance": "p5.48xlarge", "parallel": {"gpus": 2}})
    assert any("8 × H100 SXM 80 GB, of which 2 are used" in note for note in few)


def said_of(keys: dict[str, object]) -> tuple[str, ...]:
    """Return the notes on a description, of which nothing is simulated."""
    workload = Workload.from_mapping({"model": GPT2, "data": {"sequence_length": 4}, **keys})
    return tuple(notes_of(notes_on(workload, nn.Linear(1, 1)), workload))


@pytest.mark.parametrize(("gpu", "gpus", "noted"), [("l40s", 4, True), ("l40s", 1, False), ("h200", 4, False)])
def test_the_speed_of_collectives_over_pcie_is_said_to_be_nominal(gpu: str, gpus: int, noted: bool) -> None:
    workload = Workload.from_mapping({"model": {"id": "gpt2"}, "gpu": gpu, "parallel": {"gpus": gpus}})
    found = [note for note in _link_notes(workload) if "collectives over PCIe" in note]
    assert len(found) == noted
    assert not noted or f"calibrate --gpus {gpus}" in found[0]


def test_an_execution_says_the_assumptions_of_the_file_that_asks() -> None:
    """What two frameworks' files ask for may be executed once."""
    keys = {"model": GPT2, "data": {"sequence_length": 4}, "gpu": "h200"}
    first, second = (
        Workload.from_mapping(keys).placed({}, Origin(name, "file", False, "", {}, (f"{name} has this default",)))
        for name in ("trl", "axolotl")
    )
    execution = execute(first, find_gpu("h200"))
    for workload, name, other in ((first, "trl", "axolotl"), (second, "axolotl", "trl")):
        served = execution.on(workload, find_gpu("h200"))
        assert served is not None
        assert any(f"{name} has this default" in note for note in served.notes)
        assert not any(f"{other} has this default" in note for note in served.notes)
