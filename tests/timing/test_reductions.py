"""Reductions by where their numbers lie, and kernels that go step by step, as an H200 and an H100 ran them."""

import pytest

from trainatomy.catalog.calibrations import from_text
from trainatomy.catalog.gpus import find_gpu
from trainatomy.operators.cost import kernel_work
from trainatomy.timing.cost_model import cost_model_of, kernel_cost

GPUS = {name: cost_model_of(find_gpu(name)) for name in ("h200", "h100-sxm")}


@pytest.mark.parametrize(
    ("call", "family", "measured"),
    [
        ("aten::sum(f32[512,100,300|1,512,51200])->f32[512,300];dim=[1]", "apart.reduction.32", (104.5, 122.1)),
        (
            "aten::sum(f32[48,64,4,1024,4|256,1,64,12288,12582912])->f32[64,4,1024,4];dim=[0]",
            "apart.reduction.32",
            (1114, 1522),
        ),
        (
            "aten::amax(f32[3,300,300,197|300,900,1,270000])->f32[300,300,197];dim=[0]",
            "apart.reduction.32",
            (344.6, 371.1),
        ),
        (
            "aten::mean(f32[300,128,12,48|73728,576,1,12])->f32[300,128,1,48];dim=[2];keepdim=True",
            "short rows.reduction.32",
            (107, 105.8),
        ),
    ],
)
def test_results_in_another_order_and_short_rows(call, family, measured):
    """Neighbouring threads read numbers that lie apart where results follow another order."""
    for model, microseconds in zip(GPUS.values(), measured, strict=True):
        work = kernel_work(from_text(call), model.chip)
        assert work.family == family
        assert work.seconds == pytest.approx(microseconds * 1e-6, rel=0.15)


def test_the_order_of_results_decides_and_not_that_of_the_numbers():
    """The same numbers are summed as columns if the results follow them."""
    along = "aten::sum(f32[100,300,512])->f32[300,512];dim=[0]"
    across = "aten::sum(f32[512,100,300|1,153600,512])->f32[512,300];dim=[1]"
    families = [kernel_work(from_text(call), GPUS["h200"].chip).family for call in (along, across)]
    assert families == ["reduction.columns.32", "apart.reduction.32"]


@pytest.mark.parametrize(
    ("call", "microseconds"),
    [
        ("aten::cumsum(i64[300,2048])->i64[300,2048];dim=0", (52, 121)),
        ("aten::cumsum(f32[300,64,256])->f32[300,64,256];dim=2", (27, 29)),
        ("aten::_ctc_loss(f32[437,11,385],i64[11,12],i64[11]*2)->f32[11],f32[11,437,25]", (164, 308)),
        (
            "aten::_ctc_loss_backward(f32[5],f32[74,5,921],i64[5,15],i64[5]*2,f32[5],f32[5,74,27])->f32[74,5,921]",
            (466, 529),
        ),
        (
            "aten::_ctc_loss_backward(f32[6|0],f32[499,6,32|32,15968,1],i64[3072],f32[6],f32[6,499,1025])->f32[499,6,32]",
            (715, 740),
        ),
        ("aten::_weight_norm_interface(f32[768,48,128],f32[1,1,128])->f32[768,48,128],f32[1,1,128];dim=2", (333, 369)),
        (
            "aten::_weight_norm_interface_backward(f32[768,48,128]*2,f32[1,1,128]*2)->f32[768,48,128],f32[1,1,128];dim=2",
            (403, 448),
        ),
    ],
)
def test_kernels_that_wait_for_the_step_before(call, microseconds):
    """Between the time with everything in the cache and that with nothing in it, or 25 % from them."""
    least, most = microseconds
    assert 0.75 * least < kernel_cost(from_text(call), GPUS["h200"]).seconds * 1e6 < 1.25 * most


def test_gradients_of_bags_of_a_large_table():
    """870 us in a fastText on an H200: rows of 100 numbers take as many threads as those of 128."""
    bags = (
        "aten::_embedding_bag_backward(f32[8192,100],i64[409600],i64[8192],i64[409600],i64[8192],i64[0])"
        "->f32[500000,100];num_weights=500000;scale_grad_by_freq=False;mode=1;sparse=False"
    )
    assert kernel_cost(from_text(bags), GPUS["h200"]).seconds == pytest.approx(870e-6, rel=0.12)
