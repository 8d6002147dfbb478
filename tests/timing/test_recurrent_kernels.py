"""Recurrent layers of cuDNN: their kernels and what they take."""

from __future__ import annotations

import pytest

from trainatomy.catalog.calibrations import from_text
from trainatomy.catalog.gpus import find_gpu
from trainatomy.operators.cost.kernel import Chip
from trainatomy.operators.cost.recurrence import recurrence
from trainatomy.operators.cost.recurrent import (
    RecurrentProduct,
    _bias_seconds,
    _kernels_at_once,
    recurrent_product_seconds,
)
from trainatomy.results.operations import Call
from trainatomy.timing.cost_model import KernelWork, cost_model_of, kernel_cost, kernel_work

H200 = cost_model_of(find_gpu("h200"))


def test_recurrent_layers_run_their_steps_in_sequence():
    weights = "f32[2048,256],f32[2048,512],f32[2048]*2"

    def layer(steps: int, batch: int, directions: int = 1) -> KernelWork:
        states = f"f32[{directions},{batch},512]*2"
        inputs = ",".join([f"f32[{steps},{batch},256]", states, *[weights] * directions])
        outputs = f"f32[{steps},{batch},{512 * directions}],{states}"
        call = f"aten::_cudnn_rnn({inputs})->{outputs};mode=LSTM;bidirectional={directions == 2}"
        return kernel_work(from_text(call), H200.chip)

    one = layer(50, 8)
    assert one.flop == 2 * 50 * 8 * 2048 * (256 + 512)
    assert layer(100, 8).seconds == pytest.approx(2 * one.seconds, rel=0.1)
    assert layer(50, 16).seconds < 1.2 * one.seconds
    both = layer(50, 8, directions=2)
    assert both.seconds == pytest.approx(2 * one.seconds, rel=0.05) and both.seconds / both.at_once < 1.6 * one.seconds


def _lstm(hidden: int, layers: int = 1, steps: int = 70, batch: int = 80, chip: Chip = H200.chip) -> KernelWork:
    weights = ",".join([f"f32[{4 * hidden},{hidden}]*2,f32[{4 * hidden}]*2"] * layers)
    states = f"f32[{layers},{batch},{hidden}]*2"
    inputs, outputs = f"f32[{steps},{batch},{hidden}],{states},{weights}", f"f32[{steps},{batch},{hidden}],{states}"
    return kernel_work(from_text(f"aten::_cudnn_rnn({inputs})->{outputs};mode=LSTM"), chip)


def test_rows_of_lstms_that_are_not_aligned_take_slower_kernels():
    assert _lstm(650).launches == _lstm(648).launches
    assert _lstm(650).seconds > 1.2 * _lstm(648).seconds


def test_layers_of_one_direction_multiply_their_inputs_in_parts():
    """An LSTM of 3 layers of 1500, 70 steps of 128 samples, ran 18 products of inputs in each layer on an H200."""
    step_kernels, others = 3 * 70 * 2, 3 * 3
    assert _lstm(1500, layers=3, batch=128).launches == step_kernels + others + 3 * 17
    assert _lstm(1500, layers=1, batch=128).launches == 70 * 2 + 3


def test_layers_whose_kernels_outlast_their_launches_run_at_once_and_slow_each_other():
    """An LSTM of 4 layers of 896, 96 samples, took 1.9 times as long behind other work as where few kernels ran."""
    wide, narrow = _lstm(1200, layers=3, steps=200), _lstm(256, layers=3, steps=200, batch=8)
    assert 1.3 < wide.seconds / (3 * _lstm(1200, steps=200).seconds) < 1.95
    assert narrow.seconds == pytest.approx(3 * _lstm(256, steps=200, batch=8).seconds, rel=0.05)
    assert wide.at_once > 1.5 and _lstm(1200).at_once == 1
    slow_host = H200.chip._replace(host_pace=4.0)
    assert _lstm(1200, layers=3, steps=200, chip=slow_host).seconds < 0.9 * wide.seconds
    assert _lstm(1200, steps=200, chip=slow_host).seconds == _lstm(1200, steps=200).seconds


def test_gradients_of_biases_take_longer_where_the_rows_are_no_longer_in_the_cache():
    """A GRU of 1,150, 2,240 rows: 55 µs on an H200; 5,600 rows: 180 µs."""
    few, many = (
        _bias_seconds(H200.chip, recurrence(recurrent_call("GRU", "f16", 1150, steps=70, batch=batch, back=True), ""))
        for batch in (32, 80)
    )
    assert few == pytest.approx(55e-6, rel=0.25) and many == pytest.approx(180e-6, rel=0.15)


