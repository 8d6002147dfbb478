"""Sentences about how a measured run went: the host's pace, the GPU's power, and waiting for data.

Sentences about a timed DataLoader.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean, median
from typing import Any

from trainatomy.reporters.labels import CLOCK_REASONS
from trainatomy.results.comparison import ComparisonRow
from trainatomy.results.loader import DataWait, LoaderReport, LoaderTiming
from trainatomy.results.measurement import HostPace, Measurement, PowerUse, Slowdown
from trainatomy.results.time import Time
from trainatomy.units import human_bytes, many, percent, rate, seconds, signed_percent

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


PROBLEMS = {"shared memory": "no room", "cuda tensors": "CUDA"}
"""Reasons for which settings were not timed, in a column of a table."""


def answer(report: LoaderReport) -> str:
    """Return which settings suffice, with the numbers."""
    step, timings = report.step, report.timings
    if step is None:
        timed = [one for one in timings if one.batch_seconds is not None]
        quickest = min(timed, key=lambda one: one.batch_seconds or 0.0)
        return f"The quickest: {seconds(quickest.batch_seconds or 0.0)} per batch {_with(quickest)}"
    if report.best is not None:
        best = timings[report.best]
        batches = "1 batch" if step.batches == 1 else f"{step.batches} batches"
        return (
            f"The loader keeps up {_with(best)}: {seconds(best.batch_seconds or 0.0)} per batch; a step of "
            f"{seconds(step.seconds)} takes {batches}"
        )
    best = min(timings, key=lambda one: one.step_seconds or float("inf"))
    longer = percent((best.step_seconds or step.seconds) - step.seconds, step.seconds)
    return (
        f"The loader does not keep up: {_with(best)} a step takes {seconds(best.step_seconds or 0.0)} instead of "
        f"{seconds(step.seconds)}, {longer} longer"
    )


def setup(report: LoaderReport) -> list[str]:
    """Return the batch, the step, and the machine."""
    size = "" if report.batch_size is None else f" of {many(report.batch_size, 'sample')}"
    lines = [f"{report.name}: batches{size}, {human_bytes(report.batch_bytes)} each; {report.processors} processors"]
    if report.step is not None:
        how = f"predicted on {report.step.gpu}" if report.step.predicted else "as given"
        host = f", of which the CPU is busy for {seconds(report.step.host_seconds)}" if report.step.host_seconds else ""
        lines.append(f"step: {seconds(report.step.seconds)}, {how}{host}")
    return lines


def notes(report: LoaderReport) -> list[str]:
    """Return what to know about the figures, and what to change."""
    said = {
        "random samples": "the workload names no dataset: its samples are drawn at random, so that this times "
        "collating and handing over only; --dataset FILE.py:FUNCTION times yours",
        "not pinned": "there is no GPU here, so that no batch was copied to pinned memory",
        "cuda initialised": "making batches initialises CUDA: workers that are forked afterwards cannot use the GPU "
        '("Cannot re-initialize CUDA in forked subprocess"); make tensors of the CPU, or start workers by spawn',
        "more workers than processors": f"more workers than this process has processors ({report.processors}) take "
        "turns, also with the training itself",
        "no step": "how long a step takes is not known: give a workload, or --step-seconds",
        "host bounds": "the CPU bounds the step, so that everything it does for the data makes the step longer; "
        "workers leave it only the fetching",
    }
    return [*(said[code] for code in report.notes), *_advice(report), *_problems(report)]


def _advice(report: LoaderReport) -> list[str]:
    chosen = report.timings[report.best] if report.best is not None else None
    if chosen is None or not chosen.settings.num_workers:
        return []
    one = chosen.settings
    arguments = f"num_workers={one.num_workers}, prefetch_factor={one.prefetch_factor}"
    lines = [
        f"DataLoader(..., {arguments}, pin_memory={one.pin_memory}, persistent_workers={one.persistent_workers}); in "
        f"TrainingArguments each with `dataloader_` in front"
    ]
    if not one.persistent_workers and chosen.first_batch_seconds is not None:
        lines.append(f"each epoch begins with {seconds(chosen.first_batch_seconds)} to start the workers")
    return lines


def _problems(report: LoaderReport) -> list[str]:
    lines = []
    small = [one for one in report.timings if one.problem == "shared memory"]
    if small and report.shared_memory_bytes is not None:
        lines.append(
            f"/dev/shm has {human_bytes(report.shared_memory_bytes)} left, and {_with(small[0])} up to "
            f"{human_bytes(small[0].shared_bytes)} of batches wait there: workers would die with a bus error. Start "
            "the container with --ipc=host or --shm-size, or take fewer workers or a smaller prefetch_factor"
        )
    if any(one.problem == "cuda tensors" for one in report.timings):
        lines.append(
            "batches are on the GPU: a worker process cannot hand them over. Make them on the CPU and move them in the "
            "training's loop"
        )
    return lines


def _with(one: LoaderTiming) -> str:
    count = one.settings.num_workers
    return f"with {many(count, 'worker')}" if count else "without workers"
