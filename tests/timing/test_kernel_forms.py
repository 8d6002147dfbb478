"""What bounds kernels that rearrange, pick, add up parts of rows, or multiply group by group."""

from __future__ import annotations

from dataclasses import replace

import pytest

from trainatomy.catalog.calibrations import from_text
from trainatomy.catalog.gpus import find_gpu
from trainatomy.catalog.machines import reference_host
from trainatomy.operators.cost import kernel_work
from trainatomy.operators.cost.convolution import launches_of_groups
from trainatomy.operators.cost.kernel import KernelWork, chip_of
from trainatomy.timing.cost_model import CostModel, cost_model_of, kernel_cost
from trainatomy.timing.host_costs import cpu_costs
from trainatomy.timing.launch import seconds_within, waits_first

H200 = cost_model_of(find_gpu("h200"))


def test_columns_of_a_table_are_no_rows():
    """Measured in a LayoutLMv3: three such calls take 224 µs."""
    text = "aten::index(f32[64,12{}],i64[6,497,497])->f32[6,497,497,12]"
    rows, columns = (kernel_work(from_text(text.format(strides)), H200.chip) for strides in ("", "|1,64"))
    assert (rows.family, columns.family) == ("table.index.rows", "table.index.numbers")
    assert kernel_cost(from_text(text.format("|1,64")), H200).seconds < 150e-6 < rows.seconds


def test_depthwise_filters_along_reordered_sequences_are_pytorchs_own():
    text = "aten::convolution(f32[24,768,256{}],f32[768,1,9])->f32[24,768,256];padding=[4];groups=768"
    plain, reordered = (kernel_work(from_text(text.format(strides)), H200.chip) for strides in ("", "|196608,1,768"))
    assert plain.family == reordered.family == "convolution.forward.depthwise.first.fp32"
    assert plain.seconds == reordered.seconds  # measured: 61 µs
    assert plain.beside == 0.0 < reordered.beside < plain.seconds  # the copy


def test_fused_optimizers_take_as_long_as_their_longest_chunk():
    def seconds(tensors: int, size: int) -> float:
        lists = ",".join(f"f32[{size}]!*{tensors}" for _ in range(4))
        return kernel_cost(
            from_text(f"aten::_fused_adamw_({lists},f32[]*{tensors})->#{(f'{tensors},' * 5)[:-1]}"), H200
        ).seconds

    assert 25e-6 < seconds(1, 65536) < 45e-6  # measured in small networks: 34 µs
    assert seconds(20, 65536) < 1.4 * seconds(1, 65536)
    assert seconds(1, 4096) < 0.3 * seconds(1, 65536)


def test_parts_of_rows_are_added_up_by_few_threads():
    apart = kernel_work(from_text("aten::sum(bf16[32,2,128,96])->bf16[1,2,128,1];dim=[0, 3];keepdim=True"), H200.chip)
    assert apart.family == "parts.reduction.16"
    assert apart.seconds == pytest.approx(14.9e-6, rel=0.01)  # 96 numbers of each thread, 1.3e-7 s each; measured: 14.6
    # rows that lie beside each other are one, whatever dimensions they have
    whole = kernel_work(from_text("aten::sum(bf16[256,32,96])->bf16[256,1,1];dim=[1, 2];keepdim=True"), H200.chip)
    assert whole.family == "reduction.rows.16"
    split, joined = (
        kernel_work(from_text(f"aten::sum({source})->{result};dim=[0]"), H200.chip).seconds
        for source, result in (("f32[768,8,197]", "f32[8,197]"), ("f32[768,1576]", "f32[1576]"))
    )
    assert split == joined


def test_sums_of_truth_values_convert_them_first():
    work = kernel_work(from_text("aten::sum(b8[3072,32,24])->i64[32,24];dim=[0]"), H200.chip)
    assert work.launches == 2 and work.bytes > 16 * 3072 * 32 * 24


