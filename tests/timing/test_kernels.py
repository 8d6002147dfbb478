"""GPU costs of single calls, by data sheet and by calibration."""

from __future__ import annotations

import time

import pytest

from trainatomy.catalog.calibrations import array, from_text, shipped
from trainatomy.catalog.gpus import find_gpu, gpus
from trainatomy.operators.cost.kernel import chip_of
from trainatomy.operators.cost.lists import launches_of
from trainatomy.operators.cost.reduction import blocks_of
from trainatomy.results.operations import Call
from trainatomy.timing.cost_model import (
    KernelCost,
    cost_model_of,
    general_rule_only,
    kernel_cost,
    kernel_work,
    precision_of,
)

H200 = cost_model_of(find_gpu("h200"))


def seconds(text: str, cost_model=H200) -> float:
    return kernel_cost(from_text(text), cost_model).seconds


def test_a_large_product_reaches_the_attainable_rate():
    cost = kernel_cost(from_text("aten::mm(bf16[8192,8192],bf16[8192,8192])->bf16[8192,8192]"), H200)
    assert cost.flop_seconds == pytest.approx(2 * 8192**3 / 989.4e12)
    assert 0.7 < cost.flop_seconds / cost.seconds < 0.9
    assert cost.bytes_seconds < cost.flop_seconds


def test_one_row_beyond_a_multiple_of_tiles_costs_another_wave():
    chip = chip_of(find_gpu("h200"), tf32=False)
    full = kernel_work(from_text("aten::mm(bf16[2816,1024],bf16[1024,3072])->bf16[2816,3072]"), chip)
    more = kernel_work(from_text("aten::mm(bf16[4096,1024],bf16[1024,4096])->bf16[4096,4096]"), chip)
    assert more.seconds / more.flop > full.seconds / full.flop * 0.9
    waves = [
        kernel_work(from_text(f"aten::mm(bf16[{m},8192],bf16[8192,8192])->bf16[{m},8192]"), chip).seconds / m
        for m in (4224, 4225)
    ]
    assert waves[1] > waves[0] * 1.02


def test_odd_vocabularies_miss_the_fast_kernels():
    padded = seconds("aten::mm(bf16[8192,768],bf16[768,50304|1,768])->bf16[8192,50304]")
    odd = seconds("aten::mm(bf16[8192,768],bf16[768,50257|1,768])->bf16[8192,50257]")
    assert odd > 4 * padded


def test_tf32_is_an_option_of_the_cost_model():
    text = "aten::mm(f32[4096,4096],f32[4096,4096|1,4096])->f32[4096,4096]"
    assert seconds(text, cost_model_of(find_gpu("h200"), tf32=True)) < seconds(text) / 4


@pytest.mark.parametrize("gpu_id", ["h200", "h100-sxm", "a100-80gb", "rtx-3090", "l4"])
@pytest.mark.parametrize("sizes", [(1024, 1024, 12), (642, 360, 77), (16, 704, 130), (4096, 1032, 520)])
def test_tf32_makes_no_product_slower(gpu_id: str, sizes: tuple[int, int, int]):
    rows, columns, depth = sizes
    text = f"aten::mm(f32[{rows},{depth}],f32[{depth},{columns}])->f32[{rows},{columns}]"
    without, with_tf32 = (seconds(text, cost_model_of(find_gpu(gpu_id), tf32=tf32)) for tf32 in (False, True))
    assert with_tf32 <= without


def test_thin_products_take_longer_with_tf32_as_they_were_measured():
    text = "aten::mm(f32[1024,8],f32[8,1024])->f32[1024,1024]"
    assert seconds(text, cost_model_of(find_gpu("h200"), tf32=True)) > 2 * seconds(text)


def test_groups_are_no_faster_without_tensor_cores():
    call = (
        "aten::convolution(f32[2,1024,57],f32[1024,64,64],f32[1024])->f32[2,1024,29];stride=[2];padding=[32];"
        "dilation=[1];transposed=False;output_padding=[0];groups=16"
    )
    assert seconds(call, cost_model_of(find_gpu("h200"), tf32=False)) >= seconds(call)


