"""GPU costs of convolutions and batch norm."""

from __future__ import annotations

import pytest

from trainatomy.catalog.calibrations import from_text
from trainatomy.catalog.gpus import find_gpu
from trainatomy.operators.cost.kernel import KernelWork, chip_of
from trainatomy.timing.cost_model import cost_model_of, kernel_cost, kernel_work

CHIP = chip_of(find_gpu("h200"), tf32=False)
TF32 = chip_of(find_gpu("h200"), tf32=None)
MODEL = cost_model_of(find_gpu("h200"))


def conv(images: str, weight: str, out: str, more: str = "stride=[1, 1];padding=[0, 0]") -> float:
    return kernel_work(from_text(f"aten::convolution({images},{weight})->{out};{more}"), CHIP).seconds


def test_only_channels_first_images_are_rewritten():
    weight = "f32[256,256,3,3]"
    first = conv("f32[16,256,14,14]", weight, "f32[16,256,14,14]")
    last = conv("f32[16,256,14,14|50176,1,3584,256]", weight, "f32[16,256,14,14]")
    assert 8e-6 < first - last < 20e-6  # two images and the weight: 4 + 4 + 5 us


def test_a_1x1_convolution_is_a_product():
    plain = conv("f32[16,256,56,56]", "f32[64,256,1,1]", "f32[16,64,56,56]")
    with_step = conv("f32[16,256,56,56]", "f32[64,256,1,1]", "f32[16,64,28,28]", "stride=[2, 2];padding=[0, 0]")
    assert with_step > plain  # a quarter of the work, and images to rewrite


@pytest.mark.parametrize(
    ("images", "channels", "results", "forward", "backward"),
    [(30, 896, 112, 7.84, 13.09), (30, 56, 224, 5.09, 12.38), (9, 72, 24, 5.09, 7.75), (30, 224, 2016, 7.23, 20.77)],
)
def test_images_of_one_place_are_small_products(images, channels, results, forward, backward):
    """Measured in a RegNet and a MobileNetV3 in TF32 on an H100 (``records/further-calls-h100-sxm.jsonl.gz``)."""
    x, weight = f"f32[{images},{channels},1,1]", f"f32[{results},{channels},1,1]"
    out, bias = f"f32[{images},{results},1,1]", f"f32[{results}]"
    model = cost_model_of(find_gpu("h100-sxm"), tf32=True)
    for text, measured in (
        (f"aten::convolution({x},{weight},{bias})->{out}", forward),
        (f"aten::convolution_backward({out},{x},{weight})->{x},{weight},{bias}", backward),
    ):
        call = from_text(text)
        work = kernel_work(call, model.chip)
        assert work.family.split(".")[2:] == ["place", "tf32"]
        assert work.seconds == pytest.approx(measured * 1e-6, rel=0.3)
        assert kernel_cost(call, model).seconds == pytest.approx(measured * 1e-6, rel=0.1)


def test_unaligned_channels_and_more_places_are_not_of_one_place():
    for x, weight, out in (
        ("f32[30,96,1,1]", "f32[6,96,1,1]", "f32[30,6,1,1]"),
        ("f16[30,96,1,1]", "f16[24,96,1,1]", "f16[30,24,1,1]"),
        ("f32[30,96,2,2]", "f32[24,96,1,1]", "f32[30,24,2,2]"),
        ("f32[30,96,1,1]", "f32[24,96,3,3]", "f32[30,24,1,1]"),
    ):
        assert ".place." not in kernel_work(from_text(f"aten::convolution({x},{weight})->{out}"), CHIP).family
    huge = from_text("aten::convolution(f32[65536,2048,1,1],f32[2048,2048,1,1])->f32[65536,2048,1,1]")
    assert kernel_work(huge, CHIP).seconds > 1e-3  # its arithmetic


def test_few_channels_are_far_from_the_peak():
    """The first layer of a vision transformer: 14.8 GFLOP, which tensor cores would compute in 20 us."""
    text = "aten::convolution(f16[64,3,224,224],f16[768,3,16,16],f16[768])->f16[64,768,14,14];stride=[16, 16]"
    work = kernel_work(from_text(text), CHIP)
    assert work.flop == pytest.approx(2 * 64 * 196 * 768 * 768)
    assert 0.02 < work.flop / CHIP.rate("fp16") / work.seconds < 0.04


