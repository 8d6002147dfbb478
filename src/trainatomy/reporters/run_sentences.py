"""Sentences about how a measured run went: the host's pace, the GPU's power, and waiting for data."""

from __future__ import annotations

from statistics import fmean, median
from typing import TYPE_CHECKING, Any

from trainatomy.reporters.labels import CLOCK_REASONS
from trainatomy.units import percent, rate, seconds, signed_percent

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from trainatomy.results.comparison import ComparisonRow
    from trainatomy.results.data_wait import DataWait
    from trainatomy.results.host_pace import HostPace
    from trainatomy.results.measurement import Measurement
    from trainatomy.results.power import PowerUse, Slowdown
    from trainatomy.results.time import Time

BUSY = 0.25
"""Share of the processors from which other work is told."""
STALLED = 0.01
"""Share of the time from which stalls are told."""
WAITED = 0.02
"""Share of a step from which waiting for data is called a loss."""
FEW_STRETCHES = 5
"""Slowdowns that are listed."""


def host_pace(pace: HostPace, time: Time | None, step_seconds: float | None) -> list[str]:
    """Return how fast the CPU was, and what the prediction is at that pace and at a quiet host."""
    beside = ((title, times) for title, times in (("before", pace.before_seconds), ("after", pace.after_seconds)))
    others = ", ".join(f"{seconds(median(times))} {title}" for title, times in beside if times)
    when = "between steps" if pace.during_seconds else "around the steps"
    text = f"probe of the CPU: {seconds(median(pace.during_seconds or (pace.seconds,)))} {when}"
    if pace.during_seconds and others:
        text += f", {others} them"
    lines = [text, *_load(pace)]
    relative = pace.relative if time is None else time.pace_of(pace)
    if relative is None:
        return [*lines, "its time on the host that predictions assume was not measured, so the pace is not known"]
    lines.append(f"the CPU took {relative:.2f} times as long as the one that the prediction assumes")
    if time is not None and (at_pace := time.step_seconds_at(relative)) is not None:
        gap = "" if step_seconds is None else f" ({signed_percent(at_pace - step_seconds, step_seconds, 1)})"
        lines.append(
            f"predicted at this pace: {seconds(at_pace)} per step{gap}; at that of a quiet host: "
            f"{seconds(time.step_seconds)}"
        )
    return lines


def _load(pace: HostPace) -> list[str]:
    """Return what took processors from the training during the steps."""
    lines = []
    if (pace.waited_share or 0.0) >= STALLED:
        lines.append(f"its threads waited for a processor for {percent(pace.waited_share or 0.0, 1)} of their time")
    if pace.others_share is not None and pace.others_share >= BUSY:
        lines.append(f"other processes used {percent(pace.others_share, 1)} of the processors")
    if (pace.stolen_share or 0.0) >= STALLED:
        lines.append(f"the hypervisor gave {percent(pace.stolen_share or 0.0, 1)} of their time to other machines")
    if (pace.throttled_share or 0.0) >= STALLED:
        lines.append(
            f"the container's limit of processors stopped it for {percent(pace.throttled_share or 0.0, 1)} of the time"
        )
    return lines


def compared_pace(row: ComparisonRow) -> str:
    """Return the pace of the host in a row's runs with the predictions at it; empty where it is not known."""
    time = None if row.prediction is None else row.prediction.time
    if time is None:
        return ""
    paces = [time.pace_of(each.host_pace) for each in row.completed if each.host_pace is not None]
    known = [pace for pace in paces if pace is not None]
    at_pace = time.step_seconds_at(median(known)) if known else None
    if at_pace is None:
        return ""
    return (
        f"the CPU took {median(known):.2f} times as long as assumed: {seconds(at_pace)} per step predicted at this "
        f"pace, {seconds(time.step_seconds)} on a quiet host"
    )


def compared_slowdowns(row: ComparisonRow) -> str:
    """Return where the driver lowered the clock in the runs of a row; empty where it did not."""
    found = [(one, each.power.limits) for each in row.completed if each.power for one in each.power.slowdowns]
    if not found:
        return ""
    longest, limits = max(found, key=lambda each: each[0].time_share)
    return slowdown(longest, limits.clock_mhz)


def power(use: PowerUse, steps: int) -> list[str]:
    """Return energy, power and temperature of a run, and what slowed its clock."""
    lines = [*_energy(use, steps), *_draw(use)]
    shown = use.slowdowns[:FEW_STRETCHES]
    lines += [slowdown(one, use.limits.clock_mhz) for one in shown]
    if len(use.slowdowns) > len(shown):
        lines.append(f"{len(use.slowdowns) - len(shown)} more such stretches")
    return lines


