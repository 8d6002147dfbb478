"""How cuDNN convolves groups of images: by the trees, by its library, and what it costs."""

import pytest

from trainatomy.catalog.calibrations import from_text
from trainatomy.catalog.gpus import find_gpu
from trainatomy.operators.allocation.cudnn.heuristics import EnginePlan
from trainatomy.operators.allocation.cudnn.ways import convolutions_of, say_plans, way_of
from trainatomy.operators.cost import kernel_work
from trainatomy.operators.cost.convolution import launches_of_groups
from trainatomy.simulator import simulate as simulating
from trainatomy.timing.cost_model import cost_model_of, kernel_cost
from trainatomy.workload import Workload

H100 = cost_model_of(find_gpu("h100-sxm"))
NARROW = "aten::convolution(f32[30,448,56,56],f32[448,56,3,3])->f32[30,448,28,28];stride=[2, 2];padding=[1, 1];groups=8"
DEEP = "aten::convolution(f32[30,896,14,14],f32[896,56,3,3])->f32[30,896,14,14];padding=[1, 1];groups=16"
GRADIENTS = (
    "aten::convolution_backward(bf16[45,896,14,14]*2,bf16[896,56,3,3])->bf16[45,896,14,14],bf16[896,56,3,3]"
    ";bias_sizes=[0];padding=[1, 1];groups=16;output_mask=[True, True, False]"
)


class Library:
    """cuDNN's library that chooses one engine for each kind of product."""

    version = "9.19.0"

    def __init__(self, **engines: int) -> None:
        self.engines = {name.replace("_", " "): engine for name, engine in engines.items()}

    def plan(self, kind: str, one: object, *, tf32: bool, deterministic: bool) -> EnginePlan:
        return EnginePlan(self.engines[kind], ((0, 1),), (0,), 0)


def test_the_trees_tell_groups_without_tensor_cores_from_their_neighbours():
    """Of a RegNet-Y in TF32 on an H100: 5,350 us, where tensor cores would take 340, and 106 us."""
    narrow, deep = from_text(NARROW), from_text(DEEP)
    assert kernel_work(narrow, H100.chip).family == "convolution.forward.spatial.first groups.cores.tf32"
    assert kernel_work(deep, H100.chip).family == "convolution.forward.spatial.first padded.small.tf32"
    assert kernel_cost(narrow, H100).seconds == pytest.approx(5350e-6, rel=0.3)
    assert kernel_cost(deep, H100).seconds == pytest.approx(106e-6, rel=0.2)
    assert launches_of_groups(narrow) == 4 * 8 and launches_of_groups(deep) == 0


def test_what_the_library_says_comes_before_the_trees():
    together = from_text(f"{NARROW};ways=together")
    assert kernel_work(together, H100.chip).family == "convolution.forward.spatial.first padded.small.tf32"
    mixed = kernel_work(from_text(f"{GRADIENTS};ways=together,unsplit"), H100.chip)
    assert mixed.family == "convolution.backward.spatial.first groups.together unsplit.half"
    one_by_one = kernel_work(from_text(f"{GRADIENTS};ways=turns,unsplit"), H100.chip)
    assert one_by_one.seconds > mixed.seconds and one_by_one.launches == 2 * 4 * 16


def test_the_engine_decides_the_way():
    call = from_text(GRADIENTS)
    (kind, one), (other, _) = convolutions_of(call)
    assert (kind, other) == ("input gradient", "weight gradient")
    of_input = {engine: way_of(kind, one, EnginePlan(engine, (), (0,), 0)) for engine in (67, 64, 74, 999)}
    assert of_input == {67: "together", 64: "turns", 74: "cores", 999: None}
    parts = {count: way_of(other, one, EnginePlan(47, ((0, count),), (0,), 0)) for count in (1, 12)}
    assert parts == {1: "unsplit", 12: "turns"}


DENSE = "aten::convolution(f32[8,64,14,14],f32[64,64,3,3])->f32[8,64,14,14];padding=[1, 1]"
ROW = "aten::convolution(f16[8,768,499],f16[768,48,128])->f16[8,768,500];padding=[64];groups=16"


@pytest.mark.parametrize(
    ("version", "capability", "plans"),
    [
        ("9.12.0", (9, 0), ["45", "45", "45", "67,47"]),
        ("9.20.0", (9, 0), ["45", "45", "45", "67,47"]),
        ("9.21.1", (9, 0), [None] * 4),
        ("9.19.0", (8, 0), [None] * 4),
    ],
)
def test_groups_of_images_have_ways_and_all_convolutions_plans(version, capability, plans):
    calls = [from_text(text) for text in (DENSE, ROW, DEEP, GRADIENTS)]
    library = Library(forward=45, input_gradient=67, weight_gradient=47)
    library.version = version
    say_plans(calls, library, capability, tf32=True, deterministic=False)  # type: ignore[arg-type]
    assert [dict(call.numbers).get("ways") for call in calls] == [None, None, "turns", "together,unsplit"]
    assert [dict(call.numbers).get("plans") for call in calls] == plans