def test_rows_are_picked_whole_and_numbers_one_by_one():
    def picked(text: str) -> KernelWork:
        return kernel_work(from_text(text), H200.chip)

    rows = picked("aten::index(f32[961,12],i64[65536])->f32[65536,12];indices=*")
    assert rows.family == "table.index.rows" and rows.seconds == pytest.approx(41e-6, rel=0.03)  # measured: 40.7
    assert picked("aten::index(f32[225,3],i64[4096])->f32[4096,3];indices=*").family == "table.index.numbers"
    pairs = picked("aten::index(f32[4168,31,31],i64[465],i64[465])->f32[4168,465];indices=None, *, *")
    assert pairs.family == "table.index.numbers" and pairs.seconds == pytest.approx(14.7e-6, rel=0.05)  # measured: 14.7
    unnamed = picked("aten::index(f32[4168,31,31],i64[465],i64[465])->f32[4168,465]")  # known from the shapes
    assert unnamed.seconds == pairs.seconds


def test_a_mask_is_the_rows_that_it_picks():
    def added(indices: str) -> KernelWork:
        text = f"aten::index_put_(f32[8,31,64]!,{indices},f32[192,64])->f32[8,31,64];accumulate=True"
        return kernel_work(from_text(text), H200.chip)

    assert added("b8[8,31]").seconds == added("i64[192],i64[192]").seconds > 0


def test_numbers_are_replaced_in_a_copy():
    text = "aten::masked_fill(f32[64,1024,1024],b8[64,1024,1024])->f32[64,1024,1024];value=0"
    apart = kernel_work(from_text(text), H200.chip)
    place = text.replace("masked_fill(f32[64,1024,1024]", "masked_fill_(f32[64,1024,1024]!")
    within = kernel_work(from_text(place), H200.chip)
    assert (apart.launches, within.launches) == (2, 1)
    assert apart.bytes - within.bytes == 2 * 4 * 64 * 1024 * 1024


def test_rolling_takes_a_kernel_for_each_dimension():
    once, twice = (
        kernel_work(from_text(f"aten::roll(f32[16,14,14,384])->f32[16,14,14,384];{dims}"), H200.chip)
        for dims in ("shifts=[3];dims=[1]", "shifts=[3, 3];dims=[1, 2]")
    )
    assert (once.launches, twice.launches) == (1, 2) and twice.seconds == 2 * once.seconds
    halves, wide = (
        kernel_work(from_text(f"aten::triu({kind}[512,512,512])->{kind}[512,512,512]"), H200.chip).seconds
        for kind in ("bf16", "f32")
    )
    assert wide == pytest.approx(2 * halves, rel=0.02)  # a thread for each 4 bytes


def test_operands_that_a_warp_reads_in_whole_sectors_are_not_transposed():
    near = "aten::clone(bf16[12,196,24,197,2|931416,4728,197,1,4728])->bf16[12,196,24,197,2]"
    far = "aten::clone(bf16[12,196,24,197,64|59610624,4728,197,1,4728])->bf16[12,196,24,197,64]"
    assert kernel_work(from_text(near), H200.chip).family.startswith("traffic.rows")
    assert kernel_work(from_text(far), H200.chip).family.startswith("traffic.transposed")


def test_experts_products_are_one_kernel_in_bf16_alone():
    def grouped(kind: str, gpu: str = "h200") -> KernelWork:
        text = f"aten::_grouped_mm({kind}[2872,2048],{kind}[32,2048,512],i32[32])->{kind}[2872,512]"
        return kernel_work(from_text(text), chip_of(find_gpu(gpu), None))

    assert grouped("bf16").launches == 2 and grouped("bf16").family == "grouped.kernel.nn"
    assert grouped("f32").launches == grouped("f16").launches == 33
    assert grouped("bf16", "a100-80gb").launches == 33
    one = kernel_work(from_text("aten::mm(f32[90,2048],f32[2048,512])->f32[90,512]"), H200.chip)
    assert grouped("f32").seconds == pytest.approx(32 * one.seconds)
    weights = "aten::_grouped_mm(bf16[2048,1024|1,2048],bf16[1024,512])->bf16[8,2048,512]"
    assert kernel_work(from_text(weights), H200.chip).flop == 2 * 8 * 2048 * 128 * 512  # groups known from the result


