"""The report of the accuracy benchmark, with made-up predictions; the page that is shipped, with the shipped ones."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import outcomes
import page
import pytest
import report
import tables
from grid import rows
from outcomes import Outcome, Run
from techniques import PLAIN, techniques
from test_measure import RESULT

from trainatomy.errors import SimulationError

if TYPE_CHECKING:
    from trainatomy.workload.schema import Workload

MIB = 2**20
CARD = "NVIDIA H200"


def line(name: str, *, allocated: int, held_out: bool = True, **changes: Any) -> dict[str, Any]:
    """A measured line with this peak, in MiB."""
    workload = {"model": {"class": "BertModel"}}
    measured = replace(RESULT, name=name, workload=workload, peak_allocated_bytes=allocated * MIB, **changes)
    return asdict(measured) | {"family": "bert", "held_out": held_out, "alone": False}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Workload]:
    """Lets every prediction say 100 MiB, and keeps what was asked."""
    found: list[Workload] = []

    def predict(workload: Workload) -> Any:
        found.append(workload)
        if workload.name == "impossible":
            raise SimulationError("aten.nonzero needs data\nin encoder")
        memory = SimpleNamespace(peak_allocated_bytes=100 * MIB, peak_reserved_bytes=20, device_bytes=70 * MIB)
        return SimpleNamespace(memory=memory, seconds_taken=0.1)

    monkeypatch.setattr(outcomes.api, "predict", predict)
    return found


def test_a_prediction_is_made_for_the_card_and_the_software_that_were_measured(asked: list[Workload]) -> None:
    found = outcomes.outcome(line("x", allocated=80), "h100")
    assert (asked[0].gpu, asked[0].software.torch) == ("h100", "2.11.0")
    assert found.error("allocated") == pytest.approx(0.25)
    assert found.error("reserved") == 0


def test_beside_others_the_process_is_compared_without_what_nvml_leaves_out(asked: list[Workload]) -> None:
    shortfall = outcomes.cards()[CARD]["process_shortfall_bytes"]
    shared = line("x", allocated=80, process_bytes=70 * MIB - shortfall, nvml_used_bytes=None, idle_bytes=None)
    assert outcomes.outcome(shared).error("device") == 0
    alone = line("x", allocated=80, device_bytes=70 * MIB, process_bytes=1, nvml_used_bytes=2, idle_bytes=1)
    assert outcomes.outcome(alone).error("device") == 0
    assert outcomes.outcome(shared | {"gpu": "another"}, "h100").error("device") is None


def test_a_row_that_cannot_be_predicted_stays_in_the_report(asked: list[Workload]) -> None:
    found = outcomes.outcome(line("impossible", allocated=80))
    assert found.problem == "SimulationError: aten.nonzero needs data"
    assert "SimulationError" in tables.details([found])[-1]
    assert tables.summary([found])[2:] == []


def test_the_summary_counts_exact_and_too_low(asked: list[Workload]) -> None:
    found = [outcomes.outcome(line(str(size), allocated=size)) for size in (100, 80, 200)]
    assert tables.summary(found)[2] == "| allocated | 3 | 25.000 % | 50.000 % | 50.000 % | 1 | -50.000 % | 1 |"


def test_held_out_and_tuned_rows_are_apart(asked: list[Workload]) -> None:
    lines = [
        line("a", allocated=100),
        line("b", allocated=100, held_out=False),
        line("c", allocated=90, held_out=False),
    ]
    text = page.page(Run({}, "", [outcomes.outcome(each) for each in lines]), lines)
    assert "## Held out: 1 rows" in text
    assert "## Tuned on: 2 rows" in text
    assert "3 rows on NVIDIA H200, driver 580, 2026-11-21." in text
    assert "| Bert | 1 | 0.000 % | 0.000 % | 0.000 % | 0 | 0.000 % |" in text


def test_running_out_of_memory_is_shown_as_such(asked: list[Workload]) -> None:
    assert outcomes.outcome(line("x", allocated=80, status="out of memory")).problem == "out of memory"


def test_a_run_that_is_kept_is_read_back(tmp_path: Path) -> None:
    one = Outcome("x", "tuning", {"allocated": 1, "device": None}, {"allocated": 2, "device": 3})
    run = Run({"torch": "2"}, "0", (one,))
    outcomes.write(run, tmp_path / "errors.json")
    assert outcomes.read(tmp_path / "errors.json") == run


def test_changes_between_runs_are_told() -> None:
    one = Outcome("x", "tuning", {"allocated": 100}, {"allocated": 100})
    runs = [Run({}, "", [each]) for each in (one, replace(one, predicted={"allocated": 101}))]
    assert outcomes.changes(*runs) == ["x allocated: +0.0000 % -> +1.0000 %"]
    assert outcomes.changes(runs[0], runs[0]) == []


def test_techniques_of_a_row() -> None:
    found = {row.name: techniques(row.mapping) for row in rows()}
    assert found["bert-base-fp32"] == [PLAIN]
    assert found["bert-large-everything"] == [
        "fp16 autocast",
        "gradient accumulation",
        "gradient checkpointing",
        "Adafactor",
    ]
    assert found["bert-large-inference-bf16"] == ["inference", "16-bit weights"]


def test_the_shipped_page_comes_from_the_shipped_records() -> None:
    lines, run = report.shipped(), outcomes.read(report.ERRORS)
    assert run.records_digest == outcomes.digest(lines), "run `make accuracy`"
    assert [(one.name, one.measured) for one in run.outcomes] == [
        (each["name"], outcomes.measured(each)) for each in lines
    ]
    assert report.PAGE.read_text("utf-8") == page.page(run, lines), "run `make accuracy`"
    readme = report.README.read_text("utf-8")
    assert page.README_MARKS[0] in readme
    assert readme == page.in_readme(readme, run), "run `make accuracy`"


def test_shipped_rows_are_rows_of_the_grid_and_were_held_out_as_it_says() -> None:
    grid_rows = {row.name: row for row in rows()}
    for each in report.shipped():
        if outcomes.set_of(each) != "notebook":
            assert each["held_out"] == grid_rows[each["name"]].held_out, each["name"]


def test_what_nvml_leaves_out_of_a_process_is_what_the_records_show() -> None:
    both = [each for each in report.shipped() if outcomes.has_card(each) and each["process_bytes"] is not None]
    shortfalls = {(each["gpu"], each["device_bytes"] - each["process_bytes"]) for each in both}
    assert shortfalls == {(gpu, known["process_shortfall_bytes"]) for gpu, known in outcomes.cards().items()}