def test_convolutions_in_fp32_use_tensor_cores_unless_tf32_is_forbidden():
    call = from_text(
        "aten::convolution(f32[32,256,56,56],f32[256,256,3,3])->f32[32,256,56,56];stride=[1, 1];padding=[1, 1]"
        ";dilation=[1, 1];transposed=False;output_padding=[0, 0];groups=1"
    )
    seconds = {
        tf32: kernel_cost(call, cost_model_of(find_gpu("h200"), tf32=tf32)).seconds for tf32 in (None, True, False)
    }
    assert seconds[None] == seconds[True]
    assert seconds[False] > 2 * seconds[None]


@pytest.mark.parametrize(
    ("text", "moved"),
    [
        ("aten::add(f32[1024,1024]*2)->f32[1024,1024]", 12 * 2**20),
        ("aten::add(f32[1024,1024],f32[1024,1024]@0)->f32[1024,1024]", 8 * 2**20),
        ("aten::add(f32[1024,1024],f32[1024])->f32[1024,1024]", 8 * 2**20 + 4096),
        ("aten::add(f32[1024,1024],f32[1024,1024|0,1])->f32[1024,1024]", 8 * 2**20 + 4096),
        ("aten::add_(f32[1024,1024]!,f32[1024,1024])->f32[1024,1024]@0", 12 * 2**20),
        ("aten::copy_(f32[1024,1024]!,bf16[1024,1024])->f32[1024,1024]@0", 6 * 2**20),
        ("aten::zeros_like(f32[1024,1024])->f32[1024,1024]", 4 * 2**20),
        ("aten::native_dropout(bf16[1024,1024])->bf16[1024,1024],b8[1024,1024]", 5 * 2**20),
        ("aten::_foreach_addcmul_(f32[1024,1024]!,f32[1024,1024],f32[1024,1024]@1)->#1,1,1", 12 * 2**20),
        ("aten::_fused_adamw_(f32[1024,1024]!,f32[1024,1024]!,f32[1024,1024]!,f32[1024,1024]!,f32[]!)->#1,1,1,1,0,1",
         28 * 2**20 + 4),
    ],
)  # fmt: skip
def test_each_distinct_operand_is_moved_once(text, moved):
    assert kernel_work(from_text(text), H200.chip).bytes == moved


def test_views_and_cpu_operations_cost_the_gpu_nothing():
    for text in (
        "aten::view(f32[64])->f32[8,8]@0",
        "aten::empty()->f32[8,8]",
        "aten::add(hf32[8],hf32[8])->hf32[8]",
        "aten::_foreach_add_(hf32[]*300!)->#300",
    ):
        assert kernel_cost(from_text(text), H200) == KernelCost(0.0, 0.0, 0.0, 0), text


def test_slow_copies_by_type_and_layout():
    plain = seconds("aten::clone(bf16[64,512,1024])->bf16[64,512,1024]")
    turned = seconds("aten::clone(bf16[64,512,1024|524288,1,512])->bf16[64,512,1024]")
    widened = seconds("aten::_to_copy(bf16[64,512,1024])->f32[64,512,1024]")
    assert plain < turned
    assert plain < widened


def test_small_operations_cost_at_least_a_kernel():
    assert 0.5e-6 < seconds("aten::add(f32[4]*2)->f32[4]") < 4e-6


def test_backward_of_attention_costs_more_and_a_causal_mask_less():
    q = "bf16[8,16,1024,64|1048576,64,1024,1]"
    forward = f"aten::_scaled_dot_product_flash_attention({q}*3)->{q},f32[8,16,1024]"
    backward = f"aten::_scaled_dot_product_flash_attention_backward({q}*5,f32[8,16,1024])->{q}*3"
    assert 2 < seconds(backward) / seconds(forward) < 5
    assert seconds(f"{forward};is_causal=True") < seconds(forward)


