"""What is read from the driver, and what is said where there is none."""

from __future__ import annotations

import sys

import pytest
from fake_gpu import IDLE_BYTES, MIB, UUID, FakeNvml

from trainatomy.errors import DeviceError, MissingLibrary
from trainatomy.gpu import nvml
from trainatomy.gpu.meter import DeviceMemory, Meter


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    library = FakeNvml()
    monkeypatch.setattr(nvml, "_library", lambda: library)
    return library


def test_both_forms_and_the_process_are_read(fake: FakeNvml) -> None:
    fake.used, fake.pid = 500 * MIB, 42
    with nvml.session() as driver:
        reading = driver.cards[0].read(pid=42)
        assert (driver.version, driver.cards[0].name) == ("580.159.04", "NVIDIA H200")
    assert reading == nvml.Reading(IDLE_BYTES + 500 * MIB, 500 * MIB, IDLE_BYTES, 500 * MIB, ((42, 500 * MIB),))
    assert fake.opened == 0


def test_what_an_old_driver_does_not_say_is_none(fake: FakeNvml) -> None:
    fake.has_second_form = fake.processes_answer = False
    with nvml.session() as driver:
        assert driver.cards[0].read() == nvml.Reading(IDLE_BYTES, None, None, None)


def test_a_process_that_holds_nothing_is_none_not_zero(fake: FakeNvml) -> None:
    with nvml.session() as driver:
        assert driver.cards[0].read(pid=99).process_bytes is None


def test_the_card_is_found_by_the_uuid_that_cuda_gives(fake: FakeNvml) -> None:
    fake.count = 3
    with nvml.session() as driver:
        card = driver.card(UUID)
        assert card is not None and card.handle == 2
        assert driver.card("nobody") is None


def test_no_driver_and_no_card_are_device_errors(fake: FakeNvml) -> None:
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


def measured(fake: FakeNvml, *, alone: bool) -> DeviceMemory:
    """Idle, then a context of 527 MiB beside a segment of 2 MiB, then a peak of 900 MiB, then 800 MiB."""
    with nvml.session() as driver:
        meter = Meter(driver, alone=alone)
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


def test_the_meter_takes_off_what_the_idle_card_held(fake: FakeNvml, own_pid: None) -> None:
    assert measured(fake, alone=True) == DeviceMemory(
        device_bytes=900 * MIB,
        process_bytes=900 * MIB,
        nvml_used_bytes=IDLE_BYTES + 900 * MIB,
        idle_bytes=IDLE_BYTES,
        context_bytes=527 * MIB,
    )


def test_beside_others_only_the_process_counts(fake: FakeNvml, own_pid: None) -> None:
    assert measured(fake, alone=False) == DeviceMemory(900 * MIB, 900 * MIB, None, None, 527 * MIB)


def test_beside_others_and_without_the_process_nothing_is_known(fake: FakeNvml) -> None:
    fake.processes_answer = False
    assert measured(fake, alone=False) == DeviceMemory(None, None, None, None, None)


def test_a_meter_without_a_driver_knows_nothing() -> None:
    meter = Meter(None, alone=True)
    meter.choose(UUID)
    meter.read_context(2 * MIB)
    assert meter.result() == DeviceMemory(None, None, None, None, None)
