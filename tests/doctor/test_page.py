"""The doctor in words: every finding has a wording without gaps, the page fits 80 columns, the JSON is complete."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest
from machines import HEALTHY, SOFTWARE, with_gpu, with_software, without_gpus
from test_checks import CASES

from trainatomy.catalog.machines import findings, variables
from trainatomy.cli.app import COMMANDS
from trainatomy.doctor.gathering import diagnose
from trainatomy.reporters import doctor_sentences as sentences
from trainatomy.reporters.json import FORMATS, to_json
from trainatomy.reporters.schema import schema_of
from trainatomy.reporters.text.doctor import doctor_page
from trainatomy.reporters.text.rendering import render
from trainatomy.results.machine import MachineState


def test_every_measured_cost_has_a_sentence() -> None:
    assert {cost.what for entry in findings().values() for cost in entry.costs} <= set(sentences.COSTS)


def test_commands_in_sentences_exist() -> None:
    written = " ".join(text for entry in findings().values() for text in (entry.found, entry.means, entry.fix))
    written += " ".join(one.effect for one in variables())
    named = set(re.findall(r"trainatomy (\w+)", written))
    assert "data" in named and named <= {entry.name for entry in COMMANDS}


@pytest.mark.parametrize("name", CASES)
def test_sentences_have_no_gaps(name: str) -> None:
    (found,) = (each for each in diagnose(CASES[name][-1]).findings if each.name == name)
    written = " ".join(f(found) for f in (sentences.found_sentence, sentences.meaning_sentence, sentences.fix_sentence))
    if name not in ("nvlink_errors", "gpu_waits"):  # counts that a driver may not report
        assert "?" not in written
    assert "{" not in written and "None" not in written


@pytest.mark.parametrize("machine", [each for cases in CASES.values() for each in cases])
def test_the_page_fits_80_columns(machine: MachineState) -> None:
    assert max(map(len, render(doctor_page(diagnose(machine)), 80).splitlines())) <= 80


def test_a_page() -> None:
    machine = with_gpu(copies={"pcie": {"width": 8}}, persistence=False)
    page = render(
        doctor_page(diagnose(replace(machine, software=replace(SOFTWARE, environment={"NCCL_P2P_DISABLE": "1"})))), 80
    )
    head = page.partition("GPUs\n")[0]
    assert head.splitlines()[:2] == [
        "2 warnings, 1 note",
        "2 × NVIDIA H200, driver 580.159.04 (CUDA 13.0), torch 2.11.0+cu130",
    ]
    assert "warning  GPU 0: PCIe with 8 of 16 lanes" in head
    assert "measured elsewhere: a training takes 29 % longer" in " ".join(head.split())
    assert "fix: unset NCCL_P2P_DISABLE" in head
    assert "takes 11 times as long" in " ".join(head.split())
    assert "NV#: bonded NVLinks" in page
    assert "1700 1980" in page and "55" in page


def test_a_healthy_machine_and_one_without_a_gpu() -> None:
    assert render(doctor_page(diagnose(HEALTHY))).startswith("nothing wrong was found\n")
    page = render(doctor_page(diagnose(without_gpus())))
    assert page.startswith("1 note\nno GPU, torch 2.11.0+cu130\n") and "predictions need no GPU" not in page


def test_json_has_facts_and_sentences() -> None:
    found = to_json(diagnose(with_software(environment={"NCCL_P2P_DISABLE": "1"})))
    assert json.loads(json.dumps(found)) == found
    (finding,) = found["findings"]
    assert (found["schema"], found["healthy"], finding["name"]) == (FORMATS["diagnosis"].name, False, "environment")
    assert finding["fix"] == "unset NCCL_P2P_DISABLE" and finding["costs"][0]["percent"] == 29
    assert found["machine"]["gpus"][0]["copies"]["rates"]["pinned_to_device"] == 55e9
    assert found["machine"]["pairs"] == [
        {"first": 0, "second": 1, "connection": "NV18", "peer_access": True, "copy_rate": 370e9}
    ]


def test_a_setting_that_is_fine_is_not_to_be_undone() -> None:
    found = to_json(diagnose(with_software(environment={"PYTORCH_ALLOC_CONF": "expandable_segments:True"})))
    assert [(each["severity"], each["fix"]) for each in found["findings"]] == [("note", "")]


def test_json_follows_its_schema() -> None:
    jsonschema = pytest.importorskip("jsonschema")
    schema = schema_of(FORMATS["diagnosis"])
    validator = jsonschema.Draft202012Validator(schema)  # checked once, not with every value
    validator.check_schema(schema)
    for machine in (HEALTHY, MachineState(), *(cases[-1] for cases in CASES.values())):
        validator.validate(to_json(diagnose(machine)))
