"""Sentences about searches and their results, as plain text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from trainatomy.reporters import sentences, settings
from trainatomy.reporters.settings import FIT_NOTES, GOALS
from trainatomy.results.comparison import Comparison, ComparisonRow
from trainatomy.results.fit import Candidate, Fit, Maximum, Price, Remedy, SearchCounts, Shortage
from trainatomy.results.prediction import Prediction, total_rate
from trainatomy.units import count_of, human_bytes, many, percent, rate, seconds, signed_percent

_MUCH = 0.1
"""Share of the step's time that a change must save to be named below the answer."""
_MOST_NAMED = 2


def fit_answer(fit: Fit, best: Candidate) -> str:
    """Return the answer of a search in one line.

    ``batch 16 × 4 accumulation steps, gradient checkpointing off: 212 samples/s (198 to 230), 21.3 of 23.5 GiB``
    """
    low, high = best.samples_per_second_interval
    pace = f"{rate(best.samples_per_second)} samples/s ({rate(low)} to {rate(high)})"
    size, total = human_bytes(best.device_bytes), human_bytes(fit.gpu.memory_bytes)
    number, _, unit = size.rpartition(" ")
    memory = f"{number if total.endswith(f' {unit}') else size} of {total}"
    where = " on each GPU" if best.plan.world_size > 1 else ""
    answer = f"{settings.settings_of(best)}: {pace}, {memory}{where}"
    return answer if fit.maximum is None else f"{_largest(fit.maximum)}: {answer}"


def much_faster(prices: Sequence[Price]) -> str:
    """Return the changes that need a permission and would save most of the step's time; empty if none saves much.

    ``Much faster if allowed: fp16 mixed precision (step time -75.5 %, --allow precision)``
    """
    faster = [each for each in prices if not each.allowed and each.candidate is not None and each.candidate.fits]
    faster = sorted((each for each in faster if each.step_seconds < -_MUCH), key=lambda each: each.step_seconds)
    texts = []
    for price in faster[:_MOST_NAMED]:
        time = "time per token" if price.change.axis == "sequence_length" else "step time"
        saved = signed_percent(price.step_seconds, 1, 1)
        texts.append(f"{settings.option(price.change)} ({time} {saved}, --allow {price.change.permission})")
    return f"Much faster if allowed: {'; '.join(texts)}." if texts else ""


def _largest(maximum: Maximum) -> str:
    """Return ``at most 48 samples per batch``, or ``at most 36 layers (1.24 B parameters)``."""
    if "." in maximum.goal:
        return f"{maximum.goal.partition(':')[0]} of at most {maximum.value:,}"
    size = f" ({count_of(maximum.parameters)} parameters)" if maximum.goal == "model-size" else ""
    return f"at most {maximum.value:,} {GOALS.get(maximum.goal, maximum.goal)}{size}"


def maximum(largest: Maximum) -> str:
    """Return the largest value that fits, and what ended the search for a larger one."""
    text = f"The largest that fits: {_largest(largest).removeprefix('at most ').replace(' of at most ', ' ')}"
    if largest.beyond is not None:
        return f"{text}; {largest.beyond:,} would need {human_bytes(largest.beyond_bytes)}."
    if largest.bounded_by == "values that were tried":
        return f"{text}; no larger value was tried."
    return f"{text}; limited by the {largest.bounded_by}, not by memory." if largest.bounded_by else f"{text}."


def passed_over(largest: Maximum) -> list[str]:
    """Return the values that could not be tried, by the reason."""
    values: dict[str, list[str]] = {}
    for value, reason in largest.failed.items():
        values.setdefault(reason, []).append(f"{value:,}")
    return [f"Passed over: {', '.join(each)}: {reason}" for reason, each in values.items()]