@pytest.mark.parametrize(
    ("dtype", "layout", "asked"),
    [("bf16", "", 0), ("f16", "", 1), ("bf16", "|100352,1,3584,64", 1)],
    ids=["usual", "a shape of use_cudnn_depthwise", "channels-last"],
)
def test_cudnn_is_not_asked_for_depthwise_convolutions_of_pytorch(dtype, layout, asked):
    """Its plans would bring points of other kernels nearer."""
    text = f"aten::convolution({dtype}[8,64,28,28{layout}],{dtype}[64,1,3,3])->{dtype}[8,64,28,28{layout}]"
    assert len(convolutions_of(from_text(f"{text};padding=[1, 1];groups=64"))) == asked


def test_a_sequence_is_asked_for_as_an_image_of_one_row():
    ((kind, one),) = convolutions_of(from_text(ROW))
    assert (kind, one.data, one.weight, one.output) == (
        "forward",
        (8, 768, 1, 499),
        (768, 48, 1, 128),
        (8, 768, 1, 500),
    )
    assert (one.strides, one.padding, one.dilation) == ((1, 1), (0, 64), (1, 1))


def test_points_of_the_same_plan_are_nearer():
    """The gradient of an upscaler's first weight on an H200, which cuDNN 9.19 splits from about 30 images on."""
    text = (
        "aten::convolution_backward(bf16[{0},64,64,64],bf16[{0},3,64,64],bf16[64,3,3,3])->bf16[64,3,3,3],bf16[64]"
        ";bias_sizes=[64];padding=[1, 1];output_mask=[False, True, True];plans={1}"
    )
    h200 = cost_model_of(find_gpu("h200"))
    unsplit, split = (kernel_cost(from_text(text.format(24, plan)), h200).seconds for plan in ("49~092", "49~092/7"))
    assert split < 0.4 * unsplit


def test_a_simulation_asks_the_library_where_it_is_installed(monkeypatch: pytest.MonkeyPatch):
    library = Library(forward=45, input_gradient=67, weight_gradient=47)
    monkeypatch.setattr(simulating, "heuristics_of", lambda workload, gpu: library)
    config = {"embedding_size": 16, "hidden_sizes": [32], "depths": [1], "groups_width": 8}
    model = {"class": "RegNetForImageClassification", "config": config}
    settings = {"per_device_train_batch_size": 2, "max_grad_norm": 0, "optim": "sgd"}
    described = Workload.from_mapping(
        {"loop": "pytorch", "model": model, "data": {}, "train": settings, "gpu": "h200", "steps": 2}
    )
    calls = simulating.simulate(described, described.resolve_gpu()).operations.calls
    said = [dict(call.numbers).get("ways") for call in calls if dict(call.numbers).get("groups") == "4"]
    assert said == ["turns", "together,unsplit"]


@pytest.mark.parametrize("way", ["forward", "backward"])
def test_groups_of_a_sequence_overlap_in_forward(way: str):
    """The positional embedding of a UniSpeech in TF32 on an H100, whose steps are shorter than their kernels."""
    images = "f32[8,768,499],f32[768,48,128]"
    call = {
        "forward": f"aten::convolution({images},f32[768])->f32[8,768,500];padding=[64];groups=16",
        "backward": f"aten::convolution_backward(f32[8,768,500],{images})->f32[8,768,499],f32[768,48,128]"
        ";bias_sizes=[0];padding=[64];groups=16;output_mask=[True, True, False]",
    }[way]
    tf32 = cost_model_of(find_gpu("h100-sxm"), tf32=True)
    assert kernel_cost(from_text(call), tf32).at_once == pytest.approx(3.0 if way == "forward" else 1.0)


@pytest.mark.parametrize(
    ("sequences", "dtype", "places", "at_once"),
    [(3, "bf16", 128, 1.4), (4, "bf16", 128, 1.0), (3, "f32", 128, 1.0), (9, "f32", 19, 3.0), (9, "bf16", 19, 1.0)],
)
def test_gradients_of_groups_overlap_where_each_takes_long(sequences: int, dtype: str, places: int, at_once: float):
    """The positional embeddings of a UniSpeech-SAT and a Data2Vec, whose steps are shorter than their kernels."""
    images = f"{dtype}[{sequences},768,499],{dtype}[768,48,{places}]"
    call = from_text(
        f"aten::convolution_backward({dtype}[{sequences},768,{500 - places % 2}],{images})"
        f"->{dtype}[{sequences},768,499],{dtype}[768,48,{places}]"
        f";bias_sizes=[0];padding=[{places // 2}];groups=16;output_mask=[True, True, False]"
    )
    assert kernel_cost(call, cost_model_of(find_gpu("h200"), tf32=True)).at_once == pytest.approx(at_once)
