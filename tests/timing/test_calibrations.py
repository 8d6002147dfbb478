"""Calibration files: their text form, the shipped ones, and the costs that follow from them."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from trainatomy.catalog.calibrations import SCHEMA, from_text, load, parse, shipped, to_text
from trainatomy.catalog.files import read_yaml
from trainatomy.catalog.gpus import find_gpu, gpu_from_mapping, gpus
from trainatomy.errors import WorkloadError
from trainatomy.measurement.calibration.calibrate import write
from trainatomy.timing.cost_model import cost_model_of, gap_seconds, kernel_cost
from trainatomy.timing.efficiency import point_microseconds
from trainatomy.timing.evidence import findings

TEXT = "aten::baddbmm(f32[8,1]!,bf16[4,8,2|16,1,8]*2,hi64[3])->f32[8,1]@0#2;beta=1"


def test_calls_round_trip_through_text():
    assert to_text(from_text(TEXT)) == TEXT
    for calibration in shipped().values():
        for point in calibration.points:
            assert from_text(to_text(point.call)) == point.call


def test_a_calibration_in_a_folder_is_the_same_as_in_a_file(tmp_path: Path) -> None:
    known = load(Path(str(files("trainatomy.catalog").joinpath("calibrations", "h100-sxm"))))
    folder, file = tmp_path / "folder", tmp_path / "file.json"
    folder.mkdir()
    for path in (folder, file):
        write(dict(known.content), path)
    assert {"calibration.json", "convolution_f32.json", "convolution_backward_f16.json"} < {
        one.name for one in folder.iterdir()
    }
    whole = load(folder)
    assert sorted(whole.points, key=str) == sorted(load(file).points, key=str) == sorted(known.points, key=str)
    assert (whole.environment, whole.sections) == (known.environment, known.sections)
    assert list(shipped()["h100-sxm"].points) == list(known.points)
    (folder / "convolution_f32.json").write_text("{}")
    with pytest.raises(WorkloadError, match="do not form one calibration"):
        load(folder)


def test_text_keeps_strides_storages_and_written_inputs():
    call = from_text("aten::x(f32[2,3]!,f32[3,2|1,3]@0,hi64[]*2)->bf16[2]#2;dim=[0, 1]")
    assert call.inputs[1].strides == (1, 3)
    assert call.inputs[1].storage == call.inputs[0].storage != call.inputs[2].storage
    assert [tensor.on_host for tensor in call.inputs] == [False, False, True, True]
    assert (call.written, call.lengths, call.numbers) == ((0,), (2,), (("dim", "[0, 1]"),))
    with pytest.raises(ValueError, match="not a call"):
        from_text("nonsense")


@pytest.mark.parametrize(
    ("short", "whole"),
    [
        (
            "aten::convolution(f32[1,2,5],f32[2,2,3])->f32[1,2,3];padding=[2]",
            ["stride=[1]", "padding=[2]", "dilation=[1]", "transposed=False", "output_padding=[0]", "groups=1"],
        ),
        (
            "aten::convolution_backward(f32[1,2,3],f32[1,2,5],f32[2,2,3])->f32[2,2,3];bias_sizes=[0];groups=2;output_mask=[False, True, False]",  # noqa: E501
            ["bias_sizes=[0]", "stride=[1]", "padding=[0]", "dilation=[1]", "transposed=False", "output_padding=[0]",
             "groups=2", "output_mask=[False, True, False]"],
        ),
    ],
    ids=["forward", "backward"],
)  # fmt: skip
def test_usual_arguments_of_convolutions_are_left_out(short: str, whole: list[str]) -> None:
    call = from_text(short)
    assert [f"{key}={value}" for key, value in call.numbers] == whole
    assert to_text(call) == short
    assert from_text(";".join([short.partition(";")[0], *whole])) == call


def test_a_convolution_without_tensors_has_no_usual_arguments():
    assert from_text("aten::convolution()->").numbers == ()


def test_shipped_calibrations_are_of_known_gpus():
    names = {one.id: one.device_name for one in gpus()}
    assert shipped()
    for gpu_id, calibration in shipped().items():
        assert calibration.environment["gpu"] == names[gpu_id]
        assert len(calibration.points) > 1000


@pytest.mark.parametrize("gpu_id", list(shipped()))
def test_calibration_points_are_reproduced(gpu_id):
    calibration = shipped()[gpu_id]
    cost_models = {tf32: cost_model_of(find_gpu(gpu_id), tf32=tf32) for tf32 in (None, True)}
    off = [
        abs(kernel_cost(point.call, cost_models[point.tf32 or None]).seconds / (point_microseconds(point) * 1e-6) - 1)
        for point in calibration.points
        if point.hot > 20
    ]
    assert median(off) < 0.04
    assert sorted(off)[int(0.9 * len(off))] < 0.3


@pytest.mark.parametrize(
    ("gpu_id", "gpu"),
    [("v100-16gb", "NVIDIA H200"), ("rtx-3090", "NVIDIA H200"), ("h100-pcie", "NVIDIA H100"), ("l4", "NVIDIA H100")],
)
def test_a_gpu_without_a_calibration_uses_the_nearest(gpu_id, gpu):
    source = cost_model_of(find_gpu(gpu_id)).source
    assert source.startswith(f"calibration of {gpu}") and "extrapolated" in source


def test_a_measured_nvml_gap_replaces_the_default():
    known = shipped()["h100-sxm"].sections["device"]["waiting"]["gap_us"]
    assert gap_seconds(shipped()["h100-sxm"]) == pytest.approx(known * 1e-6)
    without = replace(shipped()["h100-sxm"], sections={"device": {"waiting": {}}})
    assert gap_seconds(without) == gap_seconds(None) != gap_seconds(shipped()["h100-sxm"])


def test_findings_stay_below_the_data_sheet():
    found = findings(shipped()["h200"])
    compared = [one for one in found if one.data_sheet]
    assert len(compared) > 8
    for one in compared:
        assert 0.2 < one.measured / one.data_sheet < 1.05, one
    assert 0.2e-6 < gap_seconds(shipped()["h100-sxm"]) < 2e-6


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[1]", "not a file that"),
        ("{", "not a file that"),
        (json.dumps({"schema": "trainatomy/calibration/9"}), "calibration/9.*again"),
        (json.dumps({"schema": SCHEMA, "sections": {}, "environment": {"gpu": "x"}}), "capability"),
        (json.dumps({"schema": SCHEMA, "sections": {"kernels": {"points": [{"call": "x"}]}}}), "not a file that"),
    ],
)
def test_files_that_are_not_calibrations_are_rejected(content, message, tmp_path):
    with pytest.raises(WorkloadError, match=message):
        parse(content, "f.json")
    with pytest.raises(WorkloadError, match="No such file"):
        load(tmp_path / "none.json")


def measured_on(name: str, capability: tuple[int, int] = (9, 0), us: float | str = 100.0) -> Any:
    """Return a calibration of such a GPU: one matrix product, three times."""
    point = {"call": "aten::mm(bf16[4096,4096],bf16[4096,4096])->bf16[4096,4096]", "us": us, "kernels": 1}
    environment = {"gpu": name, "capability": list(capability), "date": "2026-11-21"}
    return json.dumps({"schema": SCHEMA, "environment": environment, "sections": {"kernels": {"points": [point] * 3}}})


@pytest.mark.parametrize("microseconds", ["soon", -1.0, float("nan"), float("inf")])
def test_invalid_durations_are_rejected(microseconds):
    with pytest.raises(WorkloadError, match="not a file that"):
        parse(measured_on("NVIDIA H200", us=microseconds), "f.json")


def test_unreadable_files_are_rejected(tmp_path: Path):
    with pytest.raises(WorkloadError, match="directory"):
        load(tmp_path)
    (tmp_path / "picture").write_bytes(b"\x89PNG\xff")
    with pytest.raises(WorkloadError, match="not text"):
        load(tmp_path / "picture")


def test_a_calibration_of_the_same_gpu_is_used():
    slow, fast = (parse(measured_on("NVIDIA H200", us=us), "f.json") for us in (1000.0, 200.0))
    cost_models = cost_model_of(find_gpu("h200"), slow)
    assert cost_models.calibrated and cost_models.source == "calibration of NVIDIA H200, 2026-11-21"
    call = slow.points[0].call
    assert kernel_cost(call, cost_models).seconds == pytest.approx(1000e-6, rel=0.01)
    assert kernel_cost(call, cost_model_of(find_gpu("h200"), fast)).seconds == pytest.approx(200e-6, rel=0.01)
    assert cost_model_of(find_gpu("h200"), slow) is cost_models


def test_a_calibration_of_another_gpu_is_scaled_by_the_data_sheets():
    h200 = parse(measured_on("NVIDIA H200", us=200.0), "f.json")
    cost_models = cost_model_of(find_gpu("h100-pcie"), h200)
    assert not cost_models.calibrated
    assert (
        "NVIDIA H200" in cost_models.source
        and f"extrapolated to the data sheet of {find_gpu('h100-pcie').name}" in cost_models.source
    )
    attained = read_yaml("efficiency.yaml")["attained"]
    ratio = find_gpu("h200").rates["bf16"] * attained["h200"]["half"]
    ratio /= find_gpu("h100-pcie").rates["bf16"] * attained["h100-pcie"]["half"]
    assert kernel_cost(h200.points[0].call, cost_models).seconds == pytest.approx(200e-6 * ratio, rel=0.15)


def test_a_gpu_with_other_kernels_is_rejected_with_both_names():
    with pytest.raises(WorkloadError, match=r"NVIDIA H200.*for T4 \(7\.5\).*gpu h200"):
        cost_model_of(find_gpu("t4"), parse(measured_on("NVIDIA H200"), "f.json"))


def test_an_unlisted_gpu_has_to_be_described():
    unlisted = parse(measured_on("NVIDIA GeForce RTX 4050", (8, 9), 1000.0), "f.json")
    with pytest.raises(WorkloadError, match=r"RTX 4050.*no data sheet.*base: rtx-4090"):
        cost_model_of(find_gpu("rtx-4090"), unlisted)
    described = cost_model_of(gpu_from_mapping({"memory_bytes": 16 * 2**30}, "rtx-4090"), unlisted)
    assert described.calibrated
    assert kernel_cost(unlisted.points[0].call, described).seconds == pytest.approx(1000e-6, rel=0.01)
    with pytest.raises(WorkloadError, match="which runs other kernels"):
        unlisted.check(gpu_from_mapping({"memory_bytes": 16 * 2**30}, "h200"))


def test_a_cpu_only_calibration_keeps_the_shipped_kernels():
    content = json.loads(measured_on("NVIDIA H200"))
    content["sections"] = {"host": {"reference": "x", "factors": {"forward": 2.0}}}
    cost_models = cost_model_of(find_gpu("h200"), parse(json.dumps(content), "f.json"))
    assert cost_models.points and cost_models.source == cost_model_of(find_gpu("h200")).source


@pytest.mark.parametrize(
    "sections",
    [
        {"device": {"launches": [{"bytes": 4}]}},
        {"device": {"memory": [{"bytes": 4, "malloc_us": "much", "free_us": 1}]}},
        {"device": [1]},
        {"host": {"factors": [1]}},
        {"host": {"factors": {"forward": -1}}},
        {"kernels": {"points": [{}]}},
        [1],
    ],
)
def test_incomplete_sections_are_rejected(sections):
    content = {**json.loads(measured_on("NVIDIA H200")), "sections": sections}
    with pytest.raises(WorkloadError, match=r"f\.json: not a file that"):
        parse(json.dumps(content), "f.json")


def test_changing_the_memory_size_keeps_the_calibration():
    assert cost_model_of(gpu_from_mapping({"memory_bytes": 100 * 2**30}, "h200")).calibrated
    assert not cost_model_of(gpu_from_mapping({"multiprocessors": 100}, "h200")).calibrated
    assert "extrapolated" in cost_model_of(find_gpu("v100")).source