def shortage(value: Shortage) -> str:
    """Return ``needs 26.6 GiB, 12.8 GiB more than the 13.8 GiB that may be used``."""
    usable = f"the {human_bytes(value.usable_bytes)} that may be used"
    needs = f"needs {human_bytes(value.given.device_bytes)}"
    if value.missing_bytes > 0:
        text = f"{needs}, {human_bytes(value.missing_bytes)} more than {usable}"
        return f"{text}; it fits with --headroom {_headroom(value):g}" if value.fits_without_headroom else text
    return f"{needs} of {usable}" if value.given.fits else f"{needs} of {usable}, and fails because of fragmentation"


def nothing_fits(value: Shortage) -> str:
    """Return by how much no setting fits on the GPU, and whether one does that keeps less of the memory free."""
    kept = f" with {percent(value.headroom, 1, 0)} of its memory kept free" * value.fits_without_headroom
    return f"Nothing fits on {value.given.prediction.gpu.name}{kept}: the smallest setting {shortage(value)}."


def _headroom(value: Shortage) -> float:
    """Return the largest share of the memory that may stay free, in hundredths."""
    memory_bytes = value.given.prediction.gpu.memory_bytes
    return int(100 * (1 - value.given.device_bytes / memory_bytes)) / 100


def remedy(step: Remedy) -> str:
    """Return ``LoRA of rank 16: needs 9.12 GiB, changes what is trained``, or the name of a larger GPU."""
    name = settings.options(step.changes) or step.candidate.prediction.gpu.name
    changes = ", changes what is trained" if step.kind == "changes training" else ""
    return f"{name}: needs {human_bytes(step.candidate.device_bytes)}{changes}"


def fastest_and_cheapest(fastest: str, costs: Mapping[str, float | None]) -> str:
    """Return which GPU is the fastest, and which of those with a price is the cheapest per sample.

    Args:
        fastest: Name of the fastest one.
        costs: Cost of a sample by name, of all on which the training fits.
    """
    known = {name: cost for name, cost in costs.items() if cost is not None}
    if len(known) < 2:
        return f"the fastest is the {fastest}"
    cheapest = min(known, key=lambda name: known[name])
    of = f" of the {len(known)} with a price" if len(known) < len(costs) else ""
    if cheapest != fastest:
        return f"the fastest is the {fastest}, the cheapest per sample{of} the {cheapest}"
    if not of:
        return f"the fastest and the cheapest per sample is the {fastest}"
    return f"the fastest is the {fastest}, which is also the cheapest per sample{of}"


def gpus_time_notes(predictions: Sequence[Prediction]) -> list[str]:
    """Return how far to trust the times of a training on several GPUs, and what bounds them besides the GPU."""
    times = [each.time for each in predictions if each.time is not None]
    if not times:
        return []
    low = min(time.interval_seconds[0] / time.step_seconds for time in times)
    high = max(time.interval_seconds[1] / time.step_seconds for time in times)
    notes = [f"Times are predicted: in 9 of 10 cases the measured one is {low:.2f} to {high:.2f} times as long."]
    if hosts := sum(time.bound_by == "host" for time in times):
        cpu = f"the CPU (assumed: {sentences.host(times[0])})"
        notes.append(f"On {hosts} of these GPUs the step is bound by {cpu}: a faster GPU gains little there.")
    return notes


def fit_note(note: str) -> str:
    """Return the sentence for a note of a search, ``code`` or ``code: value``; an unknown one as it is."""
    code, _, value = note.partition(":")
    return FIT_NOTES[code].format(value.strip()) if code in FIT_NOTES else note