def recurrent_call(
    mode: str, dtype: str, hidden: int, *, steps: int = 20, batch: int = 16, back: bool = False, layers: int = 1
) -> Call:
    """Return the call of layers with as many inputs as hidden numbers, forward or backward."""
    gates = hidden * {"LSTM": 4, "GRU": 3, "RNN": 1}[mode]
    states = f"{dtype}[{layers},{batch},{hidden}]" + ("*2" if mode == "LSTM" else "")
    data, weights = f"{dtype}[{steps},{batch},{hidden}]", f"{dtype}[{gates},{hidden}]*2,{dtype}[{gates}]*2"
    weights = ",".join([weights] * layers)
    given = f"{data},{data},{states},{weights}" if back else f"{data},{states},{weights}"
    name = "aten::_cudnn_rnn_backward" if back else "aten::_cudnn_rnn"
    return from_text(f"{name}({given})->{data},{states};mode={mode};num_layers={layers};bidirectional=False")


@pytest.mark.parametrize(
    ("kind", "batch", "steps", "parts"),
    [("LSTM", 32, 50, 5), ("LSTM", 64, 50, 7), ("GRU", 65, 42, 11), ("LSTM", 60, 17, 3), ("RNN", 75, 40, 8)],
)
def test_inputs_of_stacked_layers_are_multiplied_in_parts(kind: str, batch: int, steps: int, parts: int):
    """The numbers of products in ``lab/timing/records/recurrent-wide-h200.jsonl.gz``."""
    gates = {"LSTM": 4, "GRU": 3, "RNN": 1}[kind] * 512
    weights = f"f32[{gates},512]*2,f32[{gates}]*2"
    states = ",".join([f"f32[2,{batch},512]"] * (2 if kind == "LSTM" else 1))
    inputs = f"f32[{steps},{batch},512],{states},{weights},{weights}"
    call = f"aten::_cudnn_rnn({inputs})->f32[{steps},{batch},512],{states};mode={kind};num_layers=2;bidirectional=False"
    of_each_layer = 3 + (3 if kind == "RNN" else 2) * steps  # besides the products of the other parts
    assert kernel_work(from_text(call), H200.chip).launches == 2 * (of_each_layer + parts - 1)


@pytest.mark.parametrize(("hidden", "batch", "kernels"), [(256, 80, 2), (512, 32, 3), (896, 79, 3), (1216, 108, 2)])
def test_products_of_time_steps_split_their_depth_in_tf32(hidden: int, batch: int, kernels: int):
    """Kernels of a time step in backward on an H200 (the first: of a training there)."""
    steps, of_layer = 50, 6
    work = kernel_work(recurrent_call("LSTM", "f32", hidden, steps=steps, batch=batch, back=True), H200.chip)
    assert work.launches == kernels * steps + of_layer


@pytest.mark.parametrize(
    ("mode", "dtype", "hidden", "batch", "back", "kernels"),
    [
        ("GRU", "f16", 832, 96, True, 2),
        ("GRU", "f16", 872, 71, True, 3),
        ("LSTM", "bf16", 624, 156, True, 2),
        ("LSTM", "bf16", 672, 42, True, 3),
        ("LSTM", "f16", 1280, 48, False, 2),
        ("RNN", "f16", 1520, 65, True, 2),
        ("RNN", "f16", 804, 24, True, 3),
        ("RNN", "f16", 716, 60, True, 2),
        ("RNN", "f32", 520, 72, False, 3),
        ("RNN", "f32", 904, 72, False, 2),
        ("RNN", "f32", 534, 72, True, 2),
        ("GRU", "f32", 504, 24, False, 3),
        ("GRU", "f32", 730, 36, False, 3),
        ("GRU", "f32", 360, 60, True, 2),
        ("LSTM", "f32", 404, 72, True, 3),
        ("LSTM", "f32", 1086, 24, False, 2),
        ("RNN", "f32", 1132, 48, False, 3),
        ("RNN", "f32", 1160, 141, False, 2),
        ("RNN", "f16", 1116, 24, False, 3),
        ("RNN", "f16", 1164, 91, False, 2),
        ("LSTM", "f32", 1190, 94, False, 3),
    ],
)
def test_deep_products_of_time_steps_split_their_depth(
    mode: str, dtype: str, hidden: int, batch: int, *, back: bool, kernels: int
):
    """Kernels of a time step as measured on an H200."""
    few, many = (
        kernel_work(recurrent_call(mode, dtype, hidden, steps=steps, batch=batch, back=back), H200.chip).launches
        for steps in (40, 60)
    )
    assert many - few == 20 * kernels


