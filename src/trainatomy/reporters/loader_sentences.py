"""Sentences about a timed DataLoader."""

from __future__ import annotations

from trainatomy.results.loader import LoaderReport, LoaderTiming
from trainatomy.units import human_bytes, many, percent, seconds

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
