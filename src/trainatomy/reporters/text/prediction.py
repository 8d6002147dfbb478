"""A prediction as a page: the verdict, the memory breakdown, the time of a step, and the evidence for them.

Samples of different lengths: what an epoch holds over several orders of the samples, and how long its steps take.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from trainatomy.reporters import sentences, subject_sentences
from trainatomy.reporters.labels import BASIS_STYLES, PHASES, SECTIONS, TIMES, VERDICT_STYLES, component
from trainatomy.reporters.script_sentences import script_sentences
from trainatomy.reporters.settings import rank_name
from trainatomy.reporters.subject_sentences import shared_subject
from trainatomy.reporters.text.memory import Breakdown, Timeline, counters, modules_table
from trainatomy.reporters.text.rendering import bullets, section
from trainatomy.results.lengths import Distribution, LengthsPrediction
from trainatomy.results.prediction import Fact, Plan, Prediction
from trainatomy.results.time import Time
from trainatomy.units import flop_of, human_bytes, many, percent, seconds, whole_flop


def lengths_section(lengths: LengthsPrediction) -> list[RenderableType]:
    """Return the body of the section: the samples, the distributions, the tokens."""
    body: list[RenderableType] = [Text(subject_sentences.samples_of_lengths(lengths))]
    if lengths.orders:
        body.append(_distributions(lengths))
        body.append(Text(subject_sentences.worst_order(lengths)))
    body.append(Text(subject_sentences.padding_of_lengths(lengths)))
    if (first := subject_sentences.new_lengths(lengths)) is not None:
        body.append(Text(first))
    return body


def _distributions(lengths: LengthsPrediction) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(min_width=22)
    for _ in range(3):
        table.add_column(justify="right", no_wrap=True)
    table.add_row("", *(Text(title, style="dim") for title in ("median", "5 to 95 %", "worst")))
    if lengths.peak_allocated_bytes is not None:
        table.add_row("peak allocated", *_cells(lengths.peak_allocated_bytes, _bytes))
    if lengths.peak_reserved_bytes is not None:
        table.add_row("peak reserved", *_cells(lengths.peak_reserved_bytes, _bytes))
    if lengths.step_seconds is not None:
        table.add_row("step", *_cells(lengths.step_seconds, seconds))
    return table


def _cells(found: Distribution, written: Callable[[float], str]) -> tuple[str, str, str]:
    return written(found.median), f"{written(found.low)} to {written(found.high)}", written(found.worst)


def _bytes(count: float) -> str:
    return human_bytes(round(count))


_LEAST_BYTES_PER_PARAMETER = 0.1
"""Below it, a GPU holds so small a shard that two digits say nothing."""


def prediction_page(prediction: Prediction, cost_per_hour: float | None = None, *, with_sources: bool = False) -> Group:
    """Return a prediction as a page.

    Args:
        prediction: The prediction.
        cost_per_hour: Price of all its GPUs, for what the whole training costs where its steps are known.
        with_sources: Also list all inputs and where they come from.
    """
    memory, figures = prediction.memory, prediction.bytes_per_parameter
    parts: list[RenderableType] = [verdict_line(prediction), *subject_lines([prediction])]
    if prediction.out_of_memory is not None:
        parts.append(Text(sentences.out_of_memory(prediction.out_of_memory, predicted=True)))
    if prediction.time is not None:
        runs = prediction.fits or prediction.out_of_memory is None
        counted = "samples" if prediction.script is None else prediction.script.counted
        step = sentences.step_time(prediction.time, fits=runs, step=_step(prediction), counted=counted)
        parts.append(Text(step))
        if prediction.time.communication is not None:
            parts.append(Text(sentences.all_ranks(prediction.time.communication)))
    if (duration := prediction.duration) is not None:
        parts.append(Text(sentences.duration(duration, cost_per_hour)))
    if prediction.script is not None:
        parts.append(section(SECTIONS["script"], bullets(script_sentences(prediction.script))))
    parts.append(section(f"{prediction.name}: {SECTIONS['peak']}", Breakdown(memory)))
    parts.append(section(f"The peak is {sentences.instant(memory.peak)}."))
    if prediction.experts is not None:
        parts.append(section(SECTIONS["experts"], bullets(subject_sentences.experts(prediction.experts))))
    if checkpoints := subject_sentences.checkpoints(prediction.checkpoint, prediction.restored):
        parts.append(section(SECTIONS["checkpoint"], bullets(checkpoints)))
    if prediction.generation is not None:
        parts.append(section(SECTIONS["generation"], bullets(subject_sentences.generation(prediction.generation))))
    if prediction.evaluation is not None:
        parts.append(section(SECTIONS["evaluation"], bullets(subject_sentences.evaluation(prediction.evaluation))))
    if prediction.lengths is not None:
        parts.append(section(SECTIONS["lengths"], *lengths_section(prediction.lengths)))
    if prediction.other_ranks:
        parts.append(section(SECTIONS["ranks"], _ranks(prediction)))
        if Plan.of(prediction.workload).strategy == "dp":
            parts += [
                section(
                    f"{rank_name(Plan.of(prediction.workload), each.rank)}: {SECTIONS['peak']}", Breakdown(each.memory)
                )
                for each in prediction.other_ranks
            ]
    parts.append(section(SECTIONS["counters"], counters(memory)))
    if memory.range is not None:
        parts.append(Text(sentences.peak_range(memory.range)))
    if memory.plans is not None:
        parts.append(Text(sentences.plan_range(memory.plans)))
    if memory.layouts is not None:
        parts.append(Text(sentences.layout_range(memory.layouts)))
    if (skipped := sentences.skipped_steps(memory)) is not None:
        parts.append(Text(skipped))
    if prediction.modules:
        table = modules_table(prediction.modules, memory.components.activations)
        parts.append(section(SECTIONS["modules"], table))
    if figures.actual >= _LEAST_BYTES_PER_PARAMETER:
        parts.append(section(sentences.bytes_per_parameter(figures), *_parameters(prediction)))
    if prediction.timeline:
        parts.append(section(SECTIONS["timeline"], Timeline(prediction.timeline)))
    if prediction.time is not None:
        parts.append(section(SECTIONS["step_time"], _time(prediction.time)))
    if prediction.facts and with_sources:
        parts.append(section(SECTIONS["facts"], _facts(prediction.facts)))
    if notes := _notes(prediction):
        parts.append(section(SECTIONS["notes"], bullets(notes)))
    taken = f"Predicted in {seconds(prediction.seconds_taken)} without a GPU ({sentences.versions(prediction)})."
    more = [] if with_sources else _assumed(prediction.facts)
    return Group(*parts, Text(), *(Text(line, style="dim") for line in (*more, taken)))


def _notes(prediction: Prediction) -> list[str]:
    step = prediction.time.step_seconds if prediction.time is not None else 0.0
    return [*prediction.notes, *(sentences.padded_size(each, step) for each in prediction.paddings)]


def _assumed(facts: Sequence[Fact]) -> list[str]:
    """Return the inputs that are assumed, and the option that lists all of them."""
    if not facts:
        return []
    named = [f"{sentences.fact_name(fact)} ({sentences.fact_value(fact)})" for fact in facts if fact.basis == "assumed"]
    return [f"Assumed: {', '.join(named) or 'nothing'}; --sources lists all inputs and where they come from."]


def subject_lines(predictions: Sequence[Prediction]) -> list[RenderableType]:
    """Return what was predicted, as far as all have it in common, and what was decided for the user in any of them."""
    line = shared_subject(predictions)
    assumed = dict.fromkeys(text for each in predictions for text in each.leading_notes)
    listed: list[RenderableType] = [bullets(list(assumed))] if assumed else []
    return [*([Text(line)] if line else []), *listed]


def _step(prediction: Prediction) -> str:
    """Return what a step is whose samples differ, or whose first input need not be one row for each sample."""
    if prediction.lengths is not None and prediction.lengths.orders:
        return "the mean step"
    return "" if prediction.script is None else "a step"


def verdict_line(prediction: Prediction) -> Text:
    """Return ``fits on H200 SXM (139.8 GiB): needs 9.12 GiB, 130.7 GiB to spare``."""
    return Text.assemble(verdict_cell(prediction), sentences.fit(prediction))


def verdict_cell(prediction: Prediction) -> Text:
    """Return the verdict alone, for a table."""
    return Text(prediction.verdict, style=VERDICT_STYLES[prediction.verdict])


def _ranks(prediction: Prediction) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    plan = Plan.of(prediction.workload)
    for rank, each in prediction.ranks.items():
        verdict = Text(each.verdict, style=VERDICT_STYLES[each.verdict])
        title = rank_name(plan, rank) + (" (billed above)" if rank == prediction.rank != 0 else "")
        table.add_row(title, human_bytes(each.memory.device_bytes), verdict)
    return table


def _parameters(prediction: Prediction) -> list[RenderableType]:
    figures = prediction.bytes_per_parameter
    parts = ", ".join(f"{component(name).title} {count:.2f}" for name, count in figures.parts.items() if count)
    body: list[RenderableType] = [Text(f"{sentences.parameters(figures)}: {parts}")]
    return [*body, bullets(sentences.reasons(prediction))] if figures.reasons else body


def _time(time: Time) -> Table:
    """Return CPU and GPU time, the GPU's phases, FLOP and utilisation, and the source of the figures."""
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(min_width=22)
    table.add_column(justify="right", no_wrap=True)
    table.add_column()
    table.add_row(TIMES["gpu_seconds"], seconds(time.gpu_seconds), many(time.launches, "kernel"))
    for phase, spent in time.phases.items():
        if spent:
            table.add_row(*(Text(cell, style="dim") for cell in (f"  {PHASES.get(phase, phase)}", seconds(spent))))
    if (shared := time.communication) is not None:
        table.add_row(TIMES["communication"], seconds(shared.seconds), f"over {sentences.links(shared)}")
        table.add_row(TIMES["exposed"], seconds(shared.exposed_seconds), "the GPU does nothing else")
        if shared.slowed_seconds:
            table.add_row(TIMES["slowed"], seconds(shared.slowed_seconds), "beside it, with fewer multiprocessors")
        efficiency = percent(shared.scaling_efficiency, 1)
        table.add_row(TIMES["scaling"], efficiency, "of the same step if communication cost nothing")
    if (pipeline := time.pipeline) is not None:
        table.add_row(TIMES["bubble"], percent(pipeline.bubble_share, 1), sentences.pipeline(pipeline))
    table.add_row(
        TIMES["host_seconds"], seconds(time.host_seconds), f"to launch the kernels, on {sentences.host(time)}"
    )
    if slow := sentences.slow_host(time):
        table.add_row(TIMES["slow_host"], *slow)
    if (power := time.power) is not None:
        table.add_row(TIMES["power"], f"{power.watts:.0f} W", sentences.power(power))
    table.add_row(TIMES["flop_per_second"], flop_of(time.flop_per_second), f"{whole_flop(time.flop)} per step")
    if time.model_flop_utilisation is not None:
        share = percent(time.model_flop_utilisation, 1)
        table.add_row(
            TIMES["model_flop_utilisation"], share, "MFU: of the data sheet's peak, recomputation not counted"
        )
    if time.attainable_utilisation is not None:
        table.add_row("", percent(time.attainable_utilisation, 1), "of the rate that large matrix products reach")
    table.add_row(TIMES["priced_by"], "", time.priced_by)
    if time.general_rule_only:
        table.add_row(TIMES["general_rule_only"], "", ", ".join(time.general_rule_only))
    return table


def _facts(facts: Sequence[Fact]) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(max_width=26)
    table.add_column(overflow="fold", max_width=30)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold", ratio=1)
    for fact in facts:
        basis = Text(fact.basis, style=BASIS_STYLES[fact.basis])
        source = Text(sentences.fact_source(fact).removeprefix(f"{fact.basis}: "), style="dim")
        table.add_row(sentences.fact_name(fact), sentences.fact_value(fact), basis, source)
    return table