def test_the_gradient_of_recurrent_weights_does_not_depend_on_the_alignment_of_samples():
    def seconds(batch: int) -> float:
        data, states = f"f16[35,{batch},512]", f"f16[1,{batch},512]"
        inputs = f"{data}*2,{states}*2,f16[2048,512]*2,f16[2048]*2"
        call = f"aten::_cudnn_rnn_backward({inputs})->{data},{states}*2;mode=LSTM;num_layers=1;bidirectional=False"
        return kernel_work(from_text(call), H200.chip).seconds

    assert seconds(33) == pytest.approx(seconds(32), rel=0.05)  # 1,155 and 1,120 samples of all time steps


def test_narrow_recurrent_layers_are_one_kernel_as_pytorch_asks():
    # get_algo in RNN.cpp: LSTMs up to 192 in forward, 128 in backward; an H200 ran no such kernel in bf16
    def family(hidden: int, dtype: str = "f32", *, back: bool = False) -> str:
        return kernel_work(recurrent_call("LSTM", dtype, hidden, back=back), H200.chip).family

    assert family(192) == "recurrent.fused.forward"
    assert family(200) == "recurrent.forward"
    assert family(128, back=True) == "recurrent.fused.backward"
    assert family(192, back=True) == "recurrent.backward"
    assert family(64, "bf16") == "recurrent.forward"


def test_a_fused_layer_takes_the_time_that_was_measured():
    # an H200 took 119 us for the kernel of 51 steps of an LSTM with 128 hidden numbers, and 5 us for the rest
    found = kernel_work(recurrent_call("LSTM", "f32", 128, steps=51, batch=4), H200.chip)
    assert found.seconds == pytest.approx(124e-6, rel=0.15)
    assert found.launches < 51


@pytest.mark.parametrize(
    ("hidden", "dtype", "steps", "batch", "microseconds"),
    [(264, "f32", 120, 50, 872), (384, "f32", 120, 48, 1797), (324, "f16", 27, 5, 246)],
)
def test_weights_that_exceed_the_registers_are_read_again(
    hidden: int, dtype: str, steps: int, batch: int, microseconds: float
):
    """Kernels of plain layers on an H200; that of 384 takes 2,427 us on an H100, whose memory is slower."""
    call = recurrent_call("RNN", dtype, hidden, steps=steps, batch=batch)
    found = kernel_work(call, H200.chip)
    assert found.family == "recurrent.fused.forward"
    assert found.seconds == pytest.approx(microseconds * 1e-6, rel=0.2)
    if hidden == 384:
        slower = kernel_work(call, H200.chip._replace(bandwidth=H200.chip.bandwidth * 3.35 / 4.8))
        assert slower.seconds == pytest.approx(2427e-6, rel=0.2)


def test_a_time_step_takes_longer_where_rows_are_not_aligned():
    even, uneven = (kernel_work(recurrent_call("LSTM", "f16", hidden), H200.chip).seconds for hidden in (592, 588))
    assert uneven > 1.3 * even


def test_each_kernel_of_a_time_step_is_launched():
    few, many = (kernel_work(recurrent_call("GRU", "f16", 512, steps=steps), H200.chip).launches for steps in (10, 30))
    assert many - few == 2 * 20


@pytest.mark.parametrize(("at_a_time", "microseconds"), [(1.0, 9.67), (1.79, 14.51)])
def test_products_of_time_steps_are_near_those_measured_beside_as_many(at_a_time: float, microseconds: float):
    """A plain layer of 1,206, 41 samples: alone, and behind other work, beside which another layer's ran."""
    step = RecurrentProduct("half_misaligned", "backward", 41, 1206, 1206)
    found = recurrent_product_seconds(step, at_a_time, H200.chip.multiprocessors)
    assert found == pytest.approx(microseconds * 1e-6, rel=0.07)