def test_list_operators_launch_by_tensors_or_by_chunks():
    assert launches_of((array("f32", 768),) * 300, 4) == 9  # 36 tensors each
    assert launches_of((array("f32", 8192, 8192),), 4) == 4  # 1024 chunks, 320 each
    assert launches_of((array("f32", 0),), 1) == 0
    # 189 weights of an Inception, on an H200: lists of 36 in Adam, of 110 for norms, and two kernels that sum these up
    given = "f32[65536]*189!,f32[65536]*189,f32[65536]*189!,f32[65536]*189!,f32[]*189!"
    adam = from_text(f"aten::_fused_adamw_({given})->#189,189,189,189,0,189")
    assert kernel_work(adam, H200.chip).launches == 6
    norms = "aten::_foreach_norm(f32[96]*284)->f32[]*284#284"
    assert kernel_work(from_text(norms), H200.chip).launches == 5
    sgd = "aten::_fused_sgd_(f32[1024,1024]!,f32[1024,1024]!,f32[1024,1024]!)->#1,1,1"
    assert kernel_work(from_text(sgd), H200.chip).bytes == 5 * 2**22  # weights and momentum are written too


def test_operators_without_a_cost_rule_are_listed():
    strange = from_text("my::operator(f32[1024])->f32[1024]")
    known = from_text("aten::add(f32[4]*2)->f32[4]")
    assert general_rule_only([strange, known]) == {"my::operator"}
    assert seconds("my::operator(f32[1048576])->f32[1048576]") > 0


@pytest.mark.parametrize("one", gpus(), ids=lambda one: one.id)
def test_every_gpu_has_a_cost_for_every_calibrated_call(one):
    cost_model = cost_model_of(one)
    assert cost_model.calibrated == (one.id in shipped())
    points = shipped()["h200"].points
    more = points[::45] if cost_model.calibrated else ()
    for point in (*{one.operator: one for one in points}.values(), *more):
        cost = kernel_cost(point.call, cost_model)
        assert 0 <= cost.seconds < 10
        assert cost.launches > 0


def test_a_slower_gpu_takes_longer():
    text = "aten::mm(f16[4096,4096],f16[4096,4096])->f16[4096,4096]"
    by_card = [seconds(text, cost_model_of(find_gpu(name))) for name in ("h200", "a100-40gb", "v100-16gb")]
    assert by_card == sorted(by_card)
    published = 2 * 4096**3 / by_card[1] / 1e12
    assert 200 < published < 290  # 271 TFLOP/s are known to be attained on an A100


@pytest.mark.timed
def test_costs_of_bert_large_are_computed_quickly():
    calls = [point.call for point in shipped()["h200"].points[:300]]
    cost_model = cost_model_of(find_gpu("h200"))
    began = time.process_time()
    for call in calls:
        kernel_cost(call, cost_model)
    first = time.process_time() - began
    began = time.process_time()
    for _ in range(15):
        for call in calls:
            kernel_cost(call, cost_model)
    again = time.process_time() - began
    assert first < 0.6
    assert again < 0.1


def test_attention_computes_whole_blocks():
    q = "bf16[16,16,{0},{1}]"
    forward = "aten::_scaled_dot_product_flash_attention({0}*3)->{0},f32[16,16,{1}]"
    at_197, at_256 = (seconds(forward.format(q.format(length, 64), length)) for length in (197, 256))
    assert at_197 > 0.9 * at_256
    small, whole = (
        kernel_work(from_text(forward.format(q.format(1024, head), 1024)), H200.chip).seconds for head in (48, 64)
    )
    assert small == pytest.approx(whole, rel=0.02)


