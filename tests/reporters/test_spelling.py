"""All spellings of an option are normalized before parsing."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainatomy.cli.app import canonical

SWITCHES = {"--fp16", "--gradient-checkpointing"}


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("--per_device_train_batch_size 4", "--per-device-train-batch-size 4"),
        ("--max_grad_norm=0.5", "--max-grad-norm=0.5"),
        ("--fp16", "--fp16"),
        ("--fp16 true", "--fp16"),
        ("--fp16=True", "--fp16"),
        ("--fp16 false a_b.yaml", "--no-fp16 a_b.yaml"),
        ("--gradient_checkpointing=0", "--no-gradient-checkpointing"),
        ("--no_fp16", "--no-fp16"),
        ("--fp16 file_name.yaml", "--fp16 file_name.yaml"),
        ("--fp16=maybe", "--fp16=maybe"),
        ("-- --fp16 true_story", "-- --fp16 true_story"),
        ("--do_train --output_dir out_dir", "--do-train=true --output-dir=out_dir"),
    ],
)
def test_spellings(typed: str, meant: str) -> None:
    assert canonical(typed.split(), SWITCHES, {"--do-train", "--output-dir"}) == meant.split()


@given(st.lists(st.text(max_size=8)))
def test_other_arguments_stay_as_they_are(values: list[str]) -> None:
    plain = [value for value in values if not value.startswith("--")]
    assert canonical(plain, SWITCHES) == plain


@given(st.lists(st.sampled_from(["--fp16", "--fp16=false", "--a_b", "x_y", "true", "--", "--no_fp16"])))
def test_the_canonical_spelling_is_its_own(arguments: list[str]) -> None:
    once = canonical(arguments, SWITCHES)
    if "--fp16" not in once[:-1]:  # a switch in front of a file called "true" is ambiguous
        assert canonical(once, SWITCHES) == once
