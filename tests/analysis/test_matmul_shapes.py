"""Matrix products whose shapes waste the GPU."""

from __future__ import annotations

import pytest
from operations_by_hand import array, call, product, step

from trainatomy.analysis.operation_table import OperationTable
from trainatomy.analysis.shapes import padded_call, product_of, wasteful_shapes, with_gains
from trainatomy.results.operations import Call, WastefulShape

V100, A100, H200 = ((7, 0), 80), ((8, 0), 108), ((9, 0), 132)


def found(one: Call, gpu: tuple[tuple[int, int], int] = H200, **more: bool) -> tuple[WastefulShape, ...]:
    return wasteful_shapes(OperationTable(step((one, "forward", "head"))), *gpu, **more)


def test_a_vocabulary_that_is_not_a_multiple_of_eight() -> None:
    """GPT-2's 50,257."""
    (shape,) = (row for row in found(product(8192, 50257, 1024)) if row.kind == "alignment")
    assert (shape.dimension, shape.size, shape.multiple, shape.padded) == ("n", 50257, 8, 50264)


def test_multiples_of_64_matter_from_the_a100_on() -> None:
    uneven = product(8192, 30520, 1024)
    assert [row.kind for row in found(uneven, V100)] == []
    (shape,) = found(uneven, A100)
    assert (shape.kind, shape.dimension, shape.multiple, shape.padded) == ("best alignment", "n", 64, 30528)


def test_tensor_cores_depend_on_type_and_gpu() -> None:
    odd = {dtype: product(8191, 8191, 8191, dtype) for dtype in ("float16", "bfloat16", "float32")}
    assert found(odd["float16"], V100) and found(odd["bfloat16"])
    assert not found(odd["bfloat16"], V100) and not found(odd["float32"])
    shape = found(odd["float32"], tf32=True)[0]
    assert (shape.multiple, shape.padded) == (4, 8192)


def test_a_nearly_empty_wave() -> None:
    """NVIDIA's example: on 108 multiprocessors a result of 109 tiles takes as long as one of 216."""
    tiles = product(256 * 109, 128, 4096)
    (shape,) = found(tiles, A100)
    assert shape.kind == "waves" and shape.padded % 108 == 0 and shape.used < 0.9
    assert not found(product(256 * 108, 128, 4096), A100)


def test_a_tile_beyond_the_edge() -> None:
    shape = next(row for row in found(product(256 * 132, 72, 4096)) if row.kind == "tiles")
    assert shape.used == pytest.approx(72 / 128, abs=0.02)


def test_small_products_are_not_reported() -> None:
    rows = step((product(8192, 8192, 8192), "forward"), (product(7, 7, 7), "forward"))
    assert wasteful_shapes(OperationTable(rows), *H200) == ()


def test_padding_keeps_layout() -> None:
    transposed = array(1024, 50257, storage=1)._replace(strides=(1, 1024))
    bias, data = array(50257, storage=3), array(64, 1024)
    one = call("addmm", [bias, data, transposed], [array(64, 50257, storage=2)], flop=2 * 64 * 1024 * 50257)
    padded = padded_call(one, "n", 50264)
    assert [a.shape for a in (*padded.inputs, *padded.outputs)] == [(50264,), (64, 1024), (1024, 50264), (64, 50264)]
    assert padded.inputs[2].strides == (1, 1024) and padded.outputs[0].strides == (50264, 1)
    assert padded.flop == 2 * 64 * 1024 * 50264
    batched = padded_call(call("bmm", [array(4, 7, 8), array(4, 8, 9, storage=1)], [array(4, 7, 9, storage=2)]), "m", 8)
    assert batched.inputs[0].shape == (4, 8, 8) and batched.outputs[0].strides == (72, 9, 1)
    written = array(7, 9, storage=2)._replace(strides=(16, 1))  # torch.mm(a, b, out=...)
    padded = padded_call(call("mm", [array(7, 8), array(8, 9, storage=1), written], [written]), "n", 16)
    assert [a.shape for a in (*padded.inputs, *padded.outputs)] == [(7, 8), (8, 16), (7, 16), (7, 16)]
    with pytest.raises(ValueError, match="not a product"):
        padded_call(call("relu", [array(4)], [array(4, storage=1)]), "m", 8)


def test_gains_come_from_the_timing_model() -> None:
    rows = OperationTable(step((product(8192, 50257, 1024), "forward", "head", 3)))

    def gpu_seconds(one: Call) -> float:
        found = product_of(one)
        assert found is not None
        return 3.0 if found.n % 8 else 1.0

    gains = {row.dimension: row.gain_seconds for row in with_gains(wasteful_shapes(rows, *H200), rows, gpu_seconds)}
    assert gains["n"] == pytest.approx(3 * 2.0)
    assert all(gain is None for dimension, gain in gains.items() if "x" in dimension)
