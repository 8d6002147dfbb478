"""Calibrations: their text, what ships, and that points price themselves."""

from __future__ import annotations

import json
from statistics import median

import pytest

from trainatomy.clock.findings import findings
from trainatomy.clock.kernels import kernel_seconds
from trainatomy.clock.prices import gap_seconds, prices_of, seconds_of
from trainatomy.errors import WorkloadError
from trainatomy.facts.calibrations import SCHEMA, load, parse, shipped
from trainatomy.facts.calls import from_text, to_text
from trainatomy.facts.cards import card, cards

TEXT = "aten::baddbmm(f32[8,1]!,bf16[4,8,2|16,1,8]*2,hi64[3])->f32[8,1]@0#2;beta=1"


def test_a_call_survives_its_text():
    assert to_text(from_text(TEXT)) == TEXT
    for calibration in shipped().values():
        for point in calibration.points:
            assert from_text(to_text(point.call)) == point.call


def test_text_keeps_strides_storages_and_what_is_written():
    call = from_text("aten::x(f32[2,3]!,f32[3,2|1,3]@0,hi64[]*2)->bf16[2]#2;dim=[0, 1]")
    assert call.inputs[1].strides == (1, 3)
    assert call.inputs[1].storage == call.inputs[0].storage != call.inputs[2].storage
    assert [tensor.on_host for tensor in call.inputs] == [False, False, True, True]
    assert (call.written, call.lengths, call.numbers) == ((0,), (2,), (("dim", "[0, 1]"),))
    with pytest.raises(ValueError, match="not a call"):
        from_text("nonsense")


def test_shipped_files_are_calibrations_of_known_cards():
    names = {one.id: one.device_name for one in cards()}
    assert shipped()
    for card_id, calibration in shipped().items():
        assert calibration.environment["gpu"] == names[card_id]
        assert len(calibration.points) > 1000


@pytest.mark.parametrize("card_id", list(shipped()))
def test_points_price_themselves(card_id):
    calibration = shipped()[card_id]
    prices = {tf32: prices_of(card(card_id), tf32=tf32) for tf32 in (False, True)}
    off = [
        abs(kernel_seconds(point.call, prices[point.tf32]).seconds / (seconds_of(point) * 1e-6) - 1)
        for point in calibration.points
        if point.hot > 20
    ]
    assert median(off) < 0.04
    assert sorted(off)[int(0.9 * len(off))] < 0.3


def test_findings_stay_below_the_data_sheet():
    found = findings(shipped()["h200"])
    compared = [one for one in found if one.data_sheet]
    assert len(compared) > 8
    for one in compared:
        assert 0.2 < one.measured / one.data_sheet < 1.05, one
    assert 0.2e-6 < gap_seconds(shipped()["h200"]) < 2e-6


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("[1]", "not a file that"),
        ("{", "not a file that"),
        (json.dumps({"schema": "trainatomy/calibration/9"}), "calibration/9"),
        (json.dumps({"schema": SCHEMA, "sections": {"kernels": {"points": [{"call": "x"}]}}}), "not a file that"),
    ],
)
def test_what_is_no_calibration_is_refused(content, says, tmp_path):
    with pytest.raises(WorkloadError, match=says):
        parse(content, "f.json")
    with pytest.raises(WorkloadError, match="No such file"):
        load(tmp_path / "none.json")