def test_backward_counts_only_the_requested_gradients():
    text = "aten::convolution_backward({0},f32[16,64,56,56],f32[64,64,3,3])->f32[16,64,56,56],f32[64,64,3,3];{1}"
    both, one, none = (
        kernel_work(from_text(text.format("f32[16,64,56,56]", f"output_mask=[{mask}]")), CHIP)
        for mask in ("True, True, False", "False, True, False", "False, True, True")
    )
    assert both.flop == 2 * one.flop and both.seconds > 1.3 * one.seconds
    assert none.seconds - one.seconds > 15e-6  # the bias


@pytest.mark.parametrize(
    ("images", "weight", "padding", "measured"),
    [
        ("bf16[32,12,512,64]", "bf16[12,1,65,1]", "[32, 0]", 1186.1e-6),  # along a sequence, a row for each place
        ("f32[32,256,512]", "f32[256,1,15]", "[7]", 60.0e-6),  # along a sequence, all places in one row
        ("bf16[16,512,64,64]", "bf16[512,1,31,31]", "[15, 15]", 10445.8e-6),
        ("bf16[16,256,64,64]", "bf16[256,1,3,3]", "[1, 1]", 164.8e-6),  # unrolled
    ],
)
def test_each_row_of_a_filter_costs_index_arithmetic_unless_its_loops_are_unrolled(
    images: str, weight: str, padding: str, measured: float
):
    """Held-out kernels that an H200 ran (lab/timing/records), by their formula alone."""
    groups = weight.split("[")[1].split(",")[0]
    ones = "[1]" if images.count(",") == 2 else "[1, 1]"
    found = conv(images, weight, images, f"stride={ones};padding={padding};dilation={ones};groups={groups}")
    assert found == pytest.approx(measured, rel=0.25)


def test_pixels_that_begin_at_any_address_take_older_kernels():
    """1 x 1 on 17 x 17 pixels, of Inception: 96 us on an H200; 16 x 16 pixels of as many images would take a third."""
    text = "aten::convolution(f16[{0},768,{1},{1}],f16[192,768,1,1])->f16[{0},192,{1},{1}];stride=[1, 1];padding=[0, 0]"
    odd, aligned = (kernel_work(from_text(text.format(*size)), CHIP) for size in ((48, 17), (54, 16)))
    assert odd.family == "convolution.forward.pointwise.first odd.half"
    assert aligned.family == "convolution.forward.pointwise.first.half"
    assert odd.seconds > 2 * aligned.seconds


@pytest.mark.parametrize(
    ("call", "measured"),
    [
        ("upsample_bicubic2d(f32[1,768,14,14])->f32[1,768,14,32];output_size=[14, 32]", 221e-6),
        ("upsample_bicubic2d_backward(f32[1,768,14,32])->f32[1,768,14,14];output_size=[14, 32]", 1059e-6),
        ("upsample_bicubic2d_backward(f16[1,384,64,48])->f16[1,384,24,24];output_size=[64, 48]", 10896e-6),
        ("upsample_bilinear2d_backward(f32[64,48,128,128])->f32[64,48,64,64];output_size=[128, 128]", 444.9e-6),
    ],
)
def test_interpolation_waits_for_planes_and_atomic_additions(call: str, measured: float):
    """Held-out kernels that an H200 ran; gradients in 16 bits compare and swap, ten times as slow."""
    assert kernel_work(from_text(f"aten::{call}"), CHIP).seconds == pytest.approx(measured, rel=0.3)


def test_depthwise_convolutions_reach_little_of_the_peak():
    deep = kernel_work(
        from_text("aten::convolution(f32[16,96,56,56],f32[96,1,7,7])->f32[16,96,56,56];stride=[1, 1];groups=96"), CHIP
    )
    assert deep.family == "convolution.forward.depthwise.first.fp32" and deep.rate == "fp32"
    assert deep.flop == 2 * 16 * 96 * 56 * 56 * 49
    assert 130e-6 < deep.seconds < 200e-6


@pytest.mark.parametrize(
    ("text", "form", "microseconds"),
    [
        ("convolution({x},{w})->{x};{same}", "last many.half", (60, 85)),
        ("convolution_backward({x}*2,{w})->{x},{w};{same};{mask}", "last.half", (170, 260)),
    ],
)
def test_channels_last_depthwise_convolutions_of_many_images(text, form, microseconds):
    work = _depthwise(text, "bf16", (64, 128, 32, 32), 7)
    assert work.family.endswith(f".depthwise.{form}")
    assert microseconds[0] * 1e-6 < work.seconds < microseconds[1] * 1e-6


