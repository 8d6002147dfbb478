"""Text pages of a search: the answer, ties, prices, what is missing, and the GPUs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from snapshots import compare

from trainatomy.reporters import settings
from trainatomy.reporters.search_sentences import fastest_and_cheapest
from trainatomy.reporters.text.fit import fit_page, shortage_page
from trainatomy.reporters.text.gpus import gpus_fit_page, gpus_for_page
from trainatomy.reporters.text.rendering import render
from trainatomy.results.comparison import Comparison, ComparisonRow
from trainatomy.results.fit import Candidate, Change, Fit, FitAcross, Maximum, Price, Remedy
from trainatomy.results.measurement import Measurement
from trainatomy.results.prediction import Prediction

COMMAND = "trainatomy fit tiny.yaml --gpu rtx-3090"


def page(fit: Fit) -> str:
    return render(fit_page(fit, COMMAND), 200)


def test_fit(fit: Fit) -> None:
    compare(fit_page(fit, COMMAND), "fit")


def test_fit_on_several_gpus(spread_fit: Fit) -> None:
    compare(fit_page(spread_fit, COMMAND), "fit-gpus")


def test_nothing_fits(nothing_fits: Fit) -> None:
    compare(fit_page(nothing_fits, COMMAND), "nothing-fits")


def test_shortage(nothing_fits: Fit) -> None:
    assert nothing_fits.shortage is not None
    compare(shortage_page(nothing_fits.shortage), "shortage")


def test_gpus_fit(across: FitAcross) -> None:
    compare(gpus_fit_page(across), "gpus-fit")


def test_gpus_for(
    prediction: Prediction, too_big: Prediction, timed: Callable[[Prediction, float], Prediction]
) -> None:
    rows = [ComparisonRow(each.name, {}, each) for each in (timed(prediction, 0.5), timed(too_big, 0.25))]
    rows.append(ComparisonRow("tiny on K80", {}, None, "gpu: no bf16"))
    compare(gpus_for_page(Comparison(tuple(rows))), "gpus-for")


def test_steps_that_the_cpu_bounds_are_counted(
    prediction: Prediction, timed: Callable[[Prediction, float], Prediction]
) -> None:
    slow, fast = timed(prediction, 0.5), timed(prediction, 0.25)
    assert fast.time is not None
    by_cpu = replace(fast, time=replace(fast.time, bound_by="host", host="A CPU"))
    rows = [ComparisonRow(each.name, {}, each) for each in (slow, by_cpu)]
    text, other = (render(gpus_for_page(Comparison(tuple(some))), 200) for some in (rows, rows[:1]))
    assert "On 1 of these GPUs the step is bound by the CPU (assumed: A CPU): a faster GPU gains little there." in text
    assert "bound by the CPU" not in other


def test_the_answer_is_the_first_line(fit: Fit) -> None:
    answer = (
        "batch 8 × 2 accumulation steps, gradient checkpointing off: 40.0 samples/s (26.7 to 50.0), 12.0 of 17.0 GiB"
    )
    assert page(fit).splitlines()[0] == answer


def test_the_largest_value_is_in_the_answer(fit: Fit) -> None:
    largest = Maximum("batch", 8, 110_000_000, 12, 18 * 2**30)
    text = page(replace(fit, goal="batch", maximum=largest))
    assert text.startswith("at most 8 samples per batch: batch 8 × 2")
    assert "The largest that fits: 8 samples per batch; 12 would need 18.0 GiB." in text
    layers = Maximum("model-size", 36, 1_240_000_000, bounded_by="positions of the model")
    assert page(replace(fit, maximum=layers)).startswith("at most 36 layers (1.24 B parameters): ")


def test_ties_name_the_command_that_decides(fit: Fit) -> None:
    assert f"{COMMAND} --measure 2" in page(fit)
    assert "--measure" not in page(replace(fit, ties=()))


def test_prices_say_what_is_not_allowed_and_what_does_not_fit(fit: Fit) -> None:
    lines = {line.split("  ")[1]: line for line in page(fit).splitlines() if line.startswith("  ")}
    assert lines["8-bit AdamW"].split("  ")[-1] == "needs --allow optimizer"
    assert "needs" not in lines["gradient checkpointing on"]
    prices = page(fit).split("What each single change would cost or save")[1].split("Batch sizes")[0]
    assert "batch 16" in prices and "does not fit" in prices
    assert "LoRA of rank 16: not predicted: peft refuses" in prices
    assert "8-bit AdamW: Optimizer states are rounded to 8 bits." in prices


def test_the_workload_as_given_is_compared(fit: Fit) -> None:
    assert "As given (batch 4 × 4 accumulation steps, gradient checkpointing off): 32.0 samples/s" in page(fit)
    assert "+25 % samples/s, +4.00 GiB" in page(fit)
    assert fit.best is not None
    as_given = page(replace(fit, given=fit.best, workload=fit.best.workload))
    assert "This is the workload as given." in as_given and "Changes to the workload" not in as_given
    default = {**fit.best.workload, "train": {}}  # a batch of 8 without accumulation
    accumulated = page(replace(fit, given=fit.best, workload=default))
    assert "as given, with as many accumulation steps as the effective batch size needs." in accumulated
    assert "Changes to the workload" not in accumulated
    assert "it needs 20.0 GiB and does not fit" in page(replace(fit, given=fit.too_large[0]))


def test_an_interrupted_search_says_so(fit: Fit) -> None:
    counts = replace(fit.counts, unexplored=12)
    assert "interrupted: this is the best so far; 12 candidates were not looked at" in page(
        replace(fit, interrupted=True, counts=counts)
    )
    assert "interrupted" not in page(fit)


def test_if_nothing_fits_the_workload_as_given_is_named_too(fit: Fit, nothing_fits: Fit) -> None:
    given = replace(nothing_fits, given=fit.too_large[0])
    assert "As given (batch 16, gradient checkpointing off), it needs 20.0 GiB." in page(given)
    assert "As given" not in page(replace(given, given=given.too_large[0]))


def test_batch_advice_follows_from_the_figures(fit: Fit, candidate: Callable[..., Candidate]) -> None:
    assert "takes 25.0 % longer: accumulate no more than the memory requires" in page(fit)
    assert fit.given is not None
    quick = replace(fit, candidates=(fit.best, candidate(fit.given.changes, 8, 0.401)))  # type: ignore[arg-type]
    assert "accumulation costs little here" in page(quick)


def measured(fit: Fit, measurement: Measurement, seconds: tuple[float, ...]) -> Fit:
    """Return the search with its best candidates measured."""
    assert fit.best is not None
    chosen = (fit.best, *fit.runner_ups)
    rows = [
        ComparisonRow(
            each.name,
            {},
            each.prediction,
            measurements=(replace(measurement, step_seconds=step, samples_per_second=16 / step),),
        )
        for each, step in zip(chosen, seconds, strict=False)
    ]
    return replace(fit, measured=Comparison(tuple(rows)))


def test_measured_candidates_replace_the_hint(fit: Fit, measurement: Measurement) -> None:
    text = page(measured(fit, measurement, (0.41, 0.42)))
    assert "--measure" not in text
    assert "The measured order is the predicted one." in text
    assert "Measured on NVIDIA H200" in text
    assert "best: 40.0 samples/s predicted, 39.0 measured (-2.4 %)" in text
    assert "The order differs: expandable segments was measured 10.0 % faster" in page(
        measured(fit, measurement, (0.44, 0.40))
    )


@pytest.mark.parametrize(
    ("axis", "option", "words"),
    [
        ("gradient_checkpointing", "every_2", "gradient checkpointing of every 2nd layer"),
        ("gradient_checkpointing", "every_11", "gradient checkpointing of every 11th layer"),
        ("attention", "flash_attention_2", "flash attention 2 attention"),
        ("torch_empty_cache_steps", "every_4_steps", "cache emptied every 4 steps"),
        ("lora", "r32", "LoRA of rank 32"),
        ("layers", "24", "24 layers"),
        ("precision", "float16_weights", "precision: float16 weights"),
        ("a_new_axis", "a_new_option", "a new axis: a new option"),
    ],
)
def test_options_in_words(axis: str, option: str, words: str) -> None:
    assert settings.option(Change(axis, option, {})) == words


def test_differences_are_those_of_the_settings(fit: Fit, candidate: Callable[..., Candidate]) -> None:
    best, tie = fit.candidates[:2]
    assert settings.differences(tie, best) == "expandable segments"
    assert settings.differences(best, tie) == "allocator settings as given"
    assert settings.differences(best, best) == "the same settings"


def test_samples_of_another_length_are_compared_by_token(fit: Fit) -> None:
    best, shorter = fit.candidates[0], fit.prices[3].candidate
    assert shorter is not None
    assert settings.speed(shorter, best) == pytest.approx(0.4 / 0.22 / 2)


def test_only_the_largest_batch_that_fits_is_a_step(nothing_fits: Fit, candidate: Callable[..., Candidate]) -> None:
    shortage = nothing_fits.shortage
    assert shortage is not None

    def smaller(size: int, gib: float) -> Remedy:
        settings_of_batch = {"train.per_device_train_batch_size": size, "train.gradient_accumulation_steps": 16 // size}
        change = Change("batch", str(size), settings_of_batch)
        return Remedy("same training", (change,), candidate((change,), gib, 1.0), 0, 0.0)

    remedies = (smaller(8, 17), smaller(4, 15), smaller(2, 14))
    text = render(shortage_page(replace(shortage, remedies=(*remedies, *shortage.remedies))), 120)
    assert "1. batch 4 × 4 accumulation steps" in text
    assert "batch 8" not in text and "batch 2" not in text


def test_a_training_that_fits_lacks_nothing(fit: Fit, nothing_fits: Fit) -> None:
    assert nothing_fits.shortage is not None and fit.best is not None
    fitting = replace(nothing_fits.shortage, given=fit.best, remedies=())
    text = render(shortage_page(fitting), 120)
    assert text.startswith("fits on GeForce RTX 3090: tiny encoder needs 12.0 GiB of the 16.0 GiB that may be used.")
    assert "Steps" not in text


def test_what_fits_if_less_is_kept_free_says_so(nothing_fits: Fit, candidate: Callable[..., Candidate]) -> None:
    assert nothing_fits.shortage is not None
    given = candidate((), 15.9, 1.0)  # of 17 GiB, of which 6.5 % stay free
    shortage = replace(nothing_fits.shortage, given=given, usable_bytes=15 * 2**30, headroom=0.12)
    first = page(replace(nothing_fits, shortage=shortage)).splitlines()[0]
    assert first.startswith("Nothing fits on GeForce RTX 3090 with 12 % of its memory kept free: the smallest setting")
    assert first.endswith(" more than the 15.0 GiB that may be used; it fits with --headroom 0.06.")


def test_a_search_for_the_largest_in_which_nothing_fits(nothing_fits: Fit) -> None:
    text = page(replace(nothing_fits, shortage=None, goal="batch"))
    assert "the smallest setting needs 18.0 GiB, 2.00 GiB more than the 16.0 GiB" in text
    assert "What holds the memory" in text
    assert page(replace(nothing_fits, shortage=None, too_large=())).startswith("No setting was found that fits")


@pytest.mark.parametrize(
    ("axis", "name", "text"),
    [
        ("gpus", "4", "4 GPUs"),
        ("plan", "ddp_bucket_view", "DDP (gradient_as_bucket_view)"),
        ("plan", "hsdp_2", "FSDP2 with 2 replicas"),
        ("plan", "hsdp_2_keep", "FSDP2 with 2 replicas (reshard_after_forward=False)"),
        ("plan", "fsdp2_reshard", "FSDP2 (reshard_after_forward=True)"),
        ("plan", "fsdp2_reshard_4", "FSDP2 (reshard_after_forward=4)"),
    ],
)
def test_plans_in_words(axis: str, name: str, text: str) -> None:
    assert settings.option(Change(axis, name, {})) == text


@pytest.mark.parametrize(
    ("costs", "text"),
    [
        ({"A": None, "B": None}, "the fastest is the A"),
        ({"A": 1.0, "B": None}, "the fastest is the A"),
        ({"A": 1.0, "B": 2.0}, "the fastest and the cheapest per sample is the A"),
        ({"A": 3.0, "B": 2.0}, "the fastest is the A, the cheapest per sample the B"),
        ({"A": 3.0, "B": 2.0, "C": None}, "the fastest is the A, the cheapest per sample of the 2 with a price the B"),
        (
            {"A": 1.0, "B": 2.0, "C": None},
            "the fastest is the A, which is also the cheapest per sample of the 2 with a price",
        ),
        ({"A": None, "B": 2.0, "C": 3.0}, "the fastest is the A, the cheapest per sample of the 2 with a price the B"),
    ],
)
def test_only_what_has_a_price_is_the_cheapest(costs: dict[str, float | None], text: str) -> None:
    assert fastest_and_cheapest("A", costs) == text


def test_what_would_be_much_faster_if_allowed_is_said_below_the_answer(fit: Fit) -> None:
    def price(axis: str, permission: str, saved: float, *, allowed: bool = False) -> Price:
        change = Change(axis, {"precision": "fp16", "lora": "r16", "optimizer": "sgd"}[axis], {}, permission)  # type: ignore[arg-type]
        return Price(change, allowed, fit.best, 0, -saved)

    assert "Much faster" not in page(fit)
    prices = (price("lora", "lora", 0.3), price("precision", "precision", 0.755), price("optimizer", "optimizer", 0.05))
    assert (
        "Much faster if allowed: fp16 mixed precision (step time -75.5 %, --allow precision); "
        "LoRA of rank 16 (step time -30.0 %, --allow lora)."
    ) in page(replace(fit, prices=(*fit.prices, *prices))).splitlines()[:5]
    allowed = replace(fit, prices=(price("precision", "precision", 0.755, allowed=True),))
    assert "Much faster" not in page(allowed)