def test_parts_of_one_tensor_are_read_each():
    gate = array("bf16", 512, 1024, strides=(2048, 1), storage=0)
    out = array("bf16", 512, 1024, storage=1)
    call = Call("aten::mul", (gate, gate._replace(part=1)), (out,))
    assert kernel_work(call, H200.chip).bytes == 3 * out.bytes
    assert kernel_work(call._replace(inputs=(gate, gate)), H200.chip).bytes == 2 * out.bytes


def test_precision_of_a_product():
    chip, tf32 = H200.chip, H200.chip._replace(tf32=True)
    biased = from_text("aten::addmm(f32[64],bf16[64,64],bf16[64,64])->bf16[64,64]")
    image = from_text("aten::convolution(f32[8,64,56,56],f32[64,64,3,3])->f32[8,64,56,56]")
    scores = from_text(
        "aten::_scaled_dot_product_efficient_attention_backward(f16[4,8,512,64]*5,f32[4,8,512],i64[]*2)"
        "->f16[4,8,512,64]*3"
    )
    product = from_text("aten::mm(f32[64,64],f32[64,64])->f32[64,64]")
    assert [precision_of(one, chip) for one in (biased, image, scores, product)] == ["bf16", "tf32", "fp16", "fp32"]
    assert precision_of(product, tf32) == "tf32"


def test_8_bit_optimizers_cost_more_than_their_traffic():
    shape = "[4096,4096]"
    state = f"u8{shape}!,u8{shape}!,f32[256]*2,f32[65536]!,f32[65536]!"
    text = f"bitsandbytes::optimizer_update_8bit_blockwise(f32{shape},f32{shape}!,{state})->"
    work = kernel_work(from_text(text), H200.chip)
    assert work.bytes == pytest.approx(4096**2 * (4 + 2 * 4 + 2 * 2), rel=0.01)
    assert 6 < work.seconds / (work.bytes / H200.chip.bandwidth) < 8  # an H200: 6.7 times for 48 million numbers
    assert general_rule_only([from_text(text)]) == frozenset()


def test_sums_over_rows_depend_on_rows_not_columns():
    narrow, wide, short = (
        kernel_work(from_text(f"aten::sum(bf16[{rows},{columns}])->bf16[1,{columns}];dim=[0]"), H200.chip).seconds
        for rows, columns in ((32768, 128), (32768, 256), (64, 128))
    )
    assert narrow == pytest.approx(37.4e-6, rel=0.15) and wide < 1.1 * narrow  # measured: 37.4 us
    assert short < 5e-6


def test_threads_and_blocks_share_the_rows_of_a_sum():
    # setReduceConfig of PyTorch: 16 threads beside each other read 4 columns each, 8 share the 512 rows
    assert blocks_of(512, 96, 96, 132) == (64, 1)
    assert blocks_of(4096, 768, 768, 132) == (16, 64)  # 32 x 4 threads, 6 blocks: up to 352 may share, 16 rows each
    assert blocks_of(64, 1000, 1000, 132) == (16, 1) and blocks_of(32, 768, 768, 132) == (32, 1)
    assert blocks_of(2048, 50257, 50257, 132).rows == 128  # odd rows: a column each, 16 threads share


def test_positions_that_are_computed_bound_operators_of_repeated_operands():
    """The work is that of the numbers written: 3.3e-10 s of a multiprocessor each, however few bytes are read."""
    shape, numbers = "f32[10,256,256,2048]", 10 * 256 * 256 * 2048
    both_small = kernel_work(from_text(f"aten::mul(f32[10,256,1,2048],f32[10,1,256,2048])->{shape}"), H200.chip)
    one_large = kernel_work(from_text(f"aten::mul({shape},f32[10,1,256,2048])->{shape}"), H200.chip)
    assert both_small.bytes < 0.6 * one_large.bytes
    assert both_small.seconds == pytest.approx(one_large.seconds, rel=0.15)
    assert both_small.seconds > 3.3e-10 * numbers / 132
    along = "f32[10,256,256,2048|65536,256,1,0]"
    repeated = kernel_work(from_text(f"aten::mul({along},f32[10,1,256,2048])->{shape}"), H200.chip)
    assert repeated.family.startswith("traffic.rows")  # not transposed: it repeats a number along a row