def search_counts(counts: SearchCounts, versions: str, *, with_remedies: bool = False) -> list[str]:
    """Return how many candidates a search had and how long it took, then how they were dealt with.

    ``with_remedies``: the time is also that of the search for what would make a training fit.
    """
    also = ", with a search for what would make it fit," * with_remedies
    taken = f"in {seconds(counts.seconds)} without a GPU{f' ({versions})' if versions else ''}"
    executed = "all" if counts.executed == counts.space else f"{counts.executed:,} of them"
    first = f"{many(counts.space, 'candidate')}, {executed} executed{also} {taken}."
    left_out = {
        "left out: their estimated memory exceeds the limit by more than the estimate's margin": counts.too_large,
        "left out: their estimated step takes longer than the best one by more than the margin": counts.slower,
        "left out: they use a slower option that only helps if memory is short": counts.dominated,
        "could not be predicted": counts.failed,
        "not tried, because the search was interrupted": counts.unexplored,
    }
    return [first, *(f"{number:,} {reason}" for reason, number in left_out.items() if number)]


def measured_order(measured: Comparison) -> str:
    """Return whether the measured candidates are as fast in the order in which they were predicted."""
    timed = [
        (row, spread.median)
        for row in measured.rows
        if (spread := row.spread("step_seconds")) is not None and row.prediction
    ]
    if len(timed) < 2:
        return "Too few candidates were measured to compare their order."
    fastest, seconds_taken = min(timed, key=lambda pair: pair[1])
    predicted = [row.prediction.time.step_seconds for row, _ in timed if row.prediction and row.prediction.time]
    if predicted == sorted(predicted) and [step for _, step in timed] == sorted(step for _, step in timed):
        return "The measured order is the predicted one."
    if fastest is timed[0][0]:
        return "The predicted best one is also the fastest measured; the order of the others differs."
    faster = percent(timed[0][1] / seconds_taken - 1, 1)
    return f"The order differs: {fastest.name} was measured {faster} faster than the predicted best one."


def measured_throughput(row: ComparisonRow) -> str:
    """Return ``best: 23.2 samples/s predicted, 22.1 measured (-4.8 %)``; empty without both figures."""
    spread, predicted = row.total_rate, total_rate(row.prediction) if row.prediction else None
    if spread is None or predicted is None:
        return ""
    gap = signed_percent(spread.median - predicted, predicted, 1)
    return f"{row.name}: {rate(predicted)} samples/s predicted, {rate(spread.median)} measured ({gap})"


def batch_advice(rows: Sequence[Candidate], best: Candidate) -> list[str]:
    """Return what the figures of several batch sizes say about the rules of the guides.

    Args:
        rows: Candidates that differ in nothing but the batch size, the smallest first; the best one is among them.
        best: The best candidate.
    """
    fitting = [each for each in rows if each.fits]
    place, largest, lines = fitting.index(best), fitting[-1], []
    if place:
        below = fitting[place - 1]
        longer = best.samples_per_second / below.samples_per_second - 1
        lesson = "accumulate no more than the memory requires" if longer > 0.01 else "accumulation costs little here"
        lines.append(f"A step with {settings.batch(below)} takes {_longer(longer)}: {lesson}.")
    if largest is not best:
        longer = best.samples_per_second / largest.samples_per_second - 1
        lines.append(f"{settings.batch(largest)} fits too and takes {_longer(longer)}: filling the GPU gains nothing.")
    return lines + _multiples_of_8(fitting)


def _longer(share: float) -> str:
    return f"{percent(share, 1)} longer" if share >= 0 else f"{percent(-share, 1)} less"


def _multiples_of_8(fitting: Sequence[Candidate]) -> list[str]:
    """Compare the largest batch that is no multiple of 8 with the next smaller one that is."""
    sizes = {each.per_device_train_batch_size: each for each in fitting}
    odd = max((size for size in sizes if size > 8 and size % 8), default=None)
    below = max((size for size in sizes if odd is not None and size < odd and size % 8 == 0), default=None)
    if odd is None or below is None:
        return []
    gain = sizes[odd].samples_per_second / sizes[below].samples_per_second - 1
    compared = f"{percent(abs(gain), 1)} {'more' if gain > 0 else 'fewer'} samples per second than batch {below}"
    return [f"Batch {odd} is not a multiple of 8 and reaches {compared}."]
