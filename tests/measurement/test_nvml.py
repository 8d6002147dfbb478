"""Reading the driver, and the errors without one."""

from __future__ import annotations

import sys

import pytest
from fake_gpu import IDLE_BYTES, MIB, UUID, FakeNvml

from trainatomy.errors import DeviceError, MissingLibrary
from trainatomy.measurement.device import nvml
from trainatomy.measurement.device.meter import DeviceMemory, Meter


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    library = FakeNvml()
    monkeypatch.setattr(nvml, "_library", lambda: library)
    return library


def test_both_memory_forms_and_the_process_are_read(fake: FakeNvml) -> None:
    fake.used, fake.pid = 500 * MIB, 42
    with nvml.session() as driver:
        reading = driver.gpus[0].read(pid=42)
        assert (driver.version, driver.gpus[0].name) == ("580.159.04", "NVIDIA H200")
    assert reading == nvml.Reading(IDLE_BYTES + 500 * MIB, 500 * MIB, IDLE_BYTES, 500 * MIB, ((42, 500 * MIB),))
    assert fake.opened == 0


def test_missing_figures_of_an_old_driver_are_none(fake: FakeNvml) -> None:
    fake.has_second_form = fake.processes_answer = False
    with nvml.session() as driver:
        assert driver.gpus[0].read() == nvml.Reading(IDLE_BYTES, None, None, None)


def test_a_process_without_gpu_memory_is_none_not_zero(fake: FakeNvml) -> None:
    with nvml.session() as driver:
        assert driver.gpus[0].read(pid=99).process_bytes is None


def test_the_gpu_is_found_by_its_cuda_uuid(fake: FakeNvml) -> None:
    fake.count = 3
    with nvml.session() as driver:
        gpu = driver.device(UUID)
        assert gpu is not None and gpu.handle == 2
        assert driver.device("nobody") is None


def test_no_driver_and_no_gpu_are_device_errors(fake: FakeNvml) -> None:
    fake.count = 0
    with pytest.raises(DeviceError, match="shows no GPU"), nvml.session():
        pass
    assert fake.opened == 0
    fake.driver_answers = False
    with pytest.raises(DeviceError, match="Driver Not Loaded"), nvml.session():
        pass


def test_a_missing_binding_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(MissingLibrary, match="pip install nvidia-ml-py"), nvml.session():
        pass


@pytest.fixture(autouse=True)
def allocator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fake PyTorch's allocator on a machine without CUDA."""
    monkeypatch.setattr("torch.cuda.memory_allocated", lambda: 0)
    monkeypatch.setattr("torch.cuda.memory_reserved", lambda: 0)


def measured(fake: FakeNvml, *, alone: bool) -> DeviceMemory:
    """Read an idle GPU, then a context of 527 MiB with a segment of 2 MiB, a peak of 900 MiB, and 800 MiB."""
    with nvml.session() as driver:
        meter = Meter(driver, is_exclusive=alone)
        meter.choose(UUID)
        fake.used = 529 * MIB
        meter.read_context(2 * MIB)
        for used in (900, 800):
            fake.used = used * MIB
            meter.read()
        return meter.result()