def test_tokens_of_one_row_are_added_one_after_the_other():
    call = "aten::embedding_dense_backward(f32[1920,32],i64[1920])->f32[1024,32];num_weights=1024"
    work, same = (kernel_work(from_text(text), H200.chip) for text in (call, f"{call};same_row=True"))
    assert same.seconds == pytest.approx(120e-6, rel=0.1)  # measured: 120 us, in a training of MarkupLM
    assert work.seconds < same.seconds / 2
    strided = kernel_work(from_text(call.replace("f32[1920,32],", "f32[1920,32|1600,1],")), H200.chip)
    assert strided.launches == work.launches + 1 and strided.beside > 1.5e-6 > work.beside


def test_values_added_by_pairs_of_indices_take_a_warp_each():
    call = "aten::index_put_(f32[8192,27,27]!,i64[351],i64[351],f32[8192,351])->f32[8192,27,27];indices=None, *, *"
    work = kernel_work(from_text(f"{call};accumulate=True"), H200.chip)
    assert work.seconds == pytest.approx(6.4e-4, rel=0.15)  # measured: 628 us without the sort, in a recommender
    assert kernel_work(from_text(call), H200.chip).family == "table.index_put_"


def test_an_index_that_occurs_often_is_added_one_after_the_other():
    few_rows = "aten::index_put(f32[80,64],i64[28363],f32[28363,64])->f32[80,64];accumulate=True"
    assert 218e-6 < seconds(few_rows) < 310e-6  # measured in the cache and not, from which the time of a repetition is
    narrow = few_rows.replace(",64]", ",32]")  # all of an index are added before the row is written
    assert kernel_work(from_text(narrow), H200.chip).beside == 0
    many_rows = few_rows.replace("f32[80,", "f32[28363,")
    assert kernel_work(from_text(many_rows), H200.chip).beside == 0


def test_untrained_routers_choose_some_experts_more_often():
    bias = "aten::index_put_(f32[8,1536]!,i64[2000],f32[2000,1536])->f32[8,1536]@0;accumulate=True"
    random, chosen, same = (
        kernel_work(from_text(text), H200.chip).beside
        for text in (bias, f"{bias};chosen_rows=True", f"{bias};same_row=True")
    )
    assert 5.2e-7 * 230 < random < 5.2e-7 * 300  # 250 of each on average
    assert chosen == pytest.approx(5.2e-7 * 2000 / 16**0.5, rel=0.05)
    assert same == pytest.approx(5.2e-7 * 2000, rel=0.05)


def test_partial_sums_of_one_row_are_added_one_after_the_other_or_atomically():
    call = "aten::embedding_dense_backward(f32[5760,{width}],i64[5760])->f32[{rows},{width}];same_row=True"

    def turns(rows: int, width: int) -> float:
        return kernel_work(from_text(call.format(rows=rows, width=width)), H200.chip).beside / 575

    assert turns(1024, 32) == turns(256, 32) == pytest.approx(5.6e-8)  # 33 of 115 us in a MarkupLM on both GPUs
    assert turns(512, 768) == turns(512, 32) == turns(1024, 32)  # more than 4 blocks for each partial sum
    assert turns(2, 768) == turns(1, 32) == pytest.approx(1.4e-8)  # few blocks, many partial sums: atomically
    bags = "aten::_embedding_bag_backward(f32[8192,64],i64[40960],i64[8192],i64[40960],i64[8192],i64[0])->f32[2,64]"
    assert kernel_work(from_text(f"{bags};mode=0"), H200.chip).beside > 5e-8 * 2000  # bags: never atomically