def test_sequences_are_made_contiguous_and_strided_groups_take_slow_kernels():
    text = "{name}->f32[8,768,250];stride=[2];padding=[64];dilation=[1];transposed=False;output_padding=[0];groups=16"
    x = "f32[8,768,499|383232,1,768]"
    forward = from_text(text.format(name=f"aten::convolution({x},f32[768,48,128])"))
    assert kernel_work(forward, H200.chip).family == "convolution.forward.spatial.first padded.group.tf32"

    def backward(images: int, kind: str = "f32") -> KernelWork:
        shapes = f"{kind}[{images},768,250],{kind}[{images},768,499|383232,1,768],{kind}[768,48,128]"
        results = f"{kind}[{images},768,499],{kind}[768,48,128]"
        numbers = "bias_sizes=[0];stride=[2];padding=[64];dilation=[1];transposed=False;output_padding=[0];groups=16"
        text = f"aten::convolution_backward({shapes})->{results};{numbers};output_mask=[True, True, False]"
        return kernel_work(from_text(text), H200.chip)

    assert backward(8).family == "strided groups.direct"
    assert backward(5).seconds == pytest.approx(15.54e-3, rel=0.05)  # measured in a training of SEW
    assert backward(2).family == "strided groups.direct"
    assert backward(12).family.endswith("group.tf32") and backward(8, "bf16").family.endswith("group.half")


def test_kernels_of_groups_are_launched_one_by_one():
    text = "aten::convolution_backward(f16[12,768,256],f16[12,768,256],f16[768,192,1])->f16[12,768,256],f16[768,192,1]"
    numbers = "bias_sizes=[0];stride=[1];padding=[0];dilation=[1];transposed=False;output_padding=[0]"
    mask = "output_mask=[True, True, False]"
    grouped, dense = (from_text(f"{text};{numbers};groups={groups};{mask}") for groups in (4, 1))
    assert launches_of_groups(grouped) == 32 and launches_of_groups(dense) == 0
    costs = cpu_costs(reference_host().microseconds)
    assert seconds_within(grouped, costs) == pytest.approx(32 * costs.inner_kernel)
    assert seconds_within(dense, costs) == 0


def test_the_cpu_reads_the_sizes_of_experts_groups_where_each_is_a_product():
    texts = [f"aten::_grouped_mm({k}[2872,2048],{k}[32,2048,512],i32[32])->{k}[2872,512]" for k in ("f32", "bf16")]
    looped, kernel = (from_text(text) for text in texts)
    costs = cpu_costs(reference_host().microseconds)
    assert waits_first(looped) and not waits_first(kernel)
    each = costs.plain["matmul"] + 4 * costs.plain["view"]
    assert seconds_within(looped, costs) == pytest.approx(32 * each) and seconds_within(kernel, costs) == 0


@pytest.mark.parametrize(
    ("shape", "backward", "measured"),
    [
        ("32,2048,7,7", False, 62.7e-6), ("32,2048,7,7", True, 26.2e-6), ("128,1024,14,14", False, 156.6e-6),
        ("32,512,28,28", True, 79.8e-6), ("128,192,40,40", False, 345e-6), ("16,1024,14,14", True, 21.6e-6),
        ("8,160,16,32,32", True, 253.5e-6), ("128,1024,32,32", False, 576.9e-6), ("64,16,16,40,40", True, 2756e-6),
    ],
)  # fmt: skip
def test_a_block_walks_over_each_channel_of_a_batch_norm_in_bfloat16(
    shape: str, backward: bool, measured: float
) -> None:
    """Points of an H200, before interpolation; the form of cuDNN's kernels was 0.33 to 1.4 times as long."""
    channels = shape.split(",")[1]
    if backward:
        text = f"bf16[{shape}]*2,f32[{channels}]*5)->bf16[{shape}],f32[{channels}]*2;train=True"
        call = f"aten::native_batch_norm_backward({text};output_mask=[True, True, True]"
    else:
        call = (
            f"aten::native_batch_norm(bf16[{shape}],f32[{channels}]*4)->bf16[{shape}],f32[{channels}]*2;training=True"
        )
    work = kernel_work(from_text(call), H200.chip)
    assert work.family.endswith(".own.16.first")
    assert work.seconds == pytest.approx(measured, rel=0.2)


