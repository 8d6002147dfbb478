"""A prediction as a page: the verdict, the memory breakdown, the time of a step, and the evidence for them.

Samples of different lengths: what an epoch holds over several orders of the samples, and how long its steps take.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from rich.text import Text

from trainatomy.reporters import sentences, subject_sentences
from trainatomy.reporters.document import (
    Bullets,
    Cell,
    Column,
    Document,
    Part,
    Subject,
    Table,
    grid,
    listed,
    section,
    styled,
    words,
)
from trainatomy.reporters.labels import BASIS_STYLES, PHASES, SECTIONS, TIMES, VERDICT_STYLES, component
from trainatomy.reporters.script_sentences import script_sentences
from trainatomy.reporters.settings import rank_name
from trainatomy.reporters.subject_sentences import shared_subject
from trainatomy.reporters.text.host import host_section, is_shown
from trainatomy.reporters.text.memory import breakdown, counters, modules_table, timeline
from trainatomy.results.lengths import Distribution, LengthsPrediction
from trainatomy.results.measurement import Measurement
from trainatomy.results.prediction import Fact, Plan, Prediction, RankPrediction
from trainatomy.results.time import Time
from trainatomy.units import flop_of, human_bytes, many, percent, seconds, whole_flop


def _lengths(lengths: LengthsPrediction) -> Iterator[Part]:
    """Yield the samples, the distributions and the tokens."""
    yield Text(subject_sentences.samples_of_lengths(lengths))
    if lengths.orders:
        yield _distributions(lengths)
        yield Text(subject_sentences.worst_order(lengths))
    if lengths.fullest is not None:
        yield Text(subject_sentences.fullest_batch(lengths.fullest, lengths.samples.unit))
    yield Text(subject_sentences.padding_of_lengths(lengths))
    if (first := subject_sentences.new_lengths(lengths)) is not None:
        yield Text(first)


def _distributions(lengths: LengthsPrediction) -> Table:
    rows: list[tuple[Cell, ...]] = [("", *styled("dim", "median", "5 to 95 %", "worst"))]
    if lengths.peak_allocated_bytes is not None:
        rows.append(("peak allocated", *_cells(lengths.peak_allocated_bytes, _bytes)))
    if lengths.peak_reserved_bytes is not None:
        rows.append(("peak reserved", *_cells(lengths.peak_reserved_bytes, _bytes)))
    if lengths.step_seconds is not None:
        rows.append(("step", *_cells(lengths.step_seconds, seconds)))
    return grid(rows, words(min_width=22), *[Column()] * 3)


def _cells(found: Distribution, written: Callable[[float], str]) -> tuple[str, str, str]:
    return written(found.median), f"{written(found.low)} to {written(found.high)}", written(found.worst)


def _bytes(count: float) -> str:
    return human_bytes(round(count))


_LEAST_BYTES_PER_PARAMETER = 0.1
"""Below it, a GPU holds so small a shard that two digits say nothing."""


def prediction_page(
    prediction: Prediction,
    cost_per_hour: float | None = None,
    price: str = "the given price",
    *,
    with_sources: bool = False,
    with_host: bool = False,
) -> Document:
    """Return a prediction as a page.

    Args:
        prediction: The prediction.
        cost_per_hour: Price of all its GPUs, for what the whole training costs where its steps are known.
        price: What that price is.
        with_sources: Also list all inputs and where they come from.
        with_host: Also show what the host holds where no limit of it is known.
    """
    return Document((*_answer(prediction, cost_per_hour, price), *_parts(prediction, with_sources, with_host)))


def _answer(prediction: Prediction, cost_per_hour: float | None, price: str) -> Iterator[Part]:
    """Yield whether it fits, what was predicted, and how long it takes."""
    yield verdict_line(prediction)
    yield subject_of([prediction])
    if prediction.out_of_memory is not None:
        yield Text(sentences.out_of_memory(prediction.out_of_memory, predicted=True))
    runs = prediction.fits or prediction.out_of_memory is None
    if prediction.time is not None:
        counted = "samples" if prediction.script is None else prediction.script.counted
        yield Text(sentences.step_time(prediction.time, fits=runs, step=_step(prediction), counted=counted))
        if prediction.time.communication is not None:
            yield Text(sentences.all_ranks(prediction.time.communication))
    if (duration := prediction.duration) is not None:
        yield Text(sentences.duration(duration, cost_per_hour, price, fits=runs))


def _parts(prediction: Prediction, with_sources: bool, with_host: bool) -> Iterator[Part]:
    memory, figures = prediction.memory, prediction.bytes_per_parameter
    if prediction.script is not None:
        yield from listed(SECTIONS["script"], script_sentences(prediction.script))
    yield section(f"{prediction.name}: {SECTIONS['peak']}", breakdown(memory))
    yield section(f"The peak is {sentences.instant(memory.peak)}.")
    if prediction.experts is not None:
        yield from listed(SECTIONS["experts"], subject_sentences.experts(prediction.experts))
    yield from task_sections(prediction)
    if prediction.host_bill is not None and (with_host or is_shown(prediction.host_bill)):
        yield host_section(prediction.host_bill)
    if prediction.lengths is not None:
        yield section(SECTIONS["lengths"], *_lengths(prediction.lengths))
    if prediction.other_ranks:
        plan = Plan.of(prediction.workload)
        yield section(SECTIONS["ranks"], _ranks(prediction))
        for each in prediction.other_ranks if plan.strategy == "dp" else ():
            yield section(f"{rank_name(plan, each.rank)}: {SECTIONS['peak']}", breakdown(each.memory))
    yield section(SECTIONS["counters"], counters(memory))
    if memory.range is not None:
        yield Text(sentences.peak_range(memory.range))
    if memory.plans is not None:
        yield Text(sentences.plan_range(memory.plans))
    if memory.layouts is not None:
        yield Text(sentences.layout_range(memory.layouts))
    if (skipped := sentences.skipped_steps(memory)) is not None:
        yield Text(skipped)
    if prediction.modules:
        yield section(SECTIONS["modules"], modules_table(prediction.modules, memory.components.activations))
    if figures.actual >= _LEAST_BYTES_PER_PARAMETER:
        yield section(sentences.bytes_per_parameter(figures), *_parameters(prediction))
    if prediction.timeline:
        yield section(SECTIONS["timeline"], *timeline(prediction.timeline))
    if prediction.time is not None:
        yield section(SECTIONS["step_time"], _time(prediction.time))
    if prediction.facts and with_sources:
        yield section(SECTIONS["facts"], _facts(prediction.facts))
    yield from listed(SECTIONS["notes"], _notes(prediction))
    taken = f"Predicted in {seconds(prediction.seconds_taken)} without a GPU ({sentences.versions(prediction)})."
    yield Text()
    for line in (*([] if with_sources else _assumed(prediction.facts)), taken):
        yield Text(line, style="dim")


def task_sections(result: Prediction | Measurement) -> Iterator[Part]:
    """Yield what was saved, generated and evaluated."""
    checkpoints = subject_sentences.checkpoints(result.checkpoint, result.restored)
    yield from listed(SECTIONS["checkpoint"], checkpoints)
    if result.generation is not None:
        yield from listed(SECTIONS["generation"], subject_sentences.generation(result.generation))
    if result.evaluation is not None:
        yield from listed(SECTIONS["evaluation"], subject_sentences.evaluation(result.evaluation))


def _notes(prediction: Prediction) -> list[str]:
    step = prediction.time.step_seconds if prediction.time is not None else 0.0
    return [*prediction.notes, *(sentences.padded_size(each, step) for each in prediction.paddings)]


def _assumed(facts: Sequence[Fact]) -> list[str]:
    """Return the inputs that are assumed, and the option that lists all of them."""
    if not facts:
        return []
    named = [f"{sentences.fact_name(fact)} ({sentences.fact_value(fact)})" for fact in facts if fact.basis == "assumed"]
    return [f"Assumed: {', '.join(named) or 'nothing'}; --sources lists all inputs and where they come from."]


def subject_of(predictions: Sequence[Prediction]) -> Subject:
    """Return what was predicted, as far as all have it in common, and what was decided for the user in any of them."""
    assumed = dict.fromkeys(text for each in predictions for text in each.leading_notes)
    return Subject(shared_subject(predictions), tuple(assumed))


def _step(prediction: Prediction) -> str:
    """Return what a step is whose samples differ, or whose first input need not be one row for each sample."""
    if prediction.lengths is not None and prediction.lengths.orders:
        return "the mean step"
    return "" if prediction.script is None else "a step"


def verdict_line(prediction: Prediction) -> Text:
    """Return ``fits on H200 SXM (139.8 GiB): needs 9.12 GiB, 130.7 GiB to spare``."""
    return Text.assemble(verdict_cell(prediction), sentences.fit(prediction))


def verdict_cell(prediction: Prediction | RankPrediction) -> Text:
    """Return the verdict alone, for a table."""
    return Text(prediction.verdict, style=VERDICT_STYLES[prediction.verdict])


def _ranks(prediction: Prediction) -> Table:
    plan = Plan.of(prediction.workload)
    rows = [
        (
            rank_name(plan, rank) + (" (billed above)" if rank == prediction.rank != 0 else ""),
            human_bytes(each.memory.device_bytes),
            verdict_cell(each),
        )
        for rank, each in prediction.ranks.items()
    ]
    return grid(rows, "left", "left", "left")


def _parameters(prediction: Prediction) -> Iterator[Part]:
    figures = prediction.bytes_per_parameter
    parts = ", ".join(f"{component(name).title} {count:.2f}" for name, count in figures.parts.items() if count)
    yield Text(f"{sentences.parameters(figures)}: {parts}")
    if figures.reasons:
        yield Bullets(sentences.reasons(prediction))


def _time(time: Time) -> Table:
    """Return CPU and GPU time, the GPU's phases, FLOP and utilisation, and the source of the figures."""
    return grid(_time_rows(time), words(min_width=22), "right", "left")


