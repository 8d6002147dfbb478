"""The calibration measurement without a GPU: cases on meta tensors, and a profiler trace written by hand."""

from __future__ import annotations

from contextlib import suppress
from itertools import islice

import pytest
import torch
from torch.overrides import TorchFunctionMode
from typer.testing import CliRunner

import trainatomy
import trainatomy.api.calibrating
from trainatomy.catalog.calibrations import from_text, to_text
from trainatomy.errors import DeviceError, WorkloadError
from trainatomy.measurement.calibration import calibrate
from trainatomy.measurement.profiled_calls import CallRecorder, device_time_by_mark, profiled


class OnMeta(TorchFunctionMode):
    """Creates meta tensors in place of CUDA tensors."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "meta"
        return function(*args, **kwargs)


NEEDS_A_GPU = ("transfers", "optimizers", "sequence losses", "recurrent layers", "small tensors", "quantised layers")


@pytest.mark.parametrize("name", [name for name in calibrate.groups() if name not in NEEDS_A_GPU])
def test_calls_of_every_group_can_be_serialized(name):
    recorder = CallRecorder()
    with OnMeta():
        for case in islice(calibrate.groups()[name](), 0, None, 12):
            work = case.make()
            with recorder:
                work()
    calls = [call for call in recorder.calls if not call.is_view]
    assert calls
    for call in calls:
        assert to_text(from_text(to_text(call))) == to_text(call)


def test_device_time_belongs_to_the_mark_that_launched_it():
    def mark(run, begins):
        return {"cat": "user_annotation", "name": f"trainatomy-call {run}", "ts": begins, "dur": 5}

    def launch(correlation, at):
        return {"cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": at, "args": {"correlation": correlation}}

    def kernel(correlation, at, duration, kind="kernel"):
        arguments = {"correlation": correlation}
        return {"cat": kind, "name": f"k{correlation}", "ts": at, "dur": duration, "args": arguments}

    events = [
        mark(1, 20), mark(0, 10), launch(7, 11), launch(8, 12), launch(9, 17), launch(10, 21), {"cat": "cpu_op"},
        kernel(7, 100, 2.5), kernel(8, 103, 1.5, "gpu_memset"), kernel(9, 110, 50), kernel(10, 170, 4),
        kernel(99, 1, 9),
    ]  # fmt: skip
    assert device_time_by_mark(events) == [
        ("trainatomy-call 0", 4.0, ("k7", "k8")),
        ("trainatomy-call 1", 4.0, ("k10",)),
    ]


def test_every_run_is_marked_also_in_backward():
    recorder, events = CallRecorder(), []
    x = torch.randn(8, 8, requires_grad=True)
    with profiled(events), recorder:
        for _ in range(2):
            torch.autograd.grad((x @ x).softmax(-1), x, torch.ones(8, 8))
    samples = recorder.samples(events)
    names = {index: call.name for call, index in recorder.calls.items()}
    assert [names[sample.call] for sample in samples].count("aten::mm") == 6
    assert all(sample.microseconds == 0 for sample in samples)


def test_the_bytes_of_a_storage_are_not_written_down():
    recorder, x = CallRecorder(), torch.empty(0)
    with recorder:
        x.set_(torch.zeros(1000).untyped_storage(), 0, (1000,), (1,))
    assert not any("source" in dict(call.numbers) for call in recorder.calls if call.name.startswith("aten::set_"))
    assert any(call.name.startswith("aten::set_") for call in recorder.calls)


def test_a_call_that_raises_is_not_a_sample():
    recorder, events = CallRecorder(), []
    x = torch.randn(8, 8)
    with profiled(events):
        for size in (8, 7, 8, 7):
            with recorder, suppress(RuntimeError):
                torch.mm(x, torch.ones(size, size))
    samples = recorder.samples(events)
    names = {index: call.name for call, index in recorder.calls.items()}
    assert [names[sample.call] for sample in samples].count("aten::mm") == 2
    assert len(samples) == 6  # four tensors of ones, two products


def test_without_a_gpu_the_error_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(DeviceError, match="nvidia-smi"):
        calibrate.calibrate()
    from trainatomy.cli.app import app

    result = CliRunner().invoke(app(), ["calibrate", "--output", str(tmp_path / "c.json")])
    assert isinstance(result.exception, DeviceError)
    assert not (tmp_path / "c.json").exists()


def test_an_unwritable_file_is_reported_before_measuring(tmp_path, monkeypatch):
    def never(**options):
        raise AssertionError("measured")

    monkeypatch.setattr(trainatomy.api.calibrating, "calibrate_gpu", never)
    with pytest.raises(WorkloadError, match=r"--output.*cannot be written"):
        trainatomy.calibrate(tmp_path / "none" / "c.json")
    with pytest.raises(AssertionError, match="measured"):
        trainatomy.calibrate(tmp_path / "c.json")


def test_blocks_that_do_not_fit_are_left_out(monkeypatch):
    from trainatomy.measurement.calibration import device

    clock = iter(range(10**6))

    def empty(size, **_):
        if size > 256 * 2**20:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return object()

    monkeypatch.setattr(torch, "empty", empty)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(device.time, "perf_counter", lambda: next(clock) ** 2)
    found = device.memory()
    assert [row["bytes"] // 2**20 for row in found] == [2, 20, 64, 256]
    # stamps n squared, six a round: the median round of the first size begins with stamp 12
    assert found[0] == {"bytes": 2 * 2**20, "malloc_us": 25e6, "free_us": 33e6, "cached_us": 29e6}