def _energy(use: PowerUse, steps: int) -> list[str]:
    if use.joules is None:
        return ["the run was too short to measure its energy"]
    parts = [f"{_joules(use.joules / steps)} per step"]
    if use.joules_per_sample is not None:
        parts.append(f"{_joules(use.joules_per_sample)} per sample")
    if use.joules_per_token is not None:
        parts.append(f"{_joules(use.joules_per_token)} per token")
    how = "the GPU's energy counter" if use.counted else "sampled power"
    return [f"{', '.join(parts)} (whole GPU, by {how})"]


def _draw(use: PowerUse) -> list[str]:
    inside = [one for one in use.samples if 0 <= one.seconds <= use.seconds] or list(use.samples)
    watts = [one.watts for one in inside if one.watts is not None]
    heat = [one.celsius for one in inside if one.celsius is not None]
    parts = []
    if watts:
        limit = "" if use.limits.watts is None else f" of at most {use.limits.watts:.0f} W"
        parts.append(f"{fmean(watts):.0f} W on average, up to {max(watts):.0f} W{limit}")
    if heat:
        limit = "" if use.limits.celsius is None else f" (slowed down from {use.limits.celsius} °C)"
        parts.append(f"up to {max(heat)} °C{limit}")
    return ["; ".join(parts)] if parts else []


def slowdown(found: Slowdown, clock_mhz: int | None) -> str:
    """Return ``power cap in steps 12 to 40, 85.0 % of the time: the clock was 7.1 % below its maximum, 1,980 MHz``."""
    last = "" if found.last_step == found.first_step else f" to {found.last_step + 1}"
    text = (
        f"{CLOCK_REASONS[found.reason]} in step{'s' if last else ''} {found.first_step + 1}{last}, "
        f"{percent(found.time_share, 1)} of the time"
    )
    if found.clock_loss is None:
        return text
    maximum = "" if clock_mhz is None else f", {clock_mhz:,} MHz"
    return f"{text}: the clock was {percent(found.clock_loss, 1)} below its maximum{maximum}"


def data_wait(wait: DataWait, timed: Sequence[float]) -> list[str]:
    """Return how long the steps waited for their data, and which waited longest."""
    host, gpu = wait.host_seconds, wait.gpu_seconds
    if not host:
        return []
    total = sum(timed[: len(gpu)])
    lines = [
        f"the GPU waited for data {seconds(fmean(gpu))} per step, {percent(sum(gpu), total)} of the time; "
        f"the CPU spent {seconds(fmean(host))} per step fetching batches"
    ]
    longest = max(range(len(gpu)), key=gpu.__getitem__)
    if gpu[longest] > 2 * median(gpu) and sum(gpu) > WAITED * total:
        lines.append(f"longest in timed step {longest + 1}: {seconds(gpu[longest])}")
    if sum(gpu) > WAITED * total:
        lines.append("`trainatomy data` says how many worker processes the DataLoader needs")
    return lines


def calibrated_host(section: Mapping[str, Any]) -> list[str]:
    """Return how busy the machine was while a calibration measured its CPU."""
    if "load" not in section:
        return ["not recorded: an earlier version made this calibration"]
    load, busy = section["load"], section["busy"]
    others = load["others_share"]
    parts = [] if others is None else [f"other processes used {percent(others, 1)} of the processors"]
    parts.append(f"the probe typically took {section['probe_spread']:.2f} times its quickest time")
    state = f"busy, and kept because of --force: {busy}" if busy else "quiet"
    return [state, "; ".join(parts)]


def of_run(measurement: Measurement, time: Time | None) -> dict[str, list[str]]:
    """Return the lines by the name of their section, for what the run recorded."""
    found = {}
    if measurement.host_pace is not None:
        found["host_pace"] = host_pace(measurement.host_pace, time, measurement.step_seconds)
    if measurement.data_wait is not None:
        found["data_wait"] = data_wait(measurement.data_wait, measurement.timed_step_seconds)
    if measurement.power is not None:
        found["power"] = power(measurement.power, max(len(measurement.timed_step_seconds), 1))
    return {name: lines for name, lines in found.items() if lines}


def _joules(count: float) -> str:
    """Format an energy: ``0.0123`` -> ``12.3 mJ``, ``350`` -> ``350 J``, ``41200`` -> ``41.2 kJ``."""
    for size, unit in ((1e3, "kJ"), (1.0, "J"), (1e-3, "mJ")):
        if count >= size:
            return f"{rate(count / size)} {unit}"
    return f"{rate(count * 1e6)} µJ"
