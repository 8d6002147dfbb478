"""A complete measurement with fake CUDA and NVML; the step really runs, on the CPU."""

from __future__ import annotations

import os
from importlib import metadata
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
from fake_gpu import MIB, FakeNvml, fake_cuda
from processes import execute, read_result

from trainatomy.errors import DeviceError, WorkloadError
from trainatomy.measurement.device import nvml
from trainatomy.measurement.process.job import Job
from trainatomy.measurement.step import building, runner
from trainatomy.measurement.step import recorder as recorders
from trainatomy.measurement.step.recorder import RunRecorder
from trainatomy.measurement.step.results import NO_ENGINE, is_out_of_memory, requested_bytes
from trainatomy.measurement.traces import history as histories
from trainatomy.measurement.traces.trace import to_trace
from trainatomy.training import run as steps
from trainatomy.training.lengths import orders
from trainatomy.workload.measurable import measurable
from trainatomy.workload.schema import Workload

TINY = {
    "name": "tiny",
    "model": {
        "class": "BertForSequenceClassification",
        "config": {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8},
    },
    "data": {"sequence_length": 8},
    "loop": "pytorch",
    "train": {"per_device_train_batch_size": 2, "optim": "sgd"},
}
TRACE = [
    {"action": "alloc", "addr": 1, "size": 4, "stream": 0},
    {"action": "alloc", "addr": 2, "size": 8, "stream": 0},
]


