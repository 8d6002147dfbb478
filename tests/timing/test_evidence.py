"""What is said of how good predictions are for a card."""

from __future__ import annotations

import pytest

from trainatomy.catalog.files import read_yaml
from trainatomy.catalog.gpus import find_gpu, gpus
from trainatomy.timing.evidence import evidence_of


def test_every_card_says_what_its_predictions_rest_on() -> None:
    for gpu in gpus():
        found = dict(evidence_of(gpu))
        assert found["kernel times"].startswith("calibration of")
        assert ("to do better" in found) == (gpu.id not in ("h100-sxm", "h200"))
        assert all(found.values())


def test_errors_are_those_of_the_card_itself_and_not_of_a_slice_or_a_relative() -> None:
    for name in ("a100-80gb:3g.40gb", "a800-80gb", "rtx-5080"):
        assert dict(evidence_of(find_gpu(name)))["error of times"] == "not checked"
    assert "whole steps" in dict(evidence_of(find_gpu("a100-80gb")))["error of times"]


@pytest.mark.parametrize(("name", "share"), [("t4", "74 %"), ("h200", "90 %"), ("l4", "78 %")])
def test_the_bandwidth_that_is_reached_is_said(name: str, share: str) -> None:
    assert share in dict(evidence_of(find_gpu(name)))["bandwidth"]


def test_a_context_that_was_measured_is_not_called_assumed() -> None:
    assert dict(evidence_of(find_gpu("h100-sxm")))["context"] == "measured or documented"
    assert dict(evidence_of(find_gpu("t4")))["context"].startswith("assumed")


def test_errors_are_of_cards_in_the_catalog_and_plausible() -> None:
    for name, kinds in read_yaml("checked.yaml")["gpus"].items():
        assert find_gpu(name).id == name
        for kind, found in kinds.items():
            assert found["count"] > 0 and 0 < found["median"] <= found["most"] < (0.75 if kind == "steps" else 0.5)