def _time_rows(time: Time) -> Iterator[tuple[Cell, ...]]:
    yield TIMES["gpu_seconds"], seconds(time.gpu_seconds), many(time.launches, "kernel")
    for phase, spent in time.phases.items():
        if spent:
            yield styled("dim", f"  {PHASES.get(phase, phase)}", seconds(spent))
    if (shared := time.communication) is not None:
        yield TIMES["communication"], seconds(shared.seconds), f"over {sentences.links(shared)}"
        yield TIMES["exposed"], seconds(shared.exposed_seconds), "the GPU does nothing else"
        if shared.slowed_seconds:
            yield TIMES["slowed"], seconds(shared.slowed_seconds), "beside it, with fewer multiprocessors"
        efficiency = percent(shared.scaling_efficiency, 1)
        yield TIMES["scaling"], efficiency, "of the same step if communication cost nothing"
    if (pipeline := time.pipeline) is not None:
        yield TIMES["bubble"], percent(pipeline.bubble_share, 1), sentences.pipeline(pipeline)
    yield TIMES["host_seconds"], seconds(time.host_seconds), f"to launch the kernels, on {sentences.host(time)}"
    if slow := sentences.slow_host(time):
        yield (TIMES["slow_host"], *slow)
    if (power := time.power) is not None:
        yield TIMES["power"], f"{power.watts:.0f} W", sentences.power(power)
    yield TIMES["flop_per_second"], flop_of(time.flop_per_second), f"{whole_flop(time.flop)} per step"
    if time.model_flop_utilisation is not None:
        share = percent(time.model_flop_utilisation, 1)
        yield TIMES["model_flop_utilisation"], share, "MFU: of the data sheet's peak, recomputation not counted"
    if time.attainable_utilisation is not None:
        yield "", percent(time.attainable_utilisation, 1), "of the rate that large matrix products reach"
    yield TIMES["priced_by"], "", time.priced_by
    if time.general_rule_only:
        yield TIMES["general_rule_only"], "", ", ".join(time.general_rule_only)


def _facts(facts: Sequence[Fact]) -> Table:
    rows = [
        (
            sentences.fact_name(fact),
            sentences.fact_value(fact),
            Text(fact.basis, style=BASIS_STYLES[fact.basis]),
            Text(sentences.fact_source(fact).removeprefix(f"{fact.basis}: "), style="dim"),
        )
        for fact in facts
    ]
    return grid(rows, words(max_width=26), words(max_width=30), words(wraps=False), words(ratio=1))
