"""What joining tensors costs, and adding to parts of larger ones."""

from __future__ import annotations

import pytest

from trainatomy.catalog.calibrations import from_text
from trainatomy.catalog.gpus import find_gpu
from trainatomy.operators.cost import kernel_work
from trainatomy.operators.cost.kernel import KernelWork
from trainatomy.timing.cost_model import cost_model_of, kernel_cost

H200, H100 = cost_model_of(find_gpu("h200")), cost_model_of(find_gpu("h100-sxm"))


def work(text: str) -> KernelWork:
    return kernel_work(from_text(text), H200.chip)


@pytest.mark.parametrize(("parts", "measured"), [(33, 20.8e-6), (17, 11.36e-6)])
def test_each_part_has_as_many_blocks_as_the_largest(parts: int, measured: float) -> None:
    small = parts - 1
    text = f"aten::cat(bf16[20,256,14,14],bf16[20,32,14,14]*{small})->bf16[20,{256 + 32 * small},14,14];dim=1"
    found = work(text)
    assert found.family == "joined.vectors.16"
    assert found.seconds == pytest.approx(measured, rel=0.1)
    assert found.seconds > 3 * found.bytes / H200.chip.bandwidth


def test_large_parts_are_bound_by_their_bytes() -> None:
    found = work("aten::cat(bf16[15,64,16000],bf16[15,64,16000])->bf16[15,128,16000];dim=1")
    assert found.seconds == pytest.approx(30.25e-6, rel=0.1)


@pytest.mark.parametrize(
    ("parts", "result", "measured"),
    [
        (
            "bf16[12,128,8,28,28],bf16[12,192,8,28,28],bf16[12,96,8,28,28],bf16[12,64,8,28,28]",
            "bf16[12,480,8,28,28]",
            93,
        ),
        ("f32[18,192,32,32],bf16[18,384,32,32]", "f32[18,576,32,32]", 37),
    ],
)
def test_five_dimensions_and_other_types_are_copied_part_by_part(parts: str, result: str, measured: float) -> None:
    text = f"aten::cat({parts})->{result};dim=1"
    found = work(text)
    assert found.family.startswith("joined.copies.")
    assert found.launches == parts.count("[")
    assert kernel_cost(from_text(text), H200).seconds == pytest.approx(measured * 1e-6, rel=0.13)


def test_channels_last_and_odd_parts_compute_where_each_number_goes() -> None:
    last = "bf16[20,64,14,14|12544,1,896,64]"
    reordered = work(f"aten::cat({last},{last})->bf16[20,128,14,14|25088,1,1792,128];dim=1")
    odd = work("aten::cat(bf16[20,13],bf16[20,4])->bf16[20,17];dim=1")
    short = work("aten::stack(f32[16,32,8400,4],f32[16,32,8400,4])->f32[16,32,8400,2,4];dim=-2")
    assert {one.family.partition(".")[0] for one in (reordered, odd, short)} == {"joined by number"}


def test_stacked_tensors_are_joined_along_their_own_dimension() -> None:
    """``stack`` views what ``cat`` joins of tensors of four dimensions, which have five only in the result."""
    assert work("aten::stack(f32[4,64,64,64]*3)->f32[4,3,64,64,64];dim=1").family == "joined.vectors.32"
    assert work("aten::stack(f32[4,64,64,64]*3)->f32[4,64,64,64,3];dim=4").family == "joined.copies.32"


def test_parts_of_large_tensors_are_read_from_memory() -> None:
    """Gradients of DenseNet's inputs are added part by part; 301,056 numbers take 3.3 us within such a training."""
    text = "aten::add_(bf16[24,32,14,14{0}]!,bf16[24,32,14,14{1}])->bf16[24,32,14,14{0}]@0"
    far, near = (
        work(text.format(f"|{one},196,14,1", f"|{other},196,14,1")) for one, other in ((175616, 169344), (6300, 12600))
    )
    assert far.seconds == pytest.approx(near.seconds + 1.1e-6, rel=0.05)
    assert kernel_cost(from_text(text.format("|175616,196,14,1", "|169344,196,14,1")), H200).seconds > 3.0e-6


def test_a_kernel_is_the_same_in_place_except_that_a_mask_copies_nothing() -> None:
    rows = "bf16[24,32,14,14|175616,196,14,1]"
    assert (
        work(f"aten::add_({rows}!,{rows})->{rows}@0").family
        == work(f"aten::add({rows},{rows})->bf16[24,32,14,14]").family
    )
    mask = "bool[36,1,1,384]"
    copied, replaced = (
        work(f"aten::masked_fill{end}(f32[36,56,56,384]{mark},{mask})->f32[36,56,56,384]{at}")
        for end, mark, at in (("", "", ""), ("_", "!", "@0"))
    )
    assert (copied.launches, replaced.launches) == (2, 1)
    assert copied.family != replaced.family


def test_one_number_is_repeated() -> None:
    assert work("aten::repeat(i64[1,1])->i64[2,1];repeats=[2, 1]").seconds < 5e-6