@pytest.mark.parametrize(
    ("dtype", "shape", "side", "form", "microseconds"),
    [
        ("f32", (32, 96, 14, 14), 7, "last direct.fp32", (180, 280)),
        ("f32", (16, 96, 28, 28), 7, "last products.fp32", (240, 400)),
        ("f32", (16, 96, 28, 28), 5, "last.fp32", (10, 60)),
        ("bf16", (128, 512, 14, 14), 31, "last products.half", (18e3, 30e3)),
    ],
)
def test_gradients_of_depthwise_weights_for_which_cudnn_has_no_kernel(dtype, shape, side, form, microseconds):
    """Some were measured on an H200: 225 microseconds, and 24.6 milliseconds for 31 x 31."""
    work = _depthwise("convolution_backward({x}*2,{w})->{x},{w};{same};{mask}", dtype, shape, side)
    assert work.family.endswith(f".depthwise.{form}")
    assert microseconds[0] * 1e-6 < work.seconds < microseconds[1] * 1e-6


def _depthwise(text: str, dtype: str, shape: tuple[int, int, int, int], side: int) -> KernelWork:
    """Return the work of a channels-last depthwise convolution that keeps the size of the image."""
    images, channels, height, width = shape
    strides = f"{channels * height * width},1,{channels * width},{channels}"
    x = f"{dtype}[{images},{channels},{height},{width}|{strides}]"
    weight, pad = f"{dtype}[{channels},1,{side},{side}]", side // 2
    same = f"stride=[1, 1];padding=[{pad}, {pad}];dilation=[1, 1];groups={channels}"
    mask = "output_mask=[True, True, False]"
    return kernel_work(from_text(f"aten::{text}".format(x=x, w=weight, same=same, mask=mask)), CHIP)


@pytest.mark.parametrize(
    ("x", "weight", "way", "kind", "milliseconds"),
    [
        ("bf16[4,768,247]", "bf16[768,48,128]", "forward", "cores", 32.0),
        ("bf16[4,768,247]", "bf16[768,48,128]", "backward", "group", 4.1),
        ("bf16[16,1024,438]", "bf16[1024,64,128]", "forward", "group", 3.4),
        ("f32[8,768,727]", "f32[768,48,128]", "forward", "group", 4.8),
        ("bf16[3,768,499]", "bf16[768,48,128]", "backward", "cores", 40.3),  # of a training on an H100
        ("f32[8,768,727]", "f32[768,48,128]", "backward", "cores", 8.6),
        ("bf16[2,1024,14,14]", "bf16[1024,64,3,3]", "forward", "turns", 0.16),
    ],
)
def test_groups_that_take_turns(x, weight, way, kind, milliseconds):
    """Milliseconds on an H200."""
    rest = "padding=[64];groups=16" if "14,14" not in x else "padding=[1, 1];groups=16"
    out = x.replace("247", "248").replace("438", "439").replace("727", "728").replace("499", "500")
    text = f"aten::convolution({x},{weight})->{out};{rest}"
    if way == "backward":
        text = f"aten::convolution_backward({out},{x},{weight})->{x},{weight};{rest};output_mask=[True, True, False]"
    work = kernel_work(from_text(text), TF32)
    assert f".{kind}." in work.family and f".{way}." in work.family
    assert work.seconds == pytest.approx(milliseconds * 1e-3, rel=0.25)


def test_narrow_groups_and_short_filters_do_not_take_turns():
    for weight, groups in (("bf16[512,32,3,3]", 16), ("bf16[1024,64,3,3]", 8)):
        text = f"aten::convolution(bf16[64,512,28,28],{weight})->bf16[64,512,28,28];groups={groups}"
        assert ".small." in kernel_work(from_text(text), CHIP).family


def test_grouped_convolutions_split_channels():
    whole = kernel_work(from_text("aten::convolution(f32[16,256,28,28],f32[256,256,3,3])->f32[16,256,28,28]"), CHIP)
    text = "aten::convolution(f32[16,256,28,28],f32[256,8,3,3])->f32[16,256,28,28];groups=32"
    assert kernel_work(from_text(text), CHIP).flop == whole.flop / 32


