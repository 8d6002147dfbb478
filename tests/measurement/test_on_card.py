"""A whole measurement with a CUDA and an NVML that answer from a script, and the real step on the CPU."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from fake_gpu import MIB, FakeNvml, fake_cuda

from trainatomy.errors import DeviceError, WorkloadError
from trainatomy.measurement.device import nvml
from trainatomy.measurement.device.meter import Meter
from trainatomy.measurement.process import worker
from trainatomy.measurement.process.job import Job, read_result
from trainatomy.measurement.step import on_card
from trainatomy.measurement.step.here import NO_ENGINE, is_out_of_memory
from trainatomy.measurement.step.scribe import Scribe
from trainatomy.measurement.traces import trace as trace_files
from trainatomy.training import run as steps

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


def test_a_measurement_holds_what_cuda_and_the_driver_say(nvml_library: FakeNvml) -> None:
    found = on_card.run(Job(TINY))
    assert (found.name, found.status, found.gpu, found.driver) == ("tiny", "completed", "NVIDIA H200", "580.159.04")
    assert (found.peak_allocated_bytes, found.peak_reserved_bytes) == (40 * MIB, 64 * MIB)
    assert (found.model_bytes, found.context_bytes, found.device_bytes) == (11 * MIB, 527 * MIB, 529 * MIB)
    assert found.steps == 4
    assert found.step_seconds is not None and found.step_seconds > 0
    assert found.versions["torch"] == torch.__version__
    assert nvml_library.opened == 0


def test_the_worker_reads_a_workload_and_writes_a_result(nvml_library: FakeNvml, tmp_path: Path) -> None:
    description, result = tmp_path / "workload.json", tmp_path / "result.json"
    description.write_text(json.dumps(TINY | {"steps": 1}))
    assert worker.main([str(description), str(result), "--trace", str(tmp_path / "tape.json.gz")]) == 0
    found = read_result(result)
    assert (found.steps, found.step_seconds) == (1, None)
    history = trace_files.read(tmp_path / "tape.json.gz")
    assert history.case["name"] == "tiny"
    tiny = trace_files.to_trace(history)
    assert [(origin.phase, origin.step) for origin in tiny.origins] == [("load", -1), ("forward", 0)]
    said = ["loaded", "step", "forward", "forward end", "backward end", "optimizer", "optimizer end"]
    assert [mark.name for mark in tiny.marks] == [*said, "zero_grad", "zero_grad end", "step end"]


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
    found = on_card.run(Job(TINY))
    assert (found.status, found.steps) == ("out of memory", 0)
    assert found.message == str(error).splitlines()[0]
    assert found.peak_allocated_bytes == 40 * MIB


def test_other_errors_are_not_out_of_memory(nvml_library: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*_: object, **__: object) -> None:
        raise RuntimeError("CUDA error: misaligned address")

    monkeypatch.setattr(steps, "run", run)
    with pytest.raises(RuntimeError, match="misaligned"):
        on_card.run(Job(TINY))


@pytest.mark.parametrize(("refusals", "expected"), [(3, True), (0, False)])
def test_no_engine_means_no_memory_where_the_allocator_refused(
    monkeypatch: pytest.MonkeyPatch, refusals: int, expected: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda: {"num_ooms": refusals})
    assert is_out_of_memory(RuntimeError(f"GET was {NO_ENGINE}")) is expected
    assert not is_out_of_memory(RuntimeError("CUDA error: misaligned address"))
    assert not is_out_of_memory(ValueError(NO_ENGINE))


def test_an_error_of_the_workloads_reaches_the_caller(nvml_library: FakeNvml, tmp_path: Path) -> None:
    worker.execute(Job({"model": {"class": "BertForNothing"}}), tmp_path / "result.json")
    with pytest.raises(WorkloadError, match="BertForNothing"):
        read_result(tmp_path / "result.json")


def test_a_pytorch_without_cuda_says_so(nvml_library: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(DeviceError, match=r"finds no GPU.*predict"):
        on_card.run(Job(TINY))


def test_a_recorded_run_has_its_bill_and_its_steps_followed(nvml_library: FakeNvml) -> None:
    found = on_card.run(Job(TINY, record=True))
    assert found.memory is not None
    assert found.memory.components.total_bytes == found.device_bytes == 529 * MIB
    assert any("PyTorch counted" in note for note in found.notes)  # the fake's tape is not the fake's counters
    assert [stage.name for stage in found.stages] == ["idle", "first tensor", "model loaded", "training"]


def test_throughput_counts_samples_and_tokens(nvml_library: FakeNvml) -> None:
    found = on_card.run(Job({**TINY, "train": {**TINY["train"], "gradient_accumulation_steps": 3}}))  # type: ignore[dict-item]
    assert found.step_seconds is not None and found.samples_per_second is not None
    assert found.samples_per_second == pytest.approx(2 * 3 / found.step_seconds)
    assert found.tokens_per_second == pytest.approx(8 * found.samples_per_second)


def test_short_steps_are_timed_until_they_took_long_enough(nvml_library: FakeNvml) -> None:
    assert on_card.run(Job(TINY, steps=3, most_steps=6, seconds=1e6)).steps == 6
    assert on_card.run(Job(TINY, steps=3, most_steps=6, seconds=1e-9)).steps == 3
    assert on_card.run(Job({**TINY, "steps": 5}, steps=3, most_steps=6, seconds=1e-9)).steps == 5


@pytest.mark.parametrize("record", [False, True])
def test_nothing_waits_for_the_gpu_between_timed_steps(
    nvml_library: FakeNvml, monkeypatch: pytest.MonkeyPatch, record: bool
) -> None:
    waits: list[None] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: waits.append(None))
    short = on_card.run(Job({**TINY, "steps": 3}, record=record))
    after_short = len(waits)
    long = on_card.run(Job({**TINY, "steps": 9}, record=record))
    assert len(waits) - after_short == after_short
    assert (len(short.timed_step_seconds), len(long.timed_step_seconds)) == (1, 7)


def test_a_tape_that_cannot_be_kept_costs_the_tape_only(
    nvml_library: FakeNvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(trace_files, "write", full)
    found = on_card.run(Job(TINY, record=True, trace=Path("/tmp/x")))
    assert found.tape_file is None and found.memory is not None
    assert any("could not be kept in /tmp/x: No space left on device" in note for note in found.notes)


def test_what_was_asked_for_is_read_from_the_message(nvml_library: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*_: object, observer: Scribe, **__: object) -> None:
        observer.step_begin(1)
        observer.forward_end()
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.50 GiB. GPU 0 has")

    monkeypatch.setattr(steps, "run", run)
    for job in (Job(TINY), Job(TINY, record=True)):
        point = on_card.run(job).out_of_memory
        assert point is not None
        assert (point.instant.step, point.instant.phase) == (1, "backward")
        assert (point.requested_bytes, point.reserved_bytes) == (1536 * MIB, 2 * MIB)
    assert on_card.requested_in("out of memory") == 0


def test_without_nvml_the_run_goes_on(nvml_library: FakeNvml) -> None:
    nvml_library.driver_answers = False
    found = on_card.run(Job(TINY, record=True))
    assert (found.driver, found.device_bytes, found.stages[0].device_bytes) == ("unknown", None, None)
    assert any("NVML cannot be read" in note for note in found.notes)
    assert found.memory is not None and found.memory.components.context == 0


def test_options_that_pytorch_refuses_are_the_workloads_fault(
    nvml_library: FakeNvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> None:
        raise RuntimeError("Unrecognized CachingAllocator option: x")

    monkeypatch.setattr(torch.cuda, "init", refuse)
    with pytest.raises(WorkloadError, match=r"allocator: .*refuses 'expandable_segments:True'"):
        on_card.run(Job({**TINY, "allocator": "expandable_segments:True"}))


def test_addresses_of_states_are_taken_again_only_when_they_change(nvml_library: FakeNvml) -> None:
    scribe = Scribe(Meter(None, alone=True), warm_up=1)
    parameter = torch.nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.Adam([parameter])
    scribe.ready(torch.nn.ParameterList([parameter]), optimizer)
    parameter.grad = torch.ones(2)
    found = []
    for step in range(4):
        scribe.step_begin(step)
        scribe.optimizer_begin()
        optimizer.step()
        scribe.optimizer_end()
        found.append([note.addresses for note in scribe.notes if note.name == "optimizer end"][-1])
        assert scribe.notes[-2].addresses == {"gradient": [parameter.grad.data_ptr()]}
    assert scribe._number_of_states == 3
