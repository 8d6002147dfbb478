"""What holds for all tests of measuring."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from trainatomy.integrations.live_measurement import LiveMeasurement


@pytest.fixture(autouse=True)
def no_watch_outlives_its_test(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Detach what a failed test leaves watched, whose hooks would fail in each later test of the process."""
    start, started = LiveMeasurement.start, []

    def noted(live: LiveMeasurement) -> None:
        start(live)
        started.append(live)

    monkeypatch.setattr(LiveMeasurement, "start", noted)
    yield
    for live in started:
        live._attached.close()