def test_tokens_of_one_row_hit_one_row():
    call = "aten::embedding_dense_backward(f32[6000,1024],i64[6000])->f32[30000,1024]"
    work, same = (kernel_work(from_text(text), H200.chip) for text in (call, f"{call};same_row=True"))
    assert same.seconds < work.seconds - 50e-6 and same.beside > 30e-6 > work.beside


def test_expanded_indices_and_losses_per_position():
    chip = H200.chip
    whole = kernel_work(from_text("aten::gather(bf16[4096,64],i64[4096,64])->bf16[4096,64]"), chip)
    expanded = kernel_work(from_text("aten::gather(bf16[4096,64],i64[4096,64|1,0])->bf16[4096,64]"), chip)
    assert whole.bytes - expanded.bytes == 8 * 4096 * 63
    flat = kernel_work(from_text("aten::nll_loss_forward(f32[4096,8],i64[4096])->f32[],f32[]"), chip)
    image = kernel_work(from_text("aten::nll_loss2d_forward(f32[4,8,32,32],i64[4,32,32])->f32[],f32[]"), chip)
    assert image.bytes == 4096 * 72 and image.family != flat.family


def test_losses_of_images_run_in_many_blocks():
    image = seconds("aten::nll_loss2d_forward(f32[16,21,256,256],i64[16,256,256])->f32[],f32[]")
    rows = seconds("aten::nll_loss_forward(f32[1048576,21],i64[1048576])->f32[],f32[]")
    assert image < rows / 50  # one block of threads: 14 ms; an H200 took 79 us for 1.1 million places


def test_a_copy_to_the_gpu_moves_each_value_once():
    made = kernel_work(from_text("aten::_to_copy(hf32[1024,1024])->f32[1024,1024]"), H200.chip)
    filled = kernel_work(from_text("aten::copy_(f32[1024,1024]!,hf32[1024,1024])->f32[1024,1024]@0"), H200.chip)
    assert filled.seconds == made.seconds > 0


def test_embedding_bags_read_rows_and_sort_indices():
    few, many = (
        kernel_work(
            from_text(f"aten::_embedding_bag(f32[{rows},64],i64[4096],i64[512])->f32[512,64],i64[4096]"), H200.chip
        )
        for rows in (1000, 1000000)
    )
    assert few.bytes == many.bytes
    backward = "(f32[512,64],i64[4096],i64[512],i64[4096],i64[512],i64[0])->f32[1000,64];mode="
    summed, greatest = (
        kernel_work(from_text(f"aten::_embedding_bag_backward{backward}{mode}"), H200.chip) for mode in (0, 2)
    )
    assert summed.family == "table.embedding_backward.sorted.bags"
    assert summed.launches > 10 * greatest.launches


def test_batches_are_copied_at_the_pace_of_the_drivers_buffers():
    small, large = (seconds(f"aten::_to_copy(hf32[{count}])->f32[{count}]") for count in (262144, 15052800))
    assert small == pytest.approx(22.4e-6, rel=0.1)  # the calibration of an H200
    assert large == pytest.approx(6.64e-3, rel=0.05)  # 100 images of a SqueezeNet on an H200


@pytest.mark.parametrize(("batch", "measured"), [(33, 108.16), (78, 232.19)])
def test_gradients_of_weights_load_channels_that_lie_beside_each_other(batch: int, measured: float) -> None:
    """A wide ResNet of an H200 in channels-last order: that pixels are no multiple of 8 slows no load."""
    images, weight = f"f16[{batch},512,14,14|100352,1,7168,512]", "f16[512,512,3,3|4608,1,1536,512]"
    options = "bias_sizes=[0];padding=[1, 1];output_mask=[True, True, False]"
    call = f"aten::convolution_backward({images}*2,{weight})->{images},{weight};{options}"
    assert kernel_work(from_text(call), H200.chip).seconds == pytest.approx(measured * 1e-6, rel=0.25)


