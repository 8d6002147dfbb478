"""Workspaces of cuDNN as measured on an H200 (torch 2.11, cuDNN 9.19).

Single calls, and a random sample that the trees were not learned from; calls of networks that they were learned from.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from cudnn_sample import KINDS, convolution_of, sample

from trainatomy.catalog.files import read_text
from trainatomy.operators.allocation.cudnn.convolution import Convolution, Kind
from trainatomy.operators.allocation.cudnn.copies import copies
from trainatomy.operators.allocation.cudnn.learned import FILE, bytes_of, sizes_of, workspace
from trainatomy.operators.allocation.cudnn.recurrence import Recurrent, bias_numbers, dropout_state_bytes

HALF, FLOAT = torch.bfloat16, torch.float32


def convolution(
    data: tuple[int, ...],
    weight: tuple[int, ...],
    stride: int = 1,
    padding: int = 0,
    dtype: torch.dtype = FLOAT,
    last: bool = False,
    groups: int = 1,
    spread: int = 1,
) -> Convolution:
    """Return a convolution with the dimensions of ``data``; a row counts as an image of height 1."""
    steps = [1 if size == 1 else stride for size in data[2:]]
    around = [0 if size == 1 else padding for size in data[2:]]
    spatial = [
        (size + 2 * more - spread * (filter_ - 1) - 1) // step + 1
        for size, filter_, step, more in zip(data[2:], weight[2:], steps, around, strict=True)
    ]
    output = torch.Size((data[0], weight[0], *spatial))
    dilation = [spread] * len(spatial)
    shapes = torch.Size(data), torch.Size(weight), output
    return Convolution(*shapes, dtype, steps, around, dilation, groups, False, last, 132)


IMAGES, PATCHES = (8, 3, 224, 224), (768, 3, 16, 16)
SQUARE, THREE = (8, 64, 56, 56), (64, 64, 3, 3)


@pytest.mark.parametrize(
    ("case", "measured"),
    [
        (convolution(IMAGES, PATCHES, 16), (0, None, 14385296)),
        (convolution(IMAGES, PATCHES, 16, dtype=HALF), (11976720, None, 11976720)),
        (convolution(SQUARE, THREE, 1, 1), (6570000, 12992528, 15057575)),
        (convolution(SQUARE, THREE, 1, 1, HALF), (6496272, 6496272, 8413863)),
        (convolution((16, 128, 28, 28), (128, 128, 3, 3), 1, 1), (13434896, 13434896, 17564327)),
        (convolution((16, 64, 56, 56), (256, 64, 1, 1)), (0, 0, 1048576)),
        (convolution((16, 512, 7, 7), (2048, 512, 1, 1)), (8028176, 8028176, 8028176)),
        (convolution((16, 1024, 14, 14), (2048, 1024, 1, 1), 2), (19267600, 19267731, 19267600)),
        (convolution((8, 256, 56, 56), (512, 256, 1, 1), 2, dtype=HALF), (19267600, 19267731, 19267600)),
        (convolution((3, 768, 1, 499), (768, 48, 1, 128), 1, 64, groups=16), (None, 0, None)),
        (convolution((24, 96, 56, 56), (96, 1, 3, 3), 1, 1, groups=96), (0, 0, 0)),
    ],
)
def test_as_measured(case: Convolution, measured: tuple[int | None, ...]) -> None:
    for kind, known in zip(KINDS, measured, strict=True):
        assert known is None or abs(workspace(kind, case) - known) <= 131, kind


@pytest.mark.parametrize(
    ("case", "measured"),
    [
        (convolution((16, 16, 112, 112), (96, 16, 1, 1), 1, 0, torch.float32), 90_555_191),
        (convolution((16, 24, 56, 56), (72, 24, 1, 1), 1, 0, torch.float32), 20_374_779),
        (convolution((4, 2048, 32, 32), (256, 2048, 3, 3), 1, 12, torch.float32, spread=12), 207_618_192),
        (convolution((16, 96, 56, 56), (96, 1, 7, 7), 1, 3, torch.float32, groups=96, last=True), 164_079_223),
        (convolution((4, 128, 128, 128), (128, 1, 3, 3), 1, 1, torch.float32, groups=128, last=True), 0),
    ],
)
def test_large_weight_gradients_in_fp32(case: Convolution, measured: int) -> None:
    assert workspace("weight gradient", case) == pytest.approx(measured, rel=0.06)


def test_many_images_are_a_product_in_fp32_and_large_ones_are_not() -> None:
    many = convolution((24, 256, 56, 56), (256, 256, 1, 1), 1, 0, torch.float32)
    large = convolution((4, 512, 32, 32), (2048, 512, 1, 1), 1, 0, torch.float32)
    assert workspace("input gradient", many) < 512
    assert workspace("input gradient", large) == pytest.approx(41_943_187, rel=0.001)


def test_small_filters_of_colour_images_and_vectors_need_nothing_in_fp32() -> None:
    assert workspace("weight gradient", convolution(IMAGES, (64, 3, 3, 3), 1, 1, torch.float32)) == 0
    assert workspace("weight gradient", convolution(IMAGES, (64, 3, 7, 7), 2, 3, torch.float32)) > 10**7
    assert workspace("weight gradient", convolution((16, 960, 1, 1), (240, 960, 1, 1), 1, 0, torch.float32)) < 2048


def test_images_are_padded_to_four_channels_for_the_first_filters_in_fp16() -> None:
    stem = convolution(IMAGES, (64, 3, 7, 7), 2, 3, torch.float16)
    assert workspace("forward", stem) == pytest.approx(16_081_424, abs=159)
    assert workspace("forward", convolution(IMAGES, (64, 3, 7, 7), 2, 3, HALF)) == 19_317_776


def test_one_dimension() -> None:
    whisper = convolution((2, 512, 1, 3000), (512, 512, 1, 3), 2, 1, HALF)
    assert workspace("forward", whisper) == workspace("weight gradient", whisper) == 10_788_880
    assert workspace("input gradient", whisper) == pytest.approx(10_788_880 + 131, abs=131)


def test_random_convolutions_match_as_often_as_documented() -> None:
    swapped: dict[Kind, Kind] = {"forward": "input gradient", "input gradient": "forward"}
    exact = missed = taken = 0
    lines = sample("convolution")
    for line in lines:
        for kind in KINDS:
            found = workspace(swapped.get(kind, kind) if line["transposed"] else kind, convolution_of(line))
            exact += found == line[kind]
            missed += abs(found - line[kind])
            taken += line[kind]
    assert exact / (3 * len(lines)) > 0.52
    assert missed / taken < 0.3


@pytest.mark.parametrize(
    ("kind", "one", "measured"),
    [
        ("forward", convolution((27, 384, 13, 13), (256, 384, 3, 3), 1, 1), 16_793_459),
        ("forward", convolution((25, 480, 20, 20), (80, 480, 1, 1), dtype=HALF), 11_200_016),
        ("forward", convolution((72, 800, 10, 10), (128, 800, 1, 1)), 26_726_416),
        ("input gradient", convolution((5, 256, 40, 40), (256, 256, 3, 3), 1, 1), 35_520_943),
        ("weight gradient", convolution((29, 96, 14, 14), (208, 96, 3, 3), 1, 1), 11_170_143),
        ("weight gradient", convolution((23, 256, 28, 28), (256, 256, 3, 3), 2, 1), 25_440_272),
        ("weight gradient", convolution((26, 224, 34, 34), (128, 224, 1, 1), dtype=torch.float16), 25_092_239),
        ("weight gradient", convolution((21, 960, 9, 9), (128, 960, 1, 1), dtype=torch.float16), 10_321_920),
    ],
)
def test_trees_tell_products_copies_and_divided_sums_apart(kind: Kind, one: Convolution, measured: int) -> None:
    assert workspace(kind, one) == measured


@pytest.mark.parametrize(
    ("batch", "measured"), [(9, 213_073_920), (11, 30_860_819), (17, 426_000_384), (23, 426_000_384), (10, 213_073_920)]
)
def test_trees_follow_choices_that_change_with_the_rest_of_the_last_tile(batch: int, measured: int) -> None:
    one = convolution((batch, 32, 149, 149), (32, 32, 3, 3), 1, 0, HALF)
    assert abs(workspace("input gradient", one) - measured) <= 131


@pytest.mark.parametrize("groups", [1, 8, 64])
def test_calls_that_no_tree_knows_need_copies_or_nothing(groups: int) -> None:
    one = convolution(SQUARE, (64, 64 // groups, 3, 3), 1, 1, torch.float64, groups=groups)
    assert workspace("forward", one) == (0 if groups == 64 else copies(one))


@pytest.mark.parametrize(("side", "patch"), [(384, 32), (224, 16), (224, 14)])
def test_patches_of_transformers_need_copies_for_the_gradient_of_their_weight(side: int, patch: int) -> None:
    one = convolution((8, 3, side, side), (768, 3, patch, patch), patch)
    assert workspace("weight gradient", one) == copies(one) < 40_000_000
    assert workspace("forward", one) == 0
    half = convolution((8, 3, side, side), (768, 3, patch, patch), patch, dtype=HALF)
    assert workspace("forward", half) == copies(half)


def test_every_method_and_size_of_the_trees_is_known() -> None:
    contents = json.loads(read_text(FILE))
    one = convolution(SQUARE, THREE, 1, 1, HALF)
    for method in contents["methods"]:
        for kind in KINDS:
            size = bytes_of(method, kind, one)
            assert size is None or size >= 0
    nodes = [tree for trees in contents["trees"].values() for tree in trees.values()]
    while nodes:
        node = nodes.pop()
        if isinstance(node, int):
            assert 0 <= node < len(contents["methods"])
        else:
            assert 0 <= node[0] < len(sizes_of(one))
            nodes += node[2:]


def test_random_recurrent_layers_match_nearly_always() -> None:
    hits = total = 0
    for line in sample("recurrence"):
        rows, directions = line["steps"] * line["batch"], 2 if line["bidirectional"] else 1
        one = Recurrent(
            line["mode"], getattr(torch, line["dtype"]), line["input"], line["hidden"], line["layers"], directions,
            line["dropout"] > 0, rows, line["steps"], line["batch"],
        )  # fmt: skip
        assert one.reserve() in line["forward"]
        found = [
            one.workspace(training=True) in line["forward"],
            one.workspace(training=True, backward=True) in line["backward"],
            one.workspace(training=False) in line["inference"],
        ]
        hits, total = hits + sum(found), total + len(found)
    assert hits / total > 0.95


PROJECTED_OR_PACKED = [
    ("GRU", "float16", 100, 512, 0, 2, 1, True, 1010, 50, 40, True, 13573376, 26185984, 25151744),
    ("GRU", "bfloat16", 256, 1024, 0, 2, 1, False, 20, 20, 1, True, 532736, 37359872, 37359872),
    ("GRU", "float16", 64, 64, 0, 1, 2, False, 1696, 200, 16, True, 2605312, 19067136, 19067136),
    ("RNN", "float32", 64, 96, 0, 1, 2, False, 317, 20, 32, True, 243712, 17704448, 17704448),
    ("LSTM", "float32", 512, 96, 0, 2, 1, False, 1010, 50, 40, True, 4266496, 20412672, 19741952),
    ("LSTM", "float16", 64, 650, 325, 2, 2, False, 4800, 100, 48, False, 174720256, 146390688, 146390688),
    ("LSTM", "bfloat16", 64, 256, 128, 4, 2, False, 6400, 200, 32, False, 190054656, 124551680, 124551680),
    ("LSTM", "float16", 512, 512, 256, 2, 2, True, 800, 200, 4, False, 23040256, 60473632, 60473632),
    ("LSTM", "bfloat16", 300, 1024, 16, 2, 2, False, 2400, 50, 48, False, 128102656, 114000768, 114000768),
    ("LSTM", "bfloat16", 32, 128, 120, 1, 2, False, 1280, 20, 64, False, 4546816, 22823680, 22823680),
    ("LSTM", "bfloat16", 128, 384, 96, 2, 2, False, 418, 50, 16, True, 8667904, 41882880, 41882880),
    ("LSTM", "bfloat16", 128, 64, 56, 3, 2, True, 2112, 128, 32, True, 12462336, 54888704, 54888704),
    ("LSTM", "bfloat16", 256, 256, 16, 2, 1, True, 128, 128, 1, True, 860672, 17815808, 17750272),
    ("LSTM", "float32", 64, 256, 128, 4, 1, False, 2040, 100, 40, True, 60580096, 49438976, 49438976),
    ("LSTM", "float16", 512, 96, 24, 3, 2, False, 8256, 128, 128, True, 65784064, 95468800, 74775808),
]
"""Layers drawn by seed 31: kind, type, input, hidden, projection, layers, directions, dropout, rows, steps, batch,
packed; reserve, workspace of training and of inference."""


@pytest.mark.parametrize("line", PROJECTED_OR_PACKED)
def test_recurrent_layers_with_projections_and_packed_sequences(line: tuple[Any, ...]) -> None:
    kind, dtype, size, hidden, projection, layers, directions, dropout, rows, steps, batch, packed, *measured = line
    one = Recurrent(
        kind, getattr(torch, dtype), size, hidden, layers, directions, dropout, rows, steps, batch, projection, packed
    )
    assert [one.reserve(), one.workspace(training=True), one.workspace(training=False)] == measured
    assert one.workspace(training=True, backward=True) == measured[1]


def test_workspace_reserve_and_state_of_recurrent_layers() -> None:
    assert dropout_state_bytes(132) == 6_488_064
    weights = 3 * 384 * ((300 + 384) + 2 * (384 + 384))
    assert 4 * (weights + bias_numbers("GRU", 384, 3, 1)) == 10_257_408
    lstm = Recurrent("LSTM", FLOAT, 256, 512, 2, 2, False, 4000, 100, 40)
    assert (lstm.workspace(training=True), lstm.reserve()) == (194_019_904, 180_224_256)