@pytest.mark.parametrize(
    ("shape", "forward", "backward"),
    [
        ("16,64,56,56", 23.7, 48.9),
        ("16,512,28,28", 19.5, 38.3),
        ("16,2048,7,7", 24.3, 25.6),
        ("16,128,28,28", 7.3, 16.4),
    ],
)
def test_batch_norm_by_channel(shape, forward, backward):
    """Microseconds on an H200: few channels, many, short ones, and as many as it has multiprocessors."""
    channels = shape.split(",")[1]
    one = f"aten::native_batch_norm(f32[{shape}],f32[{channels}]*4)->f32[{shape}],f32[{channels}]*2"
    other = f"aten::native_batch_norm_backward(f32[{shape}]*2,f32[{channels}]*5)->f32[{shape}],f32[{channels}]*2"
    for text, microseconds in ((one, forward), (other, backward)):
        assert kernel_work(from_text(text), CHIP).seconds * 1e6 == pytest.approx(microseconds, rel=0.35)


def test_batch_norm_of_inference_is_element_wise():
    text = "aten::native_batch_norm(f32[16,64,112,112],f32[64]*4)->f32[16,64,112,112],f32[0]*2;training={}"
    trained, known = (kernel_work(from_text(text.format(value)), CHIP) for value in (True, False))
    assert known.seconds == 0.0 and known.bytes == pytest.approx(2 * 16 * 64 * 112 * 112 * 4, rel=1e-4)
    assert trained.seconds > 3 * known.bytes / CHIP.bandwidth


def test_a_norm_copies_a_non_dense_input_first():
    text = (
        "aten::native_layer_norm_backward(f32[4,1500,768],{0},f32[4,1500,1]*2,f32[768]*2)->f32[4,1500,768],f32[768]*2"
    )
    plain, turned = (
        kernel_work(from_text(text.format(x)), CHIP) for x in ("f32[4,1500,768]", "f32[4,1500,768|1152000,1,1500]")
    )
    assert turned.launches == plain.launches + 1
    assert turned.beside > 2 * 4 * 1500 * 768 * 4 / CHIP.bandwidth > plain.beside == 0


def test_tokens_that_update_one_row_are_serialized():
    text = "aten::embedding_dense_backward(f32[4,512,768],i64[4,512])->f32[{},768]"
    types, words = (kernel_work(from_text(text.format(rows)), CHIP).seconds for rows in (2, 512))
    assert types > 100e-6 > words


@pytest.mark.parametrize(
    ("text", "form"),
    [
        ("aten::convolution(f32[8,64,28,28],f32[64,64,3,3])->f32[8,64,28,28];stride=[1, 1]", "first"),
        ("aten::convolution(f32[8,64,28,28|50176,1,1792,64],f32[64,64,3,3])->f32[8,64,28,28]", "last"),
        ("aten::convolution(f32[8,64,28,28],f32[64,2,3,3])->f32[8,64,28,28];groups=32", "first grouped"),
        ("aten::convolution(f32[8,64,28,28],f32[64,64,3,3])->f32[8,64,28,28];dilation=[2, 2]", "first dilated"),
        ("aten::convolution(f32[8,64,28,28],f32[64,64,2,2])->f32[8,64,56,56];transposed=True", "first transposed"),
    ],
)
def test_layout_groups_and_dilation_are_families_of_their_own(text, form):
    assert kernel_work(from_text(text), CHIP).family.split(".")[3] == form


def test_interpolation_goes_through_planes_one_after_the_other():
    def seconds(images, planes_last=""):
        batch, channels, side = images
        shape = f"{batch},{channels},{side},{side}{planes_last}"
        text = f"aten::upsample_bilinear2d(f32[{shape}])->f32[{batch},{channels},{2 * side},{2 * side}{planes_last}]"
        return kernel_cost(from_text(text), MODEL).seconds

    assert seconds((128, 16, 14)) == pytest.approx(366e-6, rel=0.1)  # measured on an H200: 366 hot, 787 cold
    works = [
        kernel_work(from_text(f"aten::upsample_bilinear2d(f32[{n},16,14,14])->f32[{n},16,28,28]"), MODEL.chip)
        for n in (128, 256)
    ]
    assert works[1].seconds == pytest.approx(2 * works[0].seconds)
    last = seconds((128, 16, 14), "|3136,1,224,16")
    assert last < seconds((128, 16, 14)) / 10