def test_group_norm_of_one_group_waits_for_one_block_an_image():
    one, many = (
        seconds(
            f"aten::native_group_norm(bf16[8,128,112,112],bf16[128]*2)->bf16[8,128,112,112],bf16[8,{g}]*2;group={g}"
        )
        for g in (1, 64)
    )
    assert one == pytest.approx(1.3e-3, rel=0.1) and many < one / 5  # an H200: 1.30 ms


def test_group_norm_waits_less_for_what_a_cast_has_left_in_the_cache():
    """Norms of separators of sounds: 66 MB that a PReLU reads and writes, 43 and 74 MB that a cast does."""

    def norm_seconds(batch: int, known: str) -> float:
        sizes = f"[{batch},512,1999]"
        norm = f"aten::native_group_norm(f32{sizes},f32[512]*2)->f32{sizes},f32[{batch},1]*2;group=1{known}"
        return kernel_work(from_text(norm), H200.chip).seconds / (512 * 1999)

    cast = ";cast_from_itemsize=2"
    assert norm_seconds(7, cast) == pytest.approx(6.0e-10, rel=0.08)
    assert norm_seconds(12, cast) == pytest.approx(8.0e-10, rel=0.08)
    assert norm_seconds(8, "") == pytest.approx(7.8e-10, rel=0.08)
    assert norm_seconds(7, cast) < 0.85 * norm_seconds(7, "")
    assert norm_seconds(12, cast) == norm_seconds(12, "")


@pytest.mark.parametrize(("name", "operands", "place"), [("mm", "", 2), ("addmm", "f32[32768],", 3)])
def test_the_result_that_out_names_is_no_factor(name: str, operands: str, place: int) -> None:
    """As in TRL's losses by chunks, whose ``torch.mm(..., out=...)`` was priced with the result as a factor."""
    factors, result = "f32[2040,768],f32[768,32768|1,768]", "f32[2040,32768]"
    chip = chip_of(find_gpu("h200"), tf32=False)
    plain = kernel_work(from_text(f"aten::{name}({operands}{factors})->{result}"), chip)
    out = kernel_work(from_text(f"aten::{name}({operands}{factors},{result}!)->{result}@{place}"), chip)
    assert (out.flop, out.seconds, out.family) == (plain.flop, plain.seconds, plain.family)


@pytest.mark.parametrize(
    ("calls", "measured"),
    [
        ({(3000, 1024): 17, (48000, 64): 16}, 3218e-6),  # Persimmon, whose heads have norms
        (
            {
                (588, 32): 2, (588, 64): 2, (588, 160): 2, (588, 256): 6, (2352, 160): 6, (9408, 64): 6, (37632, 32): 6
            },
            1173e-6,  # SegFormer
        ),
        (
            {(3528, 32): 2, (3528, 64): 2, (3528, 160): 2, (3528, 256): 6, (14112, 160): 6, (56448, 64): 6,
             (225792, 32): 6},
            3021e-6,  # PVT v2, whose longest ones are shared by blocks
        ),
    ],
)  # fmt: skip
def test_gradients_of_layer_norms_with_short_rows(calls: dict[tuple[int, int], int], measured: float) -> None:
    """Rows, width and number of the layer norms of trainings, and what their gradients took on an H200."""
    total = 0.0
    for (rows, width), count in calls.items():
        text = f"f32[{rows},{width}]*2,f32[{rows},1]*2,f32[{width}]*2)->f32[{rows},{width}],f32[{width}]*2"
        total += count * seconds(f"aten::native_layer_norm_backward({text};normalized_shape=[{width}]")
    assert total == pytest.approx(measured, rel=0.1)


def test_a_layer_norm_without_weights_that_are_trained_has_one_gradient() -> None:
    text = "aten::native_layer_norm_backward(f32[9000,64]*2,f32[9000,1]*2,f32[64]*2)->f32[9000,64];output_mask=[{}]"
    whole, to_input = (seconds(text.format(mask)) for mask in ("True, True, True", "True, False, False"))
    assert to_input < whole / 2