@pytest.fixture
def own_pid(fake: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    fake.pid = 4711
    monkeypatch.setattr("os.getpid", lambda: 4711)


def test_the_meter_subtracts_the_memory_of_the_idle_gpu(fake: FakeNvml, own_pid: None) -> None:
    assert measured(fake, alone=True) == DeviceMemory(
        device_bytes=900 * MIB,
        process_bytes=900 * MIB,
        nvml_used_bytes=IDLE_BYTES + 900 * MIB,
        idle_bytes=IDLE_BYTES,
        context_bytes=527 * MIB,
    )


def test_only_the_own_process_counts_on_a_shared_gpu(fake: FakeNvml, own_pid: None) -> None:
    assert measured(fake, alone=False) == DeviceMemory(900 * MIB, 900 * MIB, None, None, 527 * MIB)


def test_memory_is_unknown_if_only_other_processes_are_listed(fake: FakeNvml) -> None:
    fake.processes_answer = False
    assert measured(fake, alone=False) == DeviceMemory(None, None, None, None, None)


def test_a_meter_without_a_driver_has_no_figures() -> None:
    meter = Meter(None, is_exclusive=True)
    meter.choose(UUID)
    meter.read_context(2 * MIB)
    assert meter.result() == DeviceMemory(None, None, None, None, None)


def test_other_processes_on_the_gpu_are_listed_and_change_no_figure(fake: FakeNvml, own_pid: None) -> None:
    fake.others = {1: 3 * MIB, 99999999: None}
    with nvml.session() as driver:
        meter = Meter(driver, is_exclusive=True)
        meter.choose(UUID)
        fake.used = 529 * MIB
        meter.read_context(2 * MIB)
        fake.others[1] = 90 * MIB
        fake.used = 900 * MIB
        assert meter.read() == 900 * MIB
        assert meter.result() == DeviceMemory(900 * MIB, 900 * MIB, None, None, 527 * MIB)
        first, second = meter.other_processes()
    assert (first.pid, first.bytes, bool(first.name)) == (1, 90 * MIB, True)
    assert (second.pid, second.bytes, second.name) == (99999999, None, "")
    (note,) = meter.notes()
    assert note.startswith("2 other processes use the GPU: device memory is the driver's figure for this process")


def test_in_a_container_the_new_process_is_the_own_one(fake: FakeNvml) -> None:
    fake.pid, fake.used = 1, 3 * MIB
    with nvml.session() as driver:
        meter = Meter(driver, is_exclusive=True)
        meter.choose(UUID)
        fake.others = {1: 3 * MIB}
        fake.pid, fake.used = 31337, 529 * MIB  # the process id outside of the container
        meter.read_context(2 * MIB)
        assert meter.result().process_bytes == 529 * MIB
        assert [one.pid for one in meter.other_processes()] == [1]


def test_indistinguishable_processes_are_noted(fake: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    fake.others = {1: 3 * MIB, 2: 4 * MIB}
    fake.pid = 3
    with nvml.session() as driver:
        meter = Meter(driver, is_exclusive=True)
        meter.choose(UUID)
        fake.used = 529 * MIB
        fake.others[4] = 5 * MIB
        monkeypatch.setattr("os.getpid", lambda: 77)
        fake.pid = 5
        meter.read_context(2 * MIB)
        assert meter.result().device_bytes == 534 * MIB
    assert "wrong if they allocated or released any" in meter.notes()[0]


def test_stages_are_read_from_both(fake: FakeNvml, own_pid: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.memory_allocated", lambda: 1 * MIB)
    monkeypatch.setattr("torch.cuda.memory_reserved", lambda: 2 * MIB)
    with nvml.session() as driver:
        meter = Meter(driver, is_exclusive=True)
        meter.choose(UUID)
        for used, read in ((529, lambda: meter.read_context(2 * MIB)), (700, lambda: meter.stage("model loaded"))):
            fake.used = used * MIB
            read()
        fake.used = 900 * MIB
        meter.read()
        found = meter.stages(300 * MIB, 370 * MIB)
    assert [(one.name, one.device_bytes, one.allocated_bytes, one.reserved_bytes) for one in found] == [
        ("idle", 0, 0, 0),
        ("first tensor", 529 * MIB, 1 * MIB, 2 * MIB),
        ("model loaded", 700 * MIB, 1 * MIB, 2 * MIB),
        ("training", 900 * MIB, 300 * MIB, 370 * MIB),
    ]
    assert [one.nvml_used_bytes for one in found] == [IDLE_BYTES + size * MIB for size in (0, 529, 700, 900)]


@pytest.mark.parametrize(
    ("visible", "uuid", "found"),
    [
        ("MIG-two", UUID, "MIG-two"),
        (None, "GPU-two", "MIG-two"),
        (None, UUID, f"GPU-{UUID}"),
    ],
)
def test_a_mig_instance_is_a_separate_gpu(
    fake: FakeNvml, monkeypatch: pytest.MonkeyPatch, visible: str | None, uuid: str, found: str
) -> None:
    fake.instances = ("MIG-one", "MIG-two")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with nvml.session() as driver:
        gpu = driver.device(uuid)
        assert gpu is not None and gpu.uuid == found
        fake.instances = ("MIG-one",)
    with nvml.session() as driver:
        only = driver.device(UUID)
        assert only is not None and only.is_instance and only.name == "NVIDIA H200 MIG 1g.18gb"


def test_an_unreadable_gpu_does_not_prevent_measuring_another(fake: FakeNvml, own_pid: None) -> None:
    fake.count, fake.unreadable, fake.lost = 3, (0,), (1,)
    assert measured(fake, alone=True).device_bytes == 900 * MIB
    with nvml.session() as driver:
        assert [gpu.handle for gpu in driver.gpus] == [0, 2]
        with pytest.raises(
            DeviceError, match=r"does not report the memory of NVIDIA H200 \(GPU-other-0\): Insufficient"
        ):
            driver.gpus[0].read()


def test_nothing_is_known_of_an_unreadable_gpu(fake: FakeNvml) -> None:
    fake.unreadable = (0,)
    assert measured(fake, alone=True) == DeviceMemory(None, None, None, None, None)
    fake.lost = (0,)
    with pytest.raises(DeviceError, match="shows no GPU"), nvml.session():
        pass
