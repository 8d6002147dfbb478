"""Allocations besides results: derived by hand from ATen's sources, and counted on a real H200."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from trainatomy.operators.allocation import allocation_rules
from trainatomy.operators.allocation.plan import Free, KernelCall, Out, Plan, Processor, Scratch

RULES = allocation_rules()
aten = torch.ops.aten
H200 = Processor((9, 0), 132, (2, 11))


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def plan(operator, *args, processor: Processor = H200, **kwargs) -> Plan:
    results = operator(*args, **kwargs)
    outputs = tuple(leaf for leaf in torch.utils._pytree.tree_leaves(results) if isinstance(leaf, torch.Tensor))
    return RULES[operator._schema.name](KernelCall(operator, args, kwargs, outputs, processor))


def scratch(steps: Plan) -> list[int]:
    return [step.bytes for step in steps if isinstance(step, Scratch)]


class TestSumsOverRows:
    """Compute bias gradients: sums over dimension 0 of [rows, columns]."""

    def test_bert_large_as_an_h200_allocates_it(self):
        # Blocks of 32 × 4 threads, 4 columns a thread: 2048 / 4 = 512 values a thread ≥ 256, so the rows are shared by
        # min(⌈2112/8⌉, ⌈512/16⌉) = 32 blocks: 4 B · 1024 · 32 · 32 · 4; a semaphore for 1024 / 4 / 32 = 8 blocks.
        assert plan(aten.sum.dim_IntList, meta(2048, 1024), [0], True) == [
            Out(0),
            Scratch(16777216, "reduction buffer 0"),
            Scratch(32, "semaphores 0"),
            Free("semaphores 0"),
            Free("reduction buffer 0"),
        ]
        assert scratch(plan(aten.sum.dim_IntList, meta(2048, 4096), [0], True)) == [67108864, 128]

    def test_few_rows_are_not_shared(self):
        half = torch.float16
        assert scratch(plan(aten.sum.dim_IntList, meta(512, 1024, dtype=half), [0], True)) == []
        assert scratch(plan(aten.sum.dim_IntList, meta(1020, 1024), [0], True)) == []
        assert scratch(plan(aten.sum.dim_IntList, meta(1024, 1024), [0], True)) == [4 * 1024 * 16 * 128, 32]

    def test_a_transposed_gradient_is_summed_along_its_rows(self):
        # Contiguous along the reduced dimension: blocks of 512 / … threads share a row and none waits for another.
        assert scratch(plan(aten.sum.dim_IntList, meta(1024, 2048).t(), [0], True)) == []

    def test_columns_that_four_do_not_divide(self):
        # 2049 rows × 30 columns: two columns a thread, 8 wide, 256 / 8 = 32 high: 65 values a thread, one block does.
        assert scratch(plan(aten.sum.dim_IntList, meta(2049, 30), [0], True)) == []
        # 65,536 rows: 2048 values a thread, grid ⌈15/8⌉ = 2, blocks min(⌈132·8/2⌉, ⌈2048/16⌉) = 128.
        assert scratch(plan(aten.sum.dim_IntList, meta(65536, 30), [0], True)) == [4 * 30 * 128 * 8 * 2, 8]

    def test_more_threads_on_a_smaller_gpu(self):
        turing = Processor((7, 5), 40, (2, 11))
        # 40 multiprocessors of 1024 threads hold 320 blocks of 128: ⌈320/8⌉ = 40 > 32 blocks wanted for 512 values.
        assert scratch(plan(aten.sum.dim_IntList, meta(2048, 1024), [0], True, processor=turing)) == [16777216, 32]
        tiny = Processor((7, 5), 4, (2, 11))
        assert scratch(plan(aten.sum.dim_IntList, meta(2048, 1024), [0], True, processor=tiny)) == [
            4 * 1024 * 4 * 128,
            32,
        ]


def test_biases_of_bert_large_as_counted_on_an_h200():
    # One step of torch 2.11, batch 4 × 512, fp32: such allocations in its trace besides activations and gradients.
    counted = {67108864: 24, 128: 24, 16777216: 120, 32: 120}
    taken: Counter[int] = Counter()
    for columns in (1024, 1024, 1024, 1024, 4096, 1024):  # query, key, value, output, up, down
        taken.update(scratch(plan(aten.sum.dim_IntList, meta(2048, columns), [0], True)))
    assert {size: 24 * count for size, count in taken.items()} == counted
    # the pooler, the classifier and the sum of positions over the batch add none
    for rows, columns in ((4, 1024), (4, 2)):
        assert scratch(plan(aten.sum.dim_IntList, meta(rows, columns), [0], True)) == []
    assert scratch(plan(aten.sum.dim_IntList, meta(4, 512, 1024), [0], True)) == []


def test_reductions_of_nothing_and_of_one_number():
    assert plan(aten.sum.default, meta(0, 4)) == [Out(0)]
    assert plan(aten.sum.default, meta()) == [Out(0)]


def test_reductions_to_one_number_share_a_buffer_without_columns():
    # 31,254,528 values, 512 threads: ⌈31254528/512⌉ = 61,044 values a thread; 132 · 4 blocks fill the GPU.
    assert scratch(plan(aten.linalg_vector_norm.default, meta(30522, 1024), 2)) == [4 * 528, 4]
    # pairs of a value and an index take 16 bytes, Welford's four numbers too
    assert scratch(plan(aten.argmax.default, meta(30522, 1024))) == [16 * 528, 4]
    assert scratch(plan(aten.var.correction, meta(30522, 1024), None, correction=1)) == [16 * 528, 4]


def test_a_bool_sum_is_converted_first():
    assert plan(aten.sum.default, meta(4, 512, dtype=torch.bool))[:2] == [
        Out(0),
        Scratch(4 * 512 * 8, "input in the result's type"),
    ]
    assert scratch(plan(aten.any.default, meta(4, 512, dtype=torch.bool))) == []


def test_half_is_summed_into_float_without_a_copy():
    steps = plan(aten.sum.dim_IntList, meta(2048, 1024, dtype=torch.bfloat16), [0], True, dtype=torch.float32)
    assert scratch(steps) == [16777216, 32]


def test_a_reduction_beyond_32_bits_is_cut():
    # 4 GB: two halves of 500,000 rows, each with buffers of its own for ⌈125000/256⌉ = 489 blocks, one after the other
    steps = plan(aten.sum.dim_IntList, meta(1_000_000, 1024), [0], True)
    assert scratch(steps) == [4 * 1024 * 489 * 128, 32] * 2
    assert [type(step) for step in steps] == [Out, Scratch, Scratch, Free, Free, Scratch, Scratch, Free, Free]
    half = plan(aten.sum.dim_IntList, meta(1048576, 2048, dtype=torch.bfloat16), [0], True)
    assert scratch(half)[0] == 2048 * 4  # bf16 results cannot hold partial sums


class TestNorms:
    def test_layer_norm_allocates_only_copies(self):
        assert scratch(plan(aten.native_layer_norm.default, meta(8, 16), [16], meta(16), meta(16), 1e-5)) == []
        strided = meta(16, 8).t()
        assert plan(aten.native_layer_norm.default, strided, [16], meta(16), meta(16), 1e-5)[0].bytes == 8 * 16 * 4

    @staticmethod
    def backward(rows: int, columns: int, processor: Processor = H200) -> Plan:
        x, stat, weight = meta(rows, columns), meta(rows, 1), meta(columns)
        operator = aten.native_layer_norm_backward.default
        return plan(operator, x, x, [columns], stat, stat, weight, weight, [True, True, True], processor=processor)

    def test_backward_of_bert_allocates_no_workspace(self):
        assert self.backward(2048, 1024) == [Out(0), Out(1), Out(2)]
        assert self.backward(65536, 128) == [Out(0), Out(1), Out(2)]

    def test_backward_with_very_many_rows_sums_in_two_steps(self):
        # ⌈131072/32⌉ = 4096 parts of 128 sums, twice; the sum over the parts shares a buffer
        steps = self.backward(131072, 128)
        assert scratch(steps)[:4] == [512, 512, 4096 * 512, 4096 * 512]
        assert [step.number for step in steps if isinstance(step, Out)] == [0, 1, 2]
        # 4224 columns are enough blocks for 132 multiprocessors
        assert scratch(self.backward(131072, 4224)) == []


class TestEmbeddingBackward:
    @staticmethod
    def backward(count: int, vocabulary: int, width: int, dtype=torch.float32, processor: Processor = H200) -> Plan:
        indices = meta(count, dtype=torch.int64)
        operator = aten.embedding_dense_backward.default
        return plan(operator, meta(count, width, dtype=dtype), indices, vocabulary, -1, False, processor=processor)

    def test_few_indices(self):
        assert self.backward(3072, 30522, 1024) == [Out(0)]

    def test_many_indices_are_sorted_before_the_result_is_made(self):
        steps = self.backward(8192, 32000, 4096, torch.bfloat16)
        assert steps.index(Free("sort")) < steps.index(Free("range")) < steps.index(Out(0))
        sizes = {step.name: step.bytes for step in steps if isinstance(step, Scratch)}
        # a tile of the sort holds 12 · 384 pairs: 2 blocks of 256 · 4 bytes, 8 passes of 256 · 8, two copies, counters
        assert sizes["sort"] == 16384 + 2048 + 65536 + 65536 + 256 + 255
        assert sizes["partial sums"] == (8192 // 10 + 8192) * 4096 * 4

    def test_few_rows_are_added_atomically_since_2_11(self):
        assert "partial sums" not in str(self.backward(65536, 100, 256))
        assert "partial sums" in str(self.backward(65536, 100, 256, processor=Processor((9, 0), 132, (2, 10))))


def test_foreach_norm_of_bert_large_as_an_h200_allocates_it():
    # 393 gradients, the largest of 30,522 · 1024 elements in 477 chunks; the results follow, 4 bytes each
    tensors = [meta(30522, 1024)] + [meta(1024)] * 392
    steps = plan(aten._foreach_norm.Scalar, tensors, 2)
    assert steps[0] == Scratch(749844, "chunks")
    assert steps[1:] == [*(Out(index) for index in range(393)), Free("chunks")]


@pytest.mark.parametrize("name", sorted(RULES))
def test_every_name_is_an_operator(name: str):
    namespace, operator = name.split("::")
    if namespace == "torchvision":
        pytest.importorskip("torchvision")
    assert hasattr(getattr(torch.ops, namespace), operator)


def test_every_buffer_is_freed_once_and_by_its_name():
    for steps in (TestNorms.backward(131072, 128), TestEmbeddingBackward.backward(8192, 32000, 64)):
        taken = Counter(step.name for step in steps if isinstance(step, Scratch))
        freed = Counter(step.name for step in steps if isinstance(step, Free))
        assert all(freed[name] <= taken[name] for name in freed)


class TestLosses:
    def test_softmax_backward_multiplies_gradient_and_output_first(self):
        scores = meta(4, 16, 512, 512)
        steps = plan(aten._softmax_backward_data.default, scores, scores, -1, torch.float32)
        assert steps == [Out(0), Scratch(4 * 16 * 512 * 512 * 4, "gradient times output")]

    def test_log_softmax_backward_does_not(self):
        logits = meta(2048, 30522)
        assert plan(aten._log_softmax_backward_data.default, logits, logits, 1, torch.float32) == [Out(0)]

    def test_mean_squares_are_kept_until_reduced(self):
        # 2,097,152 squares over 512 threads: 4096 values a thread, shared by 4096 / 16 = 256 blocks
        assert scratch(plan(aten.mse_loss.default, meta(2048, 1024), meta(2048, 1024))) == [2**23, 4 * 256, 4]
        assert scratch(plan(aten.mse_loss.default, meta(8), meta(8), 0)) == []

    def test_binary_cross_entropy_keeps_the_storage_of_all_losses(self):
        assert plan(aten.binary_cross_entropy.default, meta(64, 10), meta(64, 10))[0] == Out(0, 2560)
        with_logits = plan(aten.binary_cross_entropy_with_logits.default, meta(64, 10), meta(64, 10))
        assert scratch(with_logits) == [2560, 2560]


class TestIndexing:
    def test_indices_that_are_no_row_are_copied(self):
        expanded = meta(1, 512, dtype=torch.int64).expand(4, 512)
        assert plan(aten.embedding.default, meta(2, 1024), expanded) == [Scratch(16384, "flat indices"), Out(0)]
        assert plan(aten.embedding.default, meta(2, 1024), meta(4, 512, dtype=torch.int64)) == [Out(0)]
        assert plan(aten.embedding.default, meta(2, 1024), expanded[:1]) == [Out(0)]

    def test_adding_at_indices_sorts_them(self):
        index = meta(200, dtype=torch.int64)
        steps = plan(aten._index_put_impl_.default, meta(64, 128), [index], meta(200, 128), True, True)
        # wrapped, times stride, sorted, places, range; 6 bits of 64 rows need one pass, and 200 pairs one tile
        assert scratch(steps) == [1600] * 5 + [1]
        written = plan(aten._index_put_impl_.default, meta(64, 128), [index], meta(200, 128), False, True)
        assert scratch(written) == []

    def test_short_rows_are_sorted_in_place(self):
        assert scratch(plan(aten.sort.default, meta(3, 4096))) == [4096 * 8]
        # 20,000 pairs in tiles of 384 · ⌊30·4/8⌋ = 5760 … keys of 8 bytes and values of 8: 384 · 12
        long = scratch(plan(aten.sort.default, meta(20000, dtype=torch.int64)))
        assert long == [160000, 16384 + 5 * 1024 + 2 * 160000 + 256 + 255]

    def test_one_row_is_scanned_by_cub(self):
        # 512 fit one tile of 128 · 7: 33 descriptors of 16 bytes in a blob (768 + 255) within a blob (1024 + 255)
        assert scratch(plan(aten.cumsum.default, meta(512, dtype=torch.int64), 0)) == [1279]
        assert scratch(plan(aten.cumsum.default, meta(4, 512, dtype=torch.int64), 1)) == []


def test_columns_begin_as_large_as_the_input():
    unfolded = plan(aten.im2col.default, meta(2, 8, 20, 1), [9, 1], [1, 1], [4, 0], [1, 1])
    assert unfolded == [Scratch(1280, "too small"), Out(0), Free("too small")]
    strided = meta(2, 20, 72).transpose(1, 2)
    assert plan(aten.col2im.default, strided, [20, 1], [9, 1], [1, 1], [4, 0], [1, 1]) == [
        Out(0, 11520),
        Scratch(11520, "contiguous copy 0"),
    ]


def test_batch_norm_copies_a_gradient_of_another_memory_format():
    data, weight, other = meta(2, 8, 5), meta(8), meta(2, 5, 8).transpose(1, 2)
    args = (data, weight, weight, weight, weight, weight, True, 1e-5, [True, True, True])
    assert scratch(plan(aten.native_batch_norm_backward.default, other, *args)) == [320]
    assert scratch(plan(aten.native_batch_norm_backward.default, data, *args)) == []


class TestMasks:
    """Index with masks of [4, 1023] tokens, as the loss of TRL does: sizes as an H200 with torch 2.11 recorded them."""

    MASK = meta(4092, dtype=torch.bool)
    FOUND = (4, 1, 1023)  # the number of true elements, the storage of their sum and of their selection

    def planned(self, operator, *args, selected: int, outputs: tuple[torch.Tensor, ...]) -> Plan:
        call = KernelCall(operator, args, {}, outputs, H200, (selected,))
        return list(RULES[operator._schema.name](call))

    def test_elements_are_counted_before_they_are_selected(self):
        steps = self.planned(aten.nonzero.default, self.MASK, selected=4092, outputs=(meta(4092, 1),))
        assert scratch(steps) == list(self.FOUND)
        assert steps.index(Free("sum")) < steps.index(Out(0)) < steps.index(Scratch(1023, "select"))

    def test_many_elements_are_counted_by_all_blocks_that_run_at_once(self):
        # 132 multiprocessors hold 8 blocks of 256 threads each, 5 waves of them write 4 bytes: 21,120, aligned to 256.
        steps = self.planned(aten.nonzero.default, meta(4097, dtype=torch.bool), selected=9, outputs=(meta(9, 1),))
        assert scratch(steps)[1] == 21248 + 255

    def test_positions_live_until_the_result_is_allocated(self):
        rows = self.planned(aten.index.Tensor, meta(4092, 896), [self.MASK], selected=4000, outputs=(meta(4000, 896),))
        assert scratch(rows) == [4, 1, 4000 * 8, 1023]
        assert rows[-1] == Out(0) and Free("positions") not in rows

    def test_a_mask_of_two_dimensions_has_two_positions_for_each_element(self):
        mask = meta(4, 1023, dtype=torch.bool)
        gradient = (meta(4, 1023, 896), [mask], meta(4092, 896), True, True)
        steps = self.planned(aten._index_put_impl_.default, *gradient, selected=4092, outputs=(gradient[0],))
        wrapped = [32736, 32736] * 2
        assert scratch(steps) == [4, 1, 65472, 1023, *wrapped, 32736, 32736, 32736, 71167]
        assert steps.index(Free("positions")) < steps.index(Scratch(32736, "sorted indices"))

    def test_one_value_for_all_positions_fills(self):
        x = meta(4092, 8)
        steps = self.planned(aten.index_put_.default, x, [self.MASK], meta(), selected=4092, outputs=(x,))
        assert scratch(steps) == []
        rows = self.planned(aten.index_put_.default, x, [self.MASK], meta(4092, 8), selected=4092, outputs=(x,))
        assert scratch(rows) == [4, 1, 32736, 1023]

    def test_scattered_values_need_the_running_sum_of_the_mask(self):
        x, source = meta(4092), meta(4092)
        steps = self.planned(aten.masked_scatter.default, x, self.MASK, source, selected=0, outputs=(meta(4092),))
        assert steps[0] == Out(0) and scratch(steps) == [32736, 1279]
        back = (x, self.MASK, [4092])
        steps = self.planned(aten.masked_scatter_backward.default, *back, selected=0, outputs=(meta(4092),))
        assert scratch(steps) == [4, 1, 32736, 1023]

    def test_selected_elements_have_a_position_in_each_dimension_of_the_common_shape(self):
        x, mask = meta(4, 1023), meta(1023, dtype=torch.bool)
        steps = self.planned(aten.masked_select.default, x, mask, selected=100, outputs=(meta(100),))
        assert scratch(steps) == [4, 1, 100 * 2 * 8, 1023]


def test_dropout_allocates_its_mask_first():
    assert plan(aten.native_dropout.default, meta(4, 8), 0.1, True) == [Out(1), Out(0)]
    assert plan(aten.native_dropout.default, meta(4, 8), 0.1, False) == [Out(0), Out(1)]


def test_group_norm_folds_statistics_and_weights():
    image, weight = meta(8, 64, 56, 56, dtype=torch.float16), meta(64, dtype=torch.float16)
    assert scratch(plan(aten.native_group_norm.default, image, weight, weight, 8, 64, 3136, 8, 1e-5)) == [2048, 2048]
    stat = meta(8, 8, dtype=torch.float16)
    operator = aten.native_group_norm_backward.default
    steps = plan(operator, image, image, stat, stat, weight, 8, 64, 3136, 8, [True, True, True])
    assert scratch(steps) == [2048, 2048, 256, 256, 2048]