def test_no_product_is_faster_than_the_fastest_of_the_calibration(monkeypatch: pytest.MonkeyPatch) -> None:
    call = from_text("aten::mm(bf16[16384,8192],bf16[8192,8192|1,8192])->bf16[16384,8192]")
    work, other = kernel_work(call, H200.chip), cost_model_of(find_gpu("a100-sxm-80gb"))
    assert kernel_cost(call, H200).seconds > 1.01 * H200.least_seconds(work) > 0
    assert not other.least_seconds(work)  # which may reach another share of its peak
    monkeypatch.setattr(CostModel, "efficiency", lambda *_: 0.5)
    fast = kernel_cost(call, replace(H200, cache={})).seconds
    assert fast == H200.least_seconds(work) and 800e12 < work.flop / fast < 900e12


@pytest.mark.parametrize(
    ("shape", "backward", "measured"),
    [
        ("8,384,64,64", True, 37.8e-6), ("7,1024,32,32", True, 23.5e-6), ("249,576,14,14", False, 58.9e-6),
        ("24,192,28,28", False, 8.8e-6), ("24,192,28,28", True, 9.7e-6),
    ],
)  # fmt: skip
def test_cudnn_reads_pairs_of_numbers_in_float16(shape: str, backward: bool, measured: float) -> None:
    """Calls of an H200, before interpolation; with an odd number of pixels the kernels are others, and slower."""
    channels = shape.split(",")[1]
    if backward:
        text = f"f16[{shape}]*2,f32[{channels}]*5)->f16[{shape}],f32[{channels}]*2;train=True"
        call = f"aten::native_batch_norm_backward({text};output_mask=[True, True, True]"
    else:
        call = f"aten::native_batch_norm(f16[{shape}],f32[{channels}]*4)->f16[{shape}],f32[{channels}]*2;training=True"
    work = kernel_work(from_text(call), H200.chip)
    assert work.family.endswith(".16.first pairs") and work.seconds == pytest.approx(measured, rel=0.31)


def test_odd_images_and_long_channels_are_not_read_by_pairs() -> None:
    def family(shape: str) -> str:
        call = f"aten::native_batch_norm(f16[{shape}],f32[64]*4)->f16[{shape}],f32[64]*2;training=True"
        return kernel_work(from_text(call), H200.chip).family

    assert [family(shape).endswith("pairs") for shape in ("8,64,28,28", "8,64,29,29", "512,64,28,28")] == [1, 0, 0]


def test_sequences_in_another_order_are_copied_number_by_number_before_a_convolution() -> None:
    """Backward copies the gradient too: a Data2Vec of 9 sequences copies 876 million numbers in 6.2 ms on an H200."""
    forward = "aten::convolution(f16[9,512,31999{}],f16[512,512,3])->f16[9,512,15999];stride=[2]"
    given = "f16[9,512,15999{}],f16[9,512,31999{}],f16[512,512,3]"
    backward = f"aten::convolution_backward({given})->f16[9,512,31999],f16[512,512,3];stride=[2]"

    def copying(text: str, *orders: str) -> float:
        ordered, plain = (kernel_cost(from_text(text.format(*each)), H200) for each in (orders, [""] * len(orders)))
        return ordered.seconds - plain.seconds

    x, out = (f"|{512 * length},1,512" for length in (31999, 15999))
    of_a_number = 6.2e-3 / 876e6
    assert copying(forward, x) == pytest.approx(9 * 512 * 31999 * of_a_number, rel=0.15)
    assert copying(backward, out, x) == pytest.approx(9 * 512 * (31999 + 15999) * of_a_number, rel=0.15)


