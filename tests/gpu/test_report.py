"""The report of the accuracy benchmark, with made-up predictions."""

from __future__ import annotations

from dataclasses import asdict, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import report
from test_measure import RESULT

from trainatomy.errors import SimulationError

if TYPE_CHECKING:
    from trainatomy.workload.schema import Workload

MIB = 2**20


def line(name: str, *, allocated: int, held_out: bool = True, **changes: Any) -> dict[str, Any]:
    """A measured line with this peak, in MiB."""
    workload = {"name": name, "model": {"class": "BertModel"}}
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
        memory = SimpleNamespace(peak_allocated_bytes=100 * MIB, peak_reserved_bytes=20, device_bytes=7)
        return SimpleNamespace(memory=memory)

    monkeypatch.setattr(report.api, "predict", predict)
    return found


def test_a_prediction_is_made_for_the_card_and_the_software_that_were_measured(asked: list[Workload]) -> None:
    found = report.outcome(line("x", allocated=80), "h100")
    assert (asked[0].gpu, asked[0].software.torch) == ("h100", "2.11.0")
    assert found.error("allocated") == pytest.approx(0.25)
    assert found.error("reserved") == 0
    assert found.error("device") is None


def test_a_row_that_cannot_be_predicted_stays_in_the_report(asked: list[Workload]) -> None:
    found = report.outcome(line("impossible", allocated=80), "h200")
    assert found.problem == "SimulationError: aten.nonzero needs data"
    assert "SimulationError" in report.details([found])[-1]
    assert report.summary([found])[2:] == []


def test_the_summary_counts_exact_and_too_low(asked: list[Workload]) -> None:
    outcomes = [report.outcome(line(str(size), allocated=size), "h200") for size in (100, 80, 200)]
    assert report.summary(outcomes)[2] == "| allocated | 3 | 25.000 % | 50.000 % | 50.000 % | 1 | 1 |"


def test_held_out_and_tuned_rows_are_apart(asked: list[Workload]) -> None:
    lines = [
        line("a", allocated=100),
        line("b", allocated=100, held_out=False),
        line("c", allocated=90, held_out=False),
    ]
    text = report.document([report.outcome(each, "h200") for each in lines], lines)
    assert "## Held out: 1 rows, 0 with a problem" in text
    assert "## Tuned on: 2 rows, 0 with a problem" in text
    assert "Measured on NVIDIA H200, driver 580, 2026-11-21." in text


def test_running_out_of_memory_is_shown_as_such(asked: list[Workload]) -> None:
    assert report.outcome(line("x", allocated=80, status="out of memory"), "h200").problem == "out of memory"