@pytest.mark.parametrize(
    ("x", "weight", "more", "family"),
    [
        ("f16[16,128,28,28]", "f16[128,1,3,3]", "groups=128", "depthwise.first shared.half"),
        ("bf16[16,128,28,28]", "bf16[128,1,3,3]", "groups=128", "depthwise.first.half"),
        ("f16[16,16,28,28]", "f16[16,1,3,3]", "groups=16", "depthwise.first.half"),
        ("f16[16,128,1000]", "f16[128,1,3]", "groups=128", "depthwise.first shared.half"),
        ("f16[16,128,1000]", "f16[128,1,3]", "groups=128;stride=[2]", "depthwise.first.half"),
        ("f16[1,128,1000]", "f16[128,1,1]", "groups=128;stride=[2]", "depthwise.first.half"),
        ("f16[1,128,28]", "f16[128,1,1]", "groups=128;stride=[2]", "depthwise.first shared.half"),
        ("f16[1,128,1,1000]", "f16[128,1,3,3]", "groups=128;stride=[2, 2]", "depthwise.first shared.half"),
        ("f16[16,512,28,28]", "f16[512,1,3,3]", "groups=512;stride=[2, 2]", "depthwise.first shared.half"),
        ("f16[16,512,28,28]", "f16[512,1,3,3]", "groups=512;stride=[1, 2]", "depthwise.first.half"),
        ("f16[16,128,28,28|100352,1,3584,128]", "f16[128,1,3,3]", "groups=128", "depthwise.last many.half"),
        ("f16[16,128,28,28]", "f16[128,1,3,3]", "groups=128;dilation=[2, 2]", "depthwise.first dilated.half"),
        ("f16[16,128,28,28]", "f16[128,24,3,3]", "groups=4", "spatial.first padded.small.half"),
        ("f16[16,128,28,28]", "f16[128,32,3,3]", "groups=4", "spatial.first grouped.small.half"),
        ("f32[16,128,28,28]", "f32[128,128,7,7]", "groups=1", "spatial.first.wide.fp32"),
        ("f32[16,3,224,224]", "f32[128,3,16,16]", "groups=1;stride=[16, 16]", "few.first patches.fp32"),
        ("f16[16,64,8,28,28]", "f16[64,64,3,3,3]", "groups=1", "spatial.first volume.small.half"),
    ],
)
def test_families_are_of_the_kernels_that_run(x, weight, more, family):
    stride = "" if "stride" in more else "stride=[1, 1];"
    text = f"aten::convolution({x},{weight})->{x};{stride}{more}"
    assert kernel_work(from_text(text), CHIP).family == f"convolution.forward.{family}"


def test_the_first_layer_of_a_network_has_a_family_of_its_own_in_backward():
    """Batches need no gradient, so that one of two products is left out."""
    text = "aten::convolution_backward({0},{1},{2})->{1},{2};bias_sizes=[0];stride=[2, 2];groups=1;output_mask={3}"
    arrays = ("f16[16,64,112,112]", "f16[16,3,224,224]", "f16[64,3,7,7]")
    masks = ("[True, True, False]", "[False, True, False]")
    works = [kernel_work(from_text(text.format(*arrays, mask)), CHIP) for mask in masks]
    families = [work.family for work in works]
    assert families == ["convolution.backward.few.first.half", "convolution.backward.few.first stem.half"]
    assert works[0].flop == 2 * works[1].flop


def test_a_depthwise_gradient_has_a_block_for_each_number_of_the_weight():
    """A kernel of 7 x 7 has 49 blocks a channel, which share the multiprocessors; few blocks wait for their latency."""
    text = "aten::convolution_backward({0}*2,{1})->{0},{1};bias_sizes=[0];stride=[1, 1];groups={2};output_mask={3}"
    both, to_input = "[True, True, False]", "[True, False, False]"

    def weight_seconds(x: str, weight: str, groups: int) -> float:
        works = [kernel_work(from_text(text.format(x, weight, groups, mask)), CHIP) for mask in (both, to_input)]
        return works[0].seconds - works[1].seconds

    assert weight_seconds("f32[32,256,80,80]", "f32[256,1,7,7]", 256) == pytest.approx(4.2e-3, rel=0.05)
    assert weight_seconds("f32[32,16,80,80]", "f32[16,1,3,3]", 16) == pytest.approx(800 * 2e-7, rel=0.05)


def test_pytorchs_depthwise_kernel_adds_the_bias_itself():
    out, more = "bf16[24,512,32,32]", "stride=[1, 1];padding=[1, 1];groups=512"
    with_bias = conv(out, "bf16[512,1,3,3],bf16[512]", out, more)
    assert with_bias == conv(out, "bf16[512,1,3,3]", out, more)


def test_adding_a_bias_takes_as_long_in_16_bits_as_in_32():
    """It is bound by index arithmetic, not by its traffic."""

    def bias_seconds(dtype: str) -> float:
        out, weight = f"{dtype}[64,64,64,64]", f"{dtype}[64,64,3,3]"
        return conv(out, f"{weight},{dtype}[64]", out) - conv(out, weight, out)

    assert bias_seconds("bf16") > 0.9 * bias_seconds("f32")