@pytest.mark.parametrize(("kind", "bytes_each"), [("half", 2), ("tf32", 4)])
def test_products_take_longer_where_rows_begin_within_lines_of_the_cache(kind: str, bytes_each: int):
    """Aligned products of 16 bits took 10 % longer on both GPUs where rows are aligned to 16 bytes, not to 128."""

    def seconds(hidden: int) -> float:
        step = RecurrentProduct(kind, "forward", 48, 4 * hidden, hidden)
        return recurrent_product_seconds(step, 1.0, H200.chip.multiprocessors) / hidden

    whole = 768
    assert seconds(whole - 16 // bytes_each) > 1.04 * seconds(whole)


def test_layers_run_alone_where_the_host_launches_more_slowly_than_they_compute():
    """An LSTM of 4 layers of 1,216: a product took 8 us beside a host of pace 1.9, and 13 us behind other work."""
    paces = [H200.chip._replace(host_pace=pace) for pace in (0.1, 1.9, 4.0)]
    queued, usual, slow = (_lstm(1216, layers=4, steps=120, batch=36, chip=chip) for chip in paces)
    assert usual.seconds == pytest.approx(slow.seconds, rel=0.03)
    assert queued.seconds > 1.4 * usual.seconds


def test_products_of_a_stacks_inputs_delay_its_steps_too():
    """Two LSTMs of 650 in fp32, 60 samples: a step took 34 us, its inputs 12 us, its launch 27 us, and 2 kernels ran.

    Beside a host that launches more slowly than a step takes with its gates, but not than it takes with its inputs.
    """
    stack = {"steps": 70, "batch": 60, "back": True}
    alone, stacked = (
        _kernels_at_once(
            H200.chip._replace(host_pace=1.8),
            recurrence(recurrent_call("LSTM", "f32", 650, layers=layers, **stack), "tf32"),
        )
        for layers in (1, 2)
    )
    assert alone.steps == 1 and stacked.steps > 1.3


@pytest.mark.parametrize(
    ("kind", "dtype", "hidden", "layers", "batch", "back", "kernels"),
    [
        ("LSTM", "f32", 650, 2, 53, True, 1.93),
        ("LSTM", "f16", 650, 2, 53, False, 1.69),
        ("GRU", "f16", 768, 3, 53, False, 1.71),
        ("GRU", "f16", 768, 3, 80, True, 1.89),
    ],
)
def test_layers_of_a_stack_overlap_with_products_of_inputs(
    kind: str, dtype: str, hidden: int, layers: int, batch: int, *, back: bool, kernels: float
):
    """How many kernels ran beside a product of a time step, itself included, behind other work on an H200."""
    call = recurrent_call(kind, dtype, hidden, layers=layers, steps=70, batch=batch, back=back)
    queued = _kernels_at_once(H200.chip._replace(host_pace=1e-3), recurrence(call, "tf32"))
    assert queued.steps == pytest.approx(queued.queued) == pytest.approx(kernels, abs=0.25)


def test_deeper_stacks_need_more_work_to_overlap():
    """Of two LSTMs of 768 one runs beside the other at pace 1.2 for more of the time than of four."""
    shares = []
    for layers in (2, 4):
        call = recurrent_call("LSTM", "f32", 768, layers=layers, steps=70, batch=80, back=True)
        at_once = _kernels_at_once(H200.chip._replace(host_pace=1.2), recurrence(call, "tf32"))
        shares.append((at_once.steps - 1) / (at_once.queued - 1))
    assert 0.05 < shares[1] < 0.9 * shares[0] < 0.9


def test_the_gradient_of_inputs_is_computed_for_a_few_steps_at_a_time():
    """In 450 recorded passes: 8, 4 or 2 steps by the batch; 35 parts were not too many, 50 and 60 were."""
    found = [
        recurrence(
            recurrent_call("LSTM", "f16", 512, steps=steps, batch=batch, back=True, layers=2), ""
        ).steps_at_a_time
        for steps, batch in ((48, 16), (120, 36), (48, 101), (70, 120), (200, 50), (120, 101))
    ]
    assert found == [8, 4, 2, 2, 8, 4]


def test_dropout_between_layers_draws_a_mask_and_applies_it_to_each_part():
    """An LSTM of 3 layers of 1,000, 80 samples, 50 steps: 28 kernels in either pass, 95 and 113 us."""

    def work(dropout: str, *, back: bool) -> KernelWork:
        call = recurrent_call("LSTM", "f16", 1000, steps=50, batch=80, back=back, layers=3)
        return kernel_work(call._replace(numbers=(*call.numbers, ("dropout", dropout))), H200.chip)

    for back, kernels, microseconds in ((False, 28, 95), (True, 28, 113)):
        without, dropped = work("0.0", back=back), work("0.5", back=back)
        assert dropped.launches - without.launches == kernels
        assert dropped.seconds - without.seconds == pytest.approx(microseconds * 1e-6, rel=0.25)


@pytest.mark.parametrize("gpu_id", ["h200", "rtx-3090"])
@pytest.mark.parametrize("hidden", [20, 705, 1266])
def test_tf32_makes_no_recurrent_layer_slower(gpu_id: str, hidden: int):
    call = recurrent_call("LSTM", "f32", hidden, steps=24, batch=44)
    without, with_tf32 = (
        kernel_cost(call, cost_model_of(find_gpu(gpu_id), tf32=tf32)).seconds for tf32 in (False, None)
    )
    assert with_tf32 <= without
