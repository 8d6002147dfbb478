"""Recurrent layers of two directions, which run beside each other, and weights that do not stay in the cache."""

from __future__ import annotations

import pytest

from trainatomy.catalog.calibrations import from_text
from trainatomy.catalog.gpus import find_gpu
from trainatomy.operators.cost.kernel import Chip
from trainatomy.operators.cost.recurrence import Recurrence, recurrence
from trainatomy.operators.cost.recurrent import _kernels_at_once, longer_loading
from trainatomy.timing.cost_model import cost_model_of

QUICK = 1e-3
"""Pace of a host that launches all kernels at once."""


def chip(gpu_id: str = "h200", pace: float = QUICK) -> Chip:
    """Return a GPU beside a host of a pace."""
    return cost_model_of(find_gpu(gpu_id)).chip._replace(host_pace=pace)


def both(mode: str, dtype: str, hidden: int, batch: int, *, back: bool = False) -> Recurrence:
    """Return one layer of two directions of 48 steps, which reads as many numbers as it has."""
    gates = hidden * {"LSTM": 4, "GRU": 3, "RNN": 1}[mode]
    states = f"{dtype}[2,{batch},{hidden}]" + ("*2" if mode == "LSTM" else "")
    data = f"{dtype}[48,{batch},{hidden}]"
    weights = ",".join([f"{dtype}[{gates},{hidden}]*2,{dtype}[{gates}]*2"] * 2)
    given = f"{data},{data},{states},{weights}" if back else f"{data},{states},{weights}"
    name = "aten::_cudnn_rnn_backward" if back else "aten::_cudnn_rnn"
    call = from_text(f"{name}({given})->{data},{states};mode={mode};num_layers=1;bidirectional=True")
    return recurrence(call, "tf32")


@pytest.mark.parametrize(
    ("mode", "dtype", "hidden", "batch", "back", "kernels"),
    [
        ("LSTM", "f16", 774, 36, False, 1.70),
        ("GRU", "bf16", 1194, 36, False, 1.67),
        ("GRU", "f32", 800, 36, False, 1.65),
        ("RNN", "f32", 1132, 48, False, 1.40),
        ("LSTM", "f32", 256, 36, True, 1.39),
        ("LSTM", "f16", 774, 36, True, 1.53),
        ("LSTM", "f32", 256, 72, True, 1.72),
    ],
)
def test_products_of_two_directions_overlap_less_where_their_depth_is_split(
    mode: str, dtype: str, hidden: int, batch: int, *, back: bool, kernels: float
):
    """How many kernels ran beside a product of a time step, itself included, behind other work on an H200."""
    found = _kernels_at_once(chip(), both(mode, dtype, hidden, batch, back=back))
    assert found.queued == pytest.approx(kernels, abs=0.13)


def test_products_of_the_inputs_of_two_directions_run_nearly_alone():
    """A GRU of 1,194 in backward of a training: 1.17 kernels beside products of inputs, 1.26 beside those of steps."""
    one = both("GRU", "bf16", 1194, 36, back=True)
    at_once = _kernels_at_once(chip(pace=1.8), one)
    assert at_once.steps > 1.25 and at_once.inputs == pytest.approx(1.17, abs=0.08)
    assert _kernels_at_once(chip(), one).inputs > 1.3


def test_weights_of_both_directions_that_exceed_the_cache_load_longer_on_an_h100():
    """An LSTM of 1,200 in TF32, 24 samples: 11.2 us for a product on an H200 and 14.3 us on an H100; backward alike."""
    wide, narrow = both("LSTM", "f32", 1200, 24), both("LSTM", "f32", 256, 36)
    assert longer_loading(chip("h100-sxm"), wide, 1.69) == pytest.approx(3.1e-6, rel=0.2)
    assert longer_loading(chip("h100-sxm"), narrow, 1.69) < 0.05e-6
    assert longer_loading(chip("h200"), wide, 1.69) == 0
    assert longer_loading(chip("h100-sxm"), both("LSTM", "f32", 1200, 24, back=True), 1.69) == 0