def test_layer_norm_copies_rows_that_are_in_another_order():
    text = "aten::native_layer_norm({},f32[768]*2)->f32[40,197,768],f32[40,197,1]*2;normalized_shape=[768]"
    plain, other = (
        kernel_work(from_text(text.format(f"f32[40,197,768{strides}]")), CHIP) for strides in ("", "|768,30720,1")
    )
    assert other.beside > 2 * 4 * 40 * 197 * 768 / CHIP.bandwidth > plain.beside == 0
    assert (plain.launches, other.launches) == (1, 2)


def test_channels_last_depthwise_with_dilation_runs_the_general_kernel():
    text = "aten::convolution(f16[16,128,56,56|401408,1,7168,128],f16[128,1,3,3])->f16[16,128,56,56];groups=128;{}"
    plain, dilated = (kernel_work(from_text(text.format(f"dilation=[{d}, {d}]")), CHIP).seconds for d in (1, 2))
    assert dilated > 5 * plain


def test_channels_last_norms_share_the_work_of_few_channels():
    def seconds(channels: int, side: int, order: str = "") -> float:
        images = f"f32[32,{channels},{side},{side}{order}]"
        text = f"aten::cudnn_batch_norm({images},f32[{channels}]*4)->{images},f32[{channels}]*2,u8[0];training=True"
        return kernel_work(from_text(text), CHIP).seconds

    assert seconds(16, 112) > 3 * seconds(1024, 14)  # channels-first, 16 blocks for 132 multiprocessors
    assert seconds(16, 112, "|200704,1,1792,16") == seconds(1024, 14, "|200704,1,14336,1024")


def test_a_pooling_window_reads_no_more_than_the_image():
    """As transformers' EfficientNet has it: a window of 1280 x 1280 over 7 x 7 pixels."""
    text = "aten::avg_pool2d(f32[32,1280,7,7])->f32[32,1280,1,1];kernel_size=[{0}, {0}];ceil_mode=True"
    named, real = (kernel_work(from_text(text.format(side)), CHIP) for side in (1280, 7))
    assert named.seconds == real.seconds


def test_interpolation_to_the_same_size_is_a_copy():
    """As ViLT does with its positions: PyTorch copies, while another size goes through 768 planes one by one."""
    text = "aten::upsample_bilinear2d(f32[1,768,12,12])->f32[1,768,12,{0}];output_size=[12, {0}]"
    same, wider = (kernel_work(from_text(text.format(side)), CHIP).seconds for side in (12, 13))
    assert same < 5e-6 < 100e-6 < wider


def test_gradients_of_one_pixel_wait_for_each_other():
    def gradient(side: int) -> float:
        images, pooled = f"f32[10,256,{8 * side},{8 * side}]", f"f32[10,256,{side},{side}]"
        text = f"aten::upsample_bilinear2d_backward({images})->{pooled}"
        return kernel_work(from_text(text), CHIP).seconds / (10 * 256 * 64 * side**2)

    assert gradient(1) > 1.3 * gradient(2)


def test_gradients_of_overlapping_windows_of_volumes_wait_for_each_other():
    def gradient(window: int, padding: int) -> float:
        images = "bf16[8,256,8,28,28]"
        more = f"kernel_size=[{window}, {window}, {window}];stride=[1, 1, 1];padding=[{padding}, {padding}, {padding}]"
        text = f"aten::max_pool3d_with_indices_backward({images}*2,i64[8,256,8,28,28])->{images};{more}"
        return kernel_work(from_text(text), CHIP).seconds

    assert gradient(3, 1) > 5 * gradient(1, 0)


def test_gradients_of_interpolation_are_near_those_that_enlarge_as_much_with_the_same_corners() -> None:
    def features(side: int, aligned: bool) -> tuple[float, ...]:
        text = f"aten::upsample_bilinear2d_backward(f32[6,20,224,224])->f32[6,20,{side},{side}];align_corners={aligned}"
        return kernel_work(from_text(text), MODEL.chip).features

    plain, wider, aligned = features(7, False), features(14, False), features(7, True)
    assert [a - b for a, b in zip(plain, wider, strict=True)] == pytest.approx([0, 0, 2, 0], abs=0.01)
    assert [a - b for a, b in zip(aligned, plain, strict=True)] == pytest.approx([0, 0, 0, 2], abs=0.01)