def test_odd_channels_are_padded_where_images_and_sequences_change_to_channels_last() -> None:
    def seconds(channels: int, more: str = "", places: str = "751", filters: str = "5", padding: str = "[2]") -> float:
        x, weight = f"f32[75,{channels},{places}]", f"f32[{channels},{channels},{filters}]"
        text = f"aten::convolution({x},{weight})->{x};padding={padding}{more}"
        return kernel_work(from_text(text), H200.chip).seconds

    assert seconds(174) == pytest.approx(seconds(176), rel=0.05)
    assert seconds(174, places="24,24", filters="3,3", padding="[1, 1]") == pytest.approx(
        seconds(176, places="24,24", filters="3,3", padding="[1, 1]"), rel=0.05
    )
    dilated = ";dilation=[2]"
    assert seconds(174, dilated, padding="[4]") > 1.3 * seconds(176, dilated, padding="[4]")
    volume = {"places": "8,8,8", "filters": "3,3,3", "padding": "[1, 1, 1]"}
    assert seconds(174, **volume) > 1.3 * seconds(176, **volume)


def test_only_the_first_blocks_of_a_batch_norm_wait_for_the_kernel_to_start() -> None:
    """Instance norms of a random network on an H100: 20 such calls and more take 6.7 ms forward."""
    many = kernel_work(
        from_text(
            "aten::native_batch_norm(bf16[1,62272,9,9],f32[62272],f32[62272],f32[62272],f32[62272])"
            "->bf16[1,62272,9,9],f32[62272],f32[62272];training=True"
        ),
        H200.chip,
    )
    rounds = 62272 / (132 * 4)
    assert many.seconds < rounds * 3.6e-6  # with the start of the kernel in each round: 4.8e-6


@pytest.mark.parametrize(
    ("text", "family", "microseconds"),
    [
        ("aten::_cdist_forward(f32[700,4],f32[49,4])->f32[700,49];p=1.0", "pairs._cdist_forward", 47.1),
        ("aten::_cdist_forward(f32[1500,4],f32[35,4])->f32[1500,35];p=1.0", "pairs._cdist_forward", 71.3),
        ("aten::embedding(f32[32,6],i64[400,400])->f32[400,400,6]", "table.embedding_by_number", 5.4),
        ("aten::embedding(f32[12425,10],i64[3072])->f32[3072,10]", "table.embedding_by_number", 6.5),
        ("aten::where(b8[1,1,64,64],f32[1,6,64,64],f32[])->f32[1,6,64,64]", "traffic.broadcast.32.where", 2.3),
    ],
)
def test_pairs_and_rows_that_are_picked_by_number_have_prices_of_their_own(
    text: str, family: str, microseconds: float
) -> None:
    """Calls of trainings on an H200: distances had been in the family of the others, which took 20 times as long."""
    assert kernel_work(from_text(text), H200.chip).family == family
    assert kernel_cost(from_text(text), H200).seconds == pytest.approx(microseconds * 1e-6, rel=0.5)


def test_gathered_convolutions_in_16_bits_run_on_tensor_cores_where_there_are_any():
    """Volta and Turing lack TF32, but not tensor cores: the gradient of a filter of few channels is no fp32 work there.

    With it, ResNeXt-101's training was predicted 91 % too slow on a V100 (DeepLearningExamples: 587 images a second).
    """
    text = (
        "aten::convolution_backward(f16[128,128,56,56|401408,1,7168,128],f16[128,128,56,56|401408,1,7168,128],"
        "f16[128,4,3,3|36,1,12,4])->f16[128,128,56,56|401408,1,7168,128],f16[128,4,3,3|36,1,12,4];"
        "bias_sizes=[0],stride=[1, 1],padding=[1, 1],dilation=[1, 1],transposed=False,output_padding=[0, 0],groups=32,"
        "output_mask=[True, True, False]"
    )
    volta, ampere = (find_gpu(name) for name in ("v100-16gb", "a100-80gb"))
    works = [kernel_work(from_text(text), chip_of(gpu, None)) for gpu in (volta, ampere)]
    assert works[0].family == works[1].family
    assert 1.5 < works[0].seconds / works[1].seconds < ampere.rates["fp16"] / volta.rates["fp16"] * 1.2
    pascal = chip_of(find_gpu("gtx-1080-ti"), None)
    assert pascal.half_of_16_bits == pascal.rate("fp32")
