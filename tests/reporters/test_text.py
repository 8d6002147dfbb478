"""Whole text pages at fixed widths, compared with the files in ``pages/`` (see ``snapshots.py``)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from snapshots import compare

from trainatomy.catalog.published import notebook
from trainatomy.reporters import sentences
from trainatomy.reporters.document import Bullets, swept
from trainatomy.reporters.labels import SECTIONS
from trainatomy.reporters.text.comparison import comparison_page
from trainatomy.reporters.text.measurement import measurement_page
from trainatomy.reporters.text.prediction import prediction_page, verdict_line
from trainatomy.reporters.text.rendering import bar, render
from trainatomy.results.comparison import Comparison, ComparisonRow, PublishedFigures
from trainatomy.results.measurement import Measurement
from trainatomy.results.memory import Instant, Line, OutOfMemoryPoint, PeakRange
from trainatomy.results.operations import Padding
from trainatomy.results.prediction import Fact, Prediction

GIB = 1024**3


def test_prediction(prediction: Prediction) -> None:
    compare(prediction_page(prediction), "prediction")


def test_prediction_that_does_not_fit(too_big: Prediction) -> None:
    compare(prediction_page(too_big), "does-not-fit")


def test_timeline(timeline: Prediction) -> None:
    compare(prediction_page(timeline), "timeline")


def rows_of(*predictions: Prediction) -> tuple[ComparisonRow, ...]:
    return tuple(ComparisonRow(each.name, each.workload, each) for each in predictions)


def test_comparison(
    prediction: Prediction,
    too_big: Prediction,
    named: Callable[[str, int], Prediction],
    timed: Callable[[Prediction, float], Prediction],
) -> None:
    other = named("gradient checkpointing, accumulation over 4 batches, fp16", -GIB)
    rows = rows_of(timed(prediction, 0.4), timed(other, 0.5), timed(too_big, 0.3))
    compare(comparison_page(Comparison(rows)), "comparison")


def test_comparison_with_published_figures(
    named: Callable[[str, int], Prediction], timed: Callable[[Prediction, float], Prediction]
) -> None:
    known = notebook()
    predictions = [named(run.name, run.memory_bytes - 8 * GIB) for run in known.rows]
    more = round(1.01 * known.rows[1].memory_bytes) - 8 * GIB
    predictions[1] = named("one per cent more than published", more)
    predictions = [timed(each, 0.4 + 0.1 * index) for index, each in enumerate(predictions)]
    rows = [
        replace(row, published=PublishedFigures(run.memory_bytes, run.seconds))
        for row, run in zip(rows_of(*predictions), known.rows, strict=True)
    ]
    compare(comparison_page(Comparison(tuple(rows), source=known.source, samples=known.samples)), "published")


def test_measured_comparison(measurement: Measurement, prediction: Prediction) -> None:
    runs = [replace(measurement, step_seconds=step, samples_per_second=4 / step) for step in (0.25, 0.24, 0.3)]
    point = OutOfMemoryPoint(Instant(0, "forward", "bert.encoder.layer.20", "aten::mm"), 2**27, 5 * GIB, 6 * GIB)
    ran_out = replace(measurement, status="out of memory", device_bytes=None, out_of_memory=point)
    name = "gradient checkpointing, accumulation over 4 batches, fp16"
    rows = (
        ComparisonRow("plain", {}, prediction, measurements=tuple(runs)),
        ComparisonRow(name, {}, prediction, measurements=(runs[0], ran_out)),
        ComparisonRow("large", {}, prediction, measurements=(ran_out,)),
        ComparisonRow("broken", {}, None, "aten::nonzero needs data", errors=("The worker was killed by signal 9.",)),
        ComparisonRow("to come", {}, prediction),
    )
    compare(comparison_page(Comparison(rows, samples=512, group="rows-3fa9c1b7", repeats=3)), "measured-comparison")


def test_measurement(measurement: Measurement, prediction: Prediction) -> None:
    compare(measurement_page(measurement, prediction), "measurement")


def test_the_predicted_timeline_beside_a_measurement(measurement: Measurement, timeline: Prediction) -> None:
    assert f"{SECTIONS['timeline']} (predicted)" in render(measurement_page(measurement, timeline), 120)


def test_measurement_that_ran_out_of_memory(measurement: Measurement) -> None:
    failed = replace(
        measurement,
        status="out of memory",
        device_bytes=None,
        step_seconds=None,
        message="CUDA out of memory.",
        tape_file="run.tape",
    )
    compare(measurement_page(failed, None), "out-of-memory")


def test_the_verdict_is_the_first_line(prediction: Prediction, too_big: Prediction) -> None:
    first = [render(prediction_page(value), 120).splitlines()[0] for value in (prediction, too_big)]
    assert first == [
        "fits on V100 16 GB (SXM2) (16.0 GiB): needs 8.00 GiB, 8.00 GiB to spare",
        "does not fit on RTX 2060 6 GB (6.00 GiB): needs 8.00 GiB, 2.00 GiB short",
    ]


def test_a_training_that_fits_only_because_the_cache_is_freed(prediction: Prediction) -> None:
    tight = replace(
        prediction, verdict="tight", memory=replace(prediction.memory, num_alloc_retries=2), room_bytes=GIB // 4
    )
    assert str(verdict_line(tight)).endswith("256 MiB to spare; the allocator has to free its cache twice")
    assert str(verdict_line(replace(tight, without_workspace=3))).endswith(
        "free its cache twice; 3 convolutions use slower algorithms for lack of workspace memory"
    )


def test_a_training_that_is_tight_only_in_the_worst_case(prediction: Prediction) -> None:
    reserved = prediction.memory.peak_reserved_bytes
    at_worst = PeakRange((reserved, reserved), (reserved, reserved + 15 * GIB // 2))
    tight = replace(prediction, verdict="tight", memory=replace(prediction.memory, layouts=at_worst))
    assert str(verdict_line(tight)).endswith("8.00 GiB to spare, 512 MiB in the worst case")
    assert str(verdict_line(replace(tight, room_bytes=7 * GIB))).endswith(
        "7.00 GiB to spare, 512 MiB short in the worst case"
    )
    assert str(verdict_line(replace(tight, verdict="fits"))).endswith("8.00 GiB to spare")


def test_memory_is_the_least_where_cudnn_tries_its_algorithms(prediction: Prediction) -> None:
    assert ": needs at least 8.00 GiB, 8.00 GiB to spare" in str(verdict_line(replace(prediction, trials=2)))


def test_memory_is_a_range_where_cudnn_finds_the_fastest_algorithm(prediction: Prediction) -> None:
    asked = replace(prediction, trials=2, facts=(Fact("convolutions", "library", "computed", "9.19.0"),))
    assert ": needs 8.00 GiB, 8.00 GiB to spare" in str(verdict_line(asked))
    plans = PeakRange((4 * GIB, 4 * GIB), (5 * GIB, 6 * GIB))
    page = render(prediction_page(replace(asked, memory=replace(asked.memory, plans=plans))), 100)
    assert "algorithms cudnn.benchmark finds the fastest: 5.00 GiB to 6.00 GiB reserved." in page.replace("\n", " ")


def test_a_training_that_fragments_does_not_seem_to_fit(too_big: Prediction) -> None:
    fragmented = replace(too_big, room_bytes=GIB)
    assert "fails because of fragmentation although 1.00 GiB would be left" in str(verdict_line(fragmented))


def test_a_line_identical_to_its_component_is_omitted(prediction: Prediction) -> None:
    lines = (Line("gradients", "gradients", 1 * GIB, 10), Line("functionality", "inputs", 32 * 1024**2, 3))
    page = render(prediction_page(replace(prediction, memory=replace(prediction.memory, lines=lines))), 100)
    assert page.count("  gradients ") == 1
    assert "    inputs " in page


@pytest.mark.parametrize(
    ("share", "drawn"), [(0, ""), (1, "████"), (0.5, "██"), (1e-9, "▏"), (0.30, "█▎"), (2, "████")]
)
def test_bar(share: float, drawn: str) -> None:
    assert bar(share, 4) == drawn


def test_no_colours_where_they_are_not_wanted(prediction: Prediction) -> None:
    assert "\x1b" not in render(prediction_page(prediction), 80)


def test_a_path_longer_than_the_line_is_not_cut() -> None:
    path = "/" + "folder/" * 12 + "model.safetensors"
    lines = render(Bullets([f"not written: {path}"]), width=40).split()
    assert "".join(lines[3:]) == path


def test_the_time_of_a_step_says_what_a_step_holds(
    prediction: Prediction, timed: Callable[[Prediction, float], Prediction]
) -> None:
    time = timed(prediction, 0.5).time
    assert time is not None
    assert sentences.step_time(time).startswith("a step of 4 samples takes 500 ms")
    text = replace(time, tokens_per_second=4 * 512 / 0.5)
    assert sentences.step_time(text, fits=False).startswith(
        "with enough memory, a step of 4 samples of 512 tokens would take 500 ms"
    )


@pytest.mark.parametrize(
    ("names", "settings", "short"),
    [
        (["a=1, b=x", "a=2, b=x"], "a, b", ["1, x", "2, x"]),
        (["gpt2, a=1, b=2", "gpt2, a=1, b=4"], "a, b", ["gpt2, 1, 2", "gpt2, 1, 4"]),
        (["a=1", "a=2"], "", ["a=1", "a=2"]),  # short already
        (["a=1, b=2"], "", ["a=1, b=2"]),
        (["a=1, b=2", "vanilla"], "", ["a=1, b=2", "vanilla"]),
        (["a=1, b=2", "b=1, a=2"], "", ["a=1, b=2", "b=1, a=2"]),
        ([], "", []),
    ],
)
def test_settings_of_a_sweep_are_named_once(names: list[str], settings: str, short: list[str]) -> None:
    assert swept(names) == (settings, short)


def test_rows_of_a_sweep_of_three_settings_take_a_line(
    named: Callable[[str, int], Prediction], timed: Callable[[Prediction, float], Prediction]
) -> None:
    several = [f"per_device_train_batch_size={size}, gradient_checkpointing={on}, data.sequence_length=128"
               for size in (1, 2) for on in ("false", "true")]  # fmt: skip
    rows = rows_of(*(timed(named(name, GIB), 0.4) for name in several))
    lines = render(comparison_page(Comparison(rows)), 80).splitlines()
    assert "Rows: per_device_train_batch_size, gradient_checkpointing, data.sequence_length" in lines
    assert sum(line.startswith(("1, ", "2, ")) for line in lines) == 4


def test_sources_are_listed_where_they_are_asked_for(prediction: Prediction) -> None:
    short, whole = (render(prediction_page(prediction, with_sources=each), 80) for each in (False, True))
    assert SECTIONS["facts"] in whole and SECTIONS["facts"] not in short
    assert "Assumed: context and kernels (512 MiB); --sources lists all inputs" in short and "--sources" not in whole
    measured = tuple(fact for fact in prediction.facts if fact.basis != "assumed")
    assert "Assumed: nothing" in render(prediction_page(replace(prediction, facts=measured)), 80)


def test_what_nvidia_smi_shows_of_a_loaded_model_includes_the_context(prediction: Prediction) -> None:
    line = next(line for line in render(prediction_page(prediction), 80).splitlines() if "(with context)" in line)
    assert line.split()[-1] == f"{GIB + GIB // 2:,}"


def test_a_shard_of_a_thousand_gpus_has_no_bytes_per_parameter(prediction: Prediction) -> None:
    shard = replace(prediction, bytes_per_parameter=replace(prediction.bytes_per_parameter, actual=0.01))
    assert "bytes per parameter" not in render(prediction_page(shard), 80)


def test_sizes_worth_padding_are_noted(
    prediction: Prediction, timed: Callable[[Prediction, float], Prediction]
) -> None:
    padding = Padding(50257, 50304, 64, 3, ("lm_head",), "model.config.vocab_size", 50257, 50304, "vocab", 1, 0.1)
    page = " ".join(render(prediction_page(replace(timed(prediction, 0.5), paddings=(padding,))), 100).split())
    assert (
        "vocab_size 50,257 is no multiple of 64: padded to 50,304, it saves 100 ms a step (20 %); a checkpoint" in page
    )