@pytest.fixture
def nvml_library(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    library = FakeNvml(pid=os.getpid())
    monkeypatch.setattr(nvml, "_library", lambda: library)
    fake_cuda(monkeypatch, library, TRACE)
    return library


def test_a_measurement_contains_the_figures_of_cuda_and_the_driver(nvml_library: FakeNvml) -> None:
    found = runner.run(Job(TINY))
    assert (found.name, found.status, found.gpu, found.driver) == ("tiny", "completed", "NVIDIA H200", "580.159.04")
    assert (found.peak_allocated_bytes, found.peak_reserved_bytes) == (40 * MIB, 64 * MIB)
    assert (found.model_bytes, found.context_bytes, found.device_bytes) == (11 * MIB, 527 * MIB, 529 * MIB)
    assert found.steps == 4
    assert found.step_seconds is not None and found.step_seconds > 0
    assert found.versions["torch"] == metadata.version("torch")
    assert nvml_library.opened == 0


def test_a_result_and_its_trace_are_written_to_files(nvml_library: FakeNvml, tmp_path: Path) -> None:
    result, trace = tmp_path / "result.json", tmp_path / "trace.json.gz"
    execute(Job(TINY | {"steps": 1}, trace=trace), result)
    found = read_result(result)
    assert (found.steps, found.step_seconds) == (1, None)
    history = histories.read(trace)
    assert history.case["name"] == "tiny"
    tiny = to_trace(history)
    assert [(origin.phase, origin.step) for origin in tiny.origins] == [("load", -1), ("forward", 0)]
    names = ["loaded", "step", "forward", "forward end", "backward end", "optimizer", "optimizer end"]
    assert [mark.name for mark in tiny.marks] == [*names, "zero_grad", "zero_grad end", "step end"]


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried"),
        RuntimeError("CUDA error: out of memory\nmore"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"),
    ],
)
def test_running_out_of_memory_is_a_result(
    nvml_library: FakeNvml, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def run(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(steps, "run", run)
    found = runner.run(Job(TINY))
    assert (found.status, found.steps) == ("out of memory", 0)
    assert found.message == str(error).splitlines()[0]
    assert found.peak_allocated_bytes == 40 * MIB


def test_memory_is_read_before_the_cache_is_emptied(nvml_library: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    release = lambda: setattr(nvml_library, "used", 529 * MIB)  # noqa: E731

    def run(*_: object, **__: object) -> None:
        nvml_library.used = 900 * MIB
        torch.cuda.empty_cache()

    monkeypatch.setattr(torch.cuda, "empty_cache", release)
    monkeypatch.setattr(steps, "run", run)
    assert runner.run(Job(TINY)).device_bytes == 900 * MIB
    assert torch.cuda.empty_cache is release


def test_other_errors_are_not_out_of_memory(nvml_library: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*_: object, **__: object) -> None:
        raise RuntimeError("CUDA error: misaligned address")

    monkeypatch.setattr(steps, "run", run)
    with pytest.raises(RuntimeError, match="misaligned"):
        runner.run(Job(TINY))


@pytest.mark.parametrize(("refusals", "expected"), [(3, True), (0, False)])
def test_cudnn_no_engine_error_after_a_refused_allocation_is_out_of_memory(
    monkeypatch: pytest.MonkeyPatch, refusals: int, expected: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda: {"num_ooms": refusals})
    assert is_out_of_memory(RuntimeError(f"GET was {NO_ENGINE}")) is expected
    assert not is_out_of_memory(RuntimeError("CUDA error: misaligned address"))
    assert not is_out_of_memory(ValueError(NO_ENGINE))


def test_an_error_of_the_workloads_reaches_the_caller(nvml_library: FakeNvml, tmp_path: Path) -> None:
    execute(Job({"model": {"class": "BertForNothing"}}), tmp_path / "result.json")
    with pytest.raises(WorkloadError, match="BertForNothing"):
        read_result(tmp_path / "result.json")


def test_a_pytorch_build_without_cuda_is_reported(nvml_library: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(DeviceError, match=r"finds no GPU.*predict"):
        runner.run(Job(TINY))


def test_a_recorded_run_has_its_memory_breakdown_and_stages(nvml_library: FakeNvml) -> None:
    found = runner.run(Job(TINY, record=True))
    assert found.memory is not None
    assert found.memory.components.total_bytes == found.device_bytes == 529 * MIB
    assert any("PyTorch counted" in note for note in found.notes)  # the fake's trace is not the fake's counters
    assert [stage.name for stage in found.stages] == ["idle", "first tensor", "model loaded", "training"]


def test_throughput_counts_samples_and_tokens(nvml_library: FakeNvml) -> None:
    found = runner.run(Job({**TINY, "train": {**TINY["train"], "gradient_accumulation_steps": 3}}))  # type: ignore[dict-item]
    assert found.step_seconds is not None and found.samples_per_second is not None
    assert found.samples_per_second == pytest.approx(2 * 3 / found.step_seconds)
    assert found.tokens_per_second == pytest.approx(8 * found.samples_per_second)


def test_short_steps_are_timed_until_they_took_long_enough(nvml_library: FakeNvml) -> None:
    assert runner.run(Job(TINY, steps=3, most_steps=6, seconds=1e6)).steps == 6
    assert runner.run(Job(TINY, steps=3, most_steps=6, seconds=1e-9)).steps == 3
    assert runner.run(Job({**TINY, "steps": 5}, steps=3, most_steps=6, seconds=1e-9)).steps == 5


@pytest.mark.parametrize("record", [False, True])
def test_nothing_waits_for_the_gpu_between_timed_steps(
    nvml_library: FakeNvml, monkeypatch: pytest.MonkeyPatch, record: bool
) -> None:
    waits: list[None] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: waits.append(None))
    short = runner.run(Job({**TINY, "steps": 3}, record=record))
    after_short = len(waits)
    long = runner.run(Job({**TINY, "steps": 9}, record=record))
    assert len(waits) - after_short == after_short
    assert (len(short.timed_step_seconds), len(long.timed_step_seconds)) == (1, 7)


def test_a_trace_that_cannot_be_written_loses_the_trace_only(
    nvml_library: FakeNvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(histories, "write", full)
    found = runner.run(Job(TINY, record=True, trace=Path("/tmp/x")))
    assert found.tape_file is None and found.memory is not None
    assert any("could not be kept in /tmp/x: No space left on device" in note for note in found.notes)


def test_the_requested_size_is_read_from_the_message(nvml_library: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*_: object, observer: Any, **__: object) -> None:
        observer.step_begin(1)
        observer.forward_end()
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.50 GiB. GPU 0 has")

    monkeypatch.setattr(steps, "run", run)
    for job in (Job(TINY), Job(TINY, record=True)):
        point = runner.run(job).out_of_memory
        assert point is not None
        assert (point.instant.step, point.instant.phase) == (1, "backward")
        assert (point.requested_bytes, point.reserved_bytes) == (1536 * MIB, 2 * MIB)
    assert requested_bytes("out of memory") == 0


def test_without_nvml_the_run_continues(nvml_library: FakeNvml) -> None:
    nvml_library.driver_answers = False
    found = runner.run(Job(TINY, record=True))
    assert (found.driver, found.device_bytes, found.stages[0].device_bytes) == ("unknown", None, None)
    assert any("NVML cannot be read" in note for note in found.notes)
    assert found.memory is not None and found.memory.components.context == 0


def test_options_that_pytorch_refuses_are_workload_errors(
    nvml_library: FakeNvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> None:
        raise RuntimeError("Unrecognized CachingAllocator option: x")

    monkeypatch.setattr(torch.cuda, "init", refuse)
    with pytest.raises(WorkloadError, match=r"allocator: .*refuses 'expandable_segments:True'"):
        runner.run(Job({**TINY, "allocator": "expandable_segments:True"}))


def test_addresses_of_states_are_reread_only_when_they_change(
    nvml_library: FakeNvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorders, "addresses", lambda tensors: [tensor.data_ptr() for tensor in tensors])
    recorder = RunRecorder(warm_up=1)
    parameter = torch.nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.Adam([parameter])
    recorder.ready(torch.nn.ParameterList([parameter]), optimizer)
    parameter.grad = torch.ones(2)
    found = []
    for step in range(4):
        recorder.step_begin(step)
        recorder.optimizer_begin()
        optimizer.step()
        recorder.optimizer_end()
        found.append([note.addresses for note in recorder.notes if note.name == "optimizer end"][-1])
        assert recorder.notes[-2].addresses == {"gradient": [parameter.grad.data_ptr()]}
    assert recorder._num_states == 3


def test_an_epoch_of_different_lengths_runs_as_it_is_predicted(
    nvml_library: FakeNvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[int, ...]] = []
    original = building.build_model

    def watched(workload: Any) -> Any:
        model = original(workload)
        model.register_forward_pre_hook(
            lambda module, args, kwargs: seen.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
        )
        return model

    monkeypatch.setattr(building, "build_model", watched)
    workload = measurable(
        Workload.from_mapping({**TINY, "data": {"lengths": {"histogram": {3: 4, 8: 4, 20: 4}, "orders": 5}}})
    )
    found = runner.run(Job(workload.to_mapping()))
    wanted = [batch.shape[:2] for step in orders(workload)[0].steps for batch in step]
    assert seen == wanted
    assert (found.steps, len(found.timed_step_seconds)) == (6, 4)
    assert found.step_seconds == pytest.approx(fmean(found.timed_step_seconds))
    assert found.tokens_per_second == pytest.approx(2 * 10 / found.step_seconds)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc")
def test_a_control_run_says_what_it_takes_of_the_host_and_a_recorded_one_does_not(nvml_library: FakeNvml) -> None:
    bill = runner.run(Job(TINY)).host_bill
    assert bill is not None
    assert [phase.name for phase in bill.phases] == ["libraries", "loading", "training"]
    assert bill.fullest.needed_bytes > 100 * MIB
    assert runner.run(Job(TINY, record=True)).host_bill is None
