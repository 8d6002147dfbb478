"""Wait for a moment in which this machine does nothing else, and judge whether it was quiet while it was measured."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from statistics import median
from typing import Any

from trainatomy.measurement.device.host import HostLoad, LoadMeter, probe_seconds

WINDOW = 0.5
"""Seconds of one look at the machine."""
PROBES = 20
"""Probes in it."""
MOST_OTHERS = 0.5
"""Share of all processors that others may use.  Most cores show as two processors: beyond half of them, others share a
core with the thread that is measured."""
MOST_STOLEN = 0.02
"""Share of the time that a hypervisor or the container's limit may take away."""
MOST_SPREAD = 2.0
"""The typical probe over the quickest one, up to which what is measured can be taken at the pace of the quickest.

Beside other machines' work on the same cores, it was 1.2 to 1.8 on an H200's host for minutes, while no process of the
machine itself ran."""


def wait_until_quiet(seconds: float, report: Callable[[str], None]) -> str:
    """Wait for a quiet moment, for at most this many seconds; return why the last look was not one, or an empty string.

    The probe is compared with the quickest time of the whole wait, so the first look at a machine that is slow
    throughout passes; its load does not.
    """
    quickest, began, told = float("inf"), time.monotonic(), ""
    while True:
        meter, times = LoadMeter(), []
        for _ in range(PROBES):
            times.append(probe_seconds())
            time.sleep(WINDOW / PROBES)
        quickest = min(quickest, *times)
        why = reason(meter.read(), median(times) / quickest)
        if not why or time.monotonic() - began >= seconds:
            return why
        if why != told:
            report(f"waiting for a quiet moment: {why}")
            told = why


def reason(load: HostLoad, spread: float) -> str:
    """Return why a machine with this load and this spread of its probe is not quiet; an empty string if it is."""
    if load.others_share is not None and load.others_share > MOST_OTHERS:
        return f"other processes use {load.others_share:.0%} of the processors"
    if load.stolen_share is not None and load.stolen_share > MOST_STOLEN:
        return f"the hypervisor gives {load.stolen_share:.0%} of the processors' time to other machines"
    if load.throttled_share > MOST_STOLEN:
        return f"the container's limit of processors stops it for {load.throttled_share:.0%} of the time"
    if spread > MOST_SPREAD:
        return f"a fixed piece of work typically takes {spread:.2f} times as long as at best"
    return ""


def reason_of(measured: Mapping[str, Any]) -> str:
    """Return why the machine was not quiet while ``phases`` measured it."""
    load = HostLoad(**measured["load"])
    return reason(load, measured["probe_spread"])
