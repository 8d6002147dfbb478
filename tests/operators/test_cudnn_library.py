"""cuDNN's own answers: where its library is found, what PyTorch tries of them, and what uses them.

Tests that ask the library are skipped where it is not installed (``pip install "trainatomy[cudnn]"``).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from cudnn_sample import KINDS, convolution_of, sample

from trainatomy.api import predict
from trainatomy.catalog.files import read_text
from trainatomy.catalog.gpus import device_text, find_gpu, has_recorded_engines, is_measured
from trainatomy.errors import MissingLibrary, WorkloadError
from trainatomy.operators.allocation.convolution import convolution as plan_of
from trainatomy.operators.allocation.convolution import workspace_bytes
from trainatomy.operators.allocation.cudnn import backend, missing, unnamed
from trainatomy.operators.allocation.cudnn.backend import Backend, BackendError, Mode, Note, version_text
from trainatomy.operators.allocation.cudnn.convolution import Convolution, Kind
from trainatomy.operators.allocation.cudnn.heuristics import Choice, EnginePlan, Heuristics, mode_of, plans
from trainatomy.operators.allocation.cudnn.learned import workspace
from trainatomy.operators.allocation.cudnn.missing import (
    FILE,
    NAMED,
    SIZES,
    Engine,
    Row,
    bytes_in_cublas,
    is_unanswered,
    missing_engine,
)
from trainatomy.operators.allocation.cudnn.unnamed import missing_parts
from trainatomy.operators.allocation.plan import KernelCall, Processor, Scratch
from trainatomy.results.operations import Call
from trainatomy.results.prediction import Fact, Prediction
from trainatomy.simulator import cudnn
from trainatomy.simulator.run_notes import plan_notes
from trainatomy.workload.schema import Workload

SWAPPED: dict[Kind, Kind] = {"forward": "input gradient", "input gradient": "forward"}
NETWORK = """
import torch
from torch import nn


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 64, 7, 2, 3), nn.Linear(64, 10)

    def forward(self, images, labels):
        return nn.functional.cross_entropy(self.head(self.stem(images).mean((2, 3))), labels)


def network():
    return Network()


def images(batch_size):
    return {"images": torch.rand(batch_size, 3, 64, 64), "labels": torch.zeros(batch_size, dtype=torch.long)}
"""


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    yield
    backend.cudnn_library.cache_clear()
    cudnn._heuristics.cache_clear()


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Backend:
    """Return the library, or skip the test."""
    monkeypatch.delenv(backend.VARIABLE)
    backend.cudnn_library.cache_clear()
    try:
        return backend.cudnn_library()
    except MissingLibrary as missing:
        pytest.skip(str(missing))


def convolution(
    data: tuple[int, ...], weight: tuple[int, ...], stride: int = 1, padding: int = 0, **how: Any
) -> Convolution:
    """Return a convolution of images."""
    groups, dtype, last = how.get("groups", 1), how.get("dtype", torch.float16), how.get("last", False)
    places = [(size + 2 * padding - filter_) // stride + 1 for size, filter_ in zip(data[2:], weight[2:], strict=True)]
    shapes = torch.Size(data), torch.Size(weight), torch.Size((data[0], weight[0], *places))
    return Convolution(*shapes, dtype, [stride] * 2, [padding] * 2, [1, 1], groups, False, last, 132)


STEM = convolution((8, 3, 224, 224), (64, 3, 7, 7), 2, 3)


def test_without_the_library_rules_are_used_and_the_reason_is_given_where_it_was_asked_for() -> None:
    gpu, workload = find_gpu("h200"), Workload.from_mapping({"model": {"id": "gpt2"}})
    assert cudnn.heuristics_of(workload, gpu) is None
    with pytest.raises(MissingLibrary, match=backend.VARIABLE):
        cudnn.heuristics_of(workload.replace("software.cudnn", "library"), gpu)


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Path]:
    """Write files with the names of cuDNN's, and name the first as the library."""
    files = [tmp_path / f"libcudnn{name}.so.9" for name in ("", *(f"_{part}" for part in backend._PARTS))]
    for file in files:
        file.write_text("no library")
    monkeypatch.setenv(backend.VARIABLE, str(files[0]))
    backend.cudnn_library.cache_clear()
    return files


def test_a_file_that_is_no_library_is_named(parts: list[Path]) -> None:
    with pytest.raises(MissingLibrary, match="cannot be loaded"):
        backend.cudnn_library()


def test_a_library_without_its_parts_is_not_loaded(parts: list[Path]) -> None:
    parts[2].unlink()
    with pytest.raises(MissingLibrary, match=r"lacks libcudnn_heuristic\.so\.9 beside it"):
        backend.cudnn_library()


def test_an_old_library_is_refused_with_its_version(monkeypatch: pytest.MonkeyPatch, parts: list[Path]) -> None:
    class Old:
        version, cuda_version = 90501, 12060

        def __init__(self, path: Path) -> None:
            pass

    monkeypatch.setattr(backend, "Backend", Old)
    with pytest.raises(MissingLibrary, match=r"cuDNN 9\.5\.1 .* 9\.8\.0 and newer do"):
        backend.cudnn_library()


def test_a_gpu_that_cudnn_does_not_run_on_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    workload = Workload.from_mapping({"model": {"id": "gpt2"}, "gpu": "p100", "software": {"cudnn": "library"}})
    with pytest.raises(WorkloadError, match=r"software\.cudnn: .* compute capability 6\.0"):
        cudnn.heuristics_of(workload, workload.resolve_gpu())
    workload = workload.replace({"gpu": "v100", "era": "2022"})
    with pytest.raises(WorkloadError, match="older interface"):
        cudnn.heuristics_of(workload, workload.resolve_gpu())


def test_pytorch_leaves_out_what_its_settings_forbid() -> None:
    assert Choice().allows([Note.TENSOR_CORE, Note.NONDETERMINISTIC], torch.float32)
    assert not Choice().allows([Note.DOWN_CONVERTS_INPUTS], torch.float32)
    assert not Choice(tf32=False).allows([Note.TENSOR_CORE], torch.float32)
    assert Choice(tf32=False).allows([Note.TENSOR_CORE], torch.float16)
    assert not Choice(deterministic=True).allows([Note.NONDETERMINISTIC], torch.float32)
    assert mode_of({}) is Mode.INSTANT
    assert mode_of({"TORCH_CUDNN_USE_HEURISTIC_MODE_B": "1"}) is Mode.B


class Answers:
    """A library that gives one answer."""

    version = "9.19.0"

    def __init__(self, answer: int | None) -> None:
        self.answer, self.asked = answer, 0

    def plan(self, kind: Kind, one: Convolution, **settings: bool) -> EnginePlan | None:
        self.asked += 1
        return None if self.answer is None else EnginePlan(62, (), (), self.answer)


def scratch(weight: tuple[int, ...], answers: Any, groups: int = 1) -> list[int]:
    """Return the workspaces of a convolution of 64 channels."""
    data, filters = (torch.empty(shape, device="meta", dtype=torch.float16) for shape in ((8, 64, 56, 56), weight))
    output = torch.nn.functional.conv2d(data, filters, padding=weight[-1] // 2, groups=groups)
    sides = [1, 1], [weight[-1] // 2] * 2, [1, 1]
    call = KernelCall(
        torch.ops.aten.convolution.default, (data, filters, None, *sides, False, [0, 0], groups), {}, (output,),
        Processor((9, 0), 132, (2, 11), answers),
    )  # fmt: skip
    return [item.bytes for item in plan_of(call) if isinstance(item, Scratch)]


def test_the_library_answers_and_trees_stand_in_where_it_has_no_plan() -> None:
    assert scratch((64, 64, 3, 3), Answers(12345)) == [12345]
    assert scratch((64, 64, 3, 3), Answers(0)) == []
    assert scratch((64, 64, 3, 3), Answers(None)) == scratch((64, 64, 3, 3), None) != []


def test_trees_decide_about_depthwise_convolutions_and_products_of_unknown_engines() -> None:
    for weight, groups in (((64, 64, 1, 1), 1), ((64, 1, 3, 3), 64)):
        answers = Answers(12345)
        assert scratch(weight, answers, groups) == scratch(weight, None, groups)
        assert answers.asked == 1
    assert is_unanswered(convolution((16, 64, 56, 56), (256, 64, 1, 1)))
    assert not is_unanswered(STEM)


def test_partial_sums_of_unknown_tiles_are_as_answered() -> None:
    one = convolution((48, 256, 14, 14), (256, 256, 3, 3), 1, 1, dtype=torch.bfloat16)
    shared = EnginePlan(65, ((2, 0), (25, 0), (27, 1), (28, 3)), (), 20_000_000)
    assert missing_parts("weight gradient", one, shared) != 0
    for knobs in (((25, 0), (27, 1), (28, 3)), ((2, 99), (25, 0), (27, 1), (28, 3)), ((2, 0), (25, 1), (27, 1))):
        assert missing_parts("weight gradient", one, replace(shared, knobs=knobs)) == 0


class Names(Answers):
    """A library that names two plans, of which the first needs some bytes."""

    def __init__(self, plans: str, workspace: int) -> None:
        super().__init__(workspace)
        self.named = EnginePlan(int(plans.split()[0]), (), (), workspace, listed=tuple(plans.split(" | ")))

    def plan(self, kind: Kind, one: Convolution, **settings: bool) -> EnginePlan | None:
        return self.named


PRODUCTS = [
    # An H200 sums these image by image in cuBLAS; without a driver cuDNN names what would come next.
    ("weight gradient", ((16, 160, 7, 7), (960, 160, 1, 1)), torch.float16,
     Names("33 2=4 5=3 14=3 | 10 2=8 13=1 14=4 15=1 18=1 23=0", 12_201_104), 9_830_400),
    ("weight gradient", ((16, 960, 7, 7), (320, 960, 1, 1)), torch.bfloat16,
     Names("9 2=8 13=1 14=4 18=1 23=1 | 9 2=23 13=0 14=3 18=1 23=1 | 65 2=7 13=1 18=1 25=0 27=1 28=3", 2_007_056),
     19_660_800),
    ("weight gradient", ((16, 512, 7, 7), (128, 512, 1, 1)), torch.float32,
     Names("40 2=14 6=1 12=3 13=1 14=0 15=0 17=4 22=3 | 40 2=11 6=0 12=4 13=1 14=0 15=0 17=5 22=3", 2_794_671),
     4_194_304),
    # These run in the engine that is named.
    ("weight gradient", ((16, 464, 7, 7), (1024, 464, 1, 1)), torch.float16,
     Names("9 2=7 13=0 14=4 18=1 23=1 | 65 2=7 13=1 18=1 25=1 27=1 28=2", 2_333_200), 2_333_200),
    ("forward", ((16, 352, 14, 14), (128, 352, 1, 1)), torch.float32,
     Names("67 2=1 13=0 18=0 25=1 27=8 28=1 | 67 2=5 13=0 18=0 25=1 27=2 28=1", 6_021_136), 6_021_136),
    ("forward", ((16, 672, 7, 7), (128, 672, 1, 1)), torch.float16,
     Names("62 2=1 13=1 18=0 25=0 27=1 28=8 | 62 2=1 13=1 18=0 25=0 27=1 28=4", 1_254_416), 1_254_416),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "shapes", "dtype", "named", "measured"), PRODUCTS)
def test_the_engine_that_is_named_tells_whether_cublas_computes_a_product(
    kind: Kind, shapes: tuple[tuple[int, ...], tuple[int, ...]], dtype: torch.dtype, named: Names, measured: int
) -> None:
    one = convolution(*shapes, dtype=dtype)
    hopper = Processor((9, 0), 132, (2, 11), cast(Any, named))
    assert workspace_bytes(kind, one, hopper) == measured
    # Read off an H200: no other generation, and no other setting, is decided by it.
    for other in (replace(hopper, capability=(8, 0)), replace(hopper, capability=(10, 0))):
        by_trees = is_unanswered(one)
        assert workspace_bytes(kind, one, other) == (workspace(kind, one) if by_trees else named.answer)


@pytest.mark.parametrize(
    ("kind", "one", "plans", "measured"),
    [
        # Winograd's method: 24 images are filled up to 32.
        ("input gradient", convolution((24, 32, 149, 149), (32, 32, 3, 3), dtype=torch.bfloat16),
         "67 2=4 13=0 18=0 25=0 27=8 28=1 | 67 2=1 13=0 18=0 25=0 27=8 28=1 | 67 2=4 13=0 18=0 25=1 27=7 28=1",
         426_000_384),
        ("forward", convolution((128, 32, 30, 30), (8, 32, 3, 3), 1, 1, dtype=torch.bfloat16),
         "45 2=4 5=3 14=3 | 27 2=1 5=3 14=5 | 45 2=0 5=3 14=4", 47_222_784),
        ("weight gradient", convolution((16, 128, 14, 14), (32, 128, 3, 3), 1, 1, dtype=torch.float32),
         "50 0=5 2=5 5=3 14=4 | 34 0=8 2=7 5=2 14=5 | 20 2=6 3=0", 6_488_064),
    ],
)  # fmt: skip
def test_other_engines_that_are_missing_without_a_driver_have_their_own_workspaces(
    kind: Kind, one: Convolution, plans: str, measured: int
) -> None:
    hopper = Processor((9, 0), 132, (2, 11), cast(Any, Names(plans, 12_345)))
    assert workspace_bytes(kind, one, hopper) == measured
    assert workspace_bytes(kind, one, replace(hopper, capability=(10, 0))) == 12_345
    unknown = replace(hopper, cudnn=cast(Any, Names("1 2=3", 12_345)))
    assert workspace_bytes(kind, one, unknown) == 12_345


def test_every_engine_in_the_table_has_a_workspace() -> None:
    contents = json.loads(read_text(FILE))
    for kind, groups in contents["engines"].items():
        entries = [entry for rows in groups.values() for entry in rows.values()]
        engines = {engine for entry in entries for engine in (entry[2:] if isinstance(entry, list) else [entry])}
        assert engines - {NAMED}
        assert {str(engine) for engine in engines - {NAMED}} <= set(contents["methods"][kind])
        assert {entry[0] for entry in entries if isinstance(entry, list)} <= set(SIZES)


def test_the_row_with_the_most_plans_in_common_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    one, group = convolution((16, 64, 10, 10), (64, 64, 3, 3), 1, 1), "other, 2 bytes"
    rows: dict[Row, Engine] = {
        ("forward", group, ()): 5,
        ("forward", group, ("7 2=1",)): NAMED,
        ("forward", group, ("7 2=1", "8 2=1")): ("images", 16, NAMED, 6),
    }
    monkeypatch.setattr(missing, "_table", lambda: rows)

    def found(*listed: str, images: int = 16, engine: int = 7) -> int | None:
        call = replace(one, data=torch.Size((images, *one.data[1:])))
        return missing_engine("forward", call, EnginePlan(engine, (), (), 0, listed=listed))

    assert found("7 2=1 17=4", "8 2=1 12=9 17=2", "9") == 6  # parts of sums are left out
    assert found("7 2=1", "8 2=1", images=15) == NAMED
    assert found("7 2=1", "9") == NAMED
    assert found("9") == 5
    assert found("58", "7 2=1", "8 2=1", engine=58) == NAMED  # a driver is there, and the list lacks nothing
    assert missing_engine("weight gradient", one, EnginePlan(7, (), (), 0, listed=("9",))) is None


def test_cublas_sums_contiguous_images_apart_and_divides_channels_last_ones() -> None:
    one = convolution((12, 64, 40, 40), (160, 64, 1, 1), dtype=torch.float32)
    assert bytes_in_cublas("weight gradient", one) == 12 * 160 * 64 * 4
    last = replace(one, channels_last=True)
    assert bytes_in_cublas("weight gradient", last) == 132 * 160 * 64 * 4
    short = replace(last, dtype=torch.bfloat16, output=torch.Size((12, 160, 10, 10)))
    assert bytes_in_cublas("weight gradient", short) == 0


def stream_k(engine: int, tile: int, cluster: tuple[int, int], workspace: int) -> EnginePlan:
    """Return a plan that divides sums, as it is answered without a driver."""
    return EnginePlan(engine, ((2, tile), (25, 0), (27, cluster[0]), (28, cluster[1])), (), workspace)


@pytest.mark.parametrize(
    ("kind", "one", "plan", "measured"),
    [
        # VGG-16: 18 parts without a driver are 126 on a GPU.
        ("weight gradient", convolution((16, 64, 224, 224), (64, 64, 3, 3), 1, 1, dtype=torch.float32),
         stream_k(68, 5, (1, 1), 411_484_371), 413_254_311),
        # The last round's tiles are shared, as often as they fit.
        ("weight gradient", convolution((16, 512, 28, 28), (512, 512, 3, 3), 1, 1, dtype=torch.float32),
         stream_k(68, 0, (1, 1), 60_817_555), 69_468_911),
        ("forward", convolution((16, 512, 28, 28), (512, 512, 3, 3), 1, 1, dtype=torch.float32),
         stream_k(67, 3, (1, 2), 60_817_555), 77_595_055),
        # Of clusters of three, 117 blocks fit at once.
        ("weight gradient", convolution((16, 64, 224, 224), (64, 64, 3, 3), 1, 1, dtype=torch.bfloat16),
         stream_k(65, 5, (1, 3), 205_889_747), 207_512_231),
        # Parts are answered without a driver, and none are needed on a GPU.
        ("input gradient", convolution((16, 256, 28, 28), (512, 256, 3, 3), 1, 1, dtype=torch.bfloat16),
         stream_k(67, 3, (1, 2), 23_724_243), 21_626_896),
        # Inception: thirteen blocks share each of nine tiles.
        ("weight gradient", convolution((20, 64, 39, 39), (96, 64, 3, 3), 1, 1, dtype=torch.float16),
         stream_k(65, 1, (1, 3), 10_435_027), 13_679_527),
        # The tiles of 64 x 192 of the last round are shared by three blocks each.
        ("forward", convolution((40, 192, 18, 18), (192, 192, 3, 3), 2, dtype=torch.float16),
         stream_k(62, 18, (8, 1), 7_409_875), 10_555_727),
        # Groups of 24 channels are padded to 32, and two of them share a tile.
        ("weight gradient", replace(
            convolution((28, 72, 120, 120), (72, 24, 3, 3), 2, 1, dtype=torch.float16), groups=3
        ), stream_k(65, 5, (1, 3), 96_823_312), 98_593_375),
    ],
)  # fmt: skip
def test_partial_sums_are_those_of_a_gpu(kind: Kind, one: Convolution, plan: EnginePlan, measured: int) -> None:
    assert abs(plan.workspace - measured) > 10**6
    assert plan.workspace + missing_parts(kind, one, plan) == measured


@pytest.mark.parametrize(
    ("steps", "most", "dtype", "tile", "whole", "blocks"),
    [
        (72, 5, torch.bfloat16, (128, 64), True, 1),  # 4,608 terms: half of them take as long as adding up two sums
        (203, 5, torch.bfloat16, (128, 64), True, 2),
        (288, 4, torch.bfloat16, (128, 64), True, 4),
        (576, 2, torch.bfloat16, (128, 64), True, 2),
        (147, 15, torch.float16, (128, 64), True, 15),  # too short for nine blocks with 17 steps each: a tree
        (182, 19, torch.float16, (128, 64), True, 10),  # 17 steps for each block, at least
        (352, 17, torch.float16, (128, 64), True, 17),
        (72, 66, torch.float32, (128, 128), False, 18),  # four steps each, in the last round
        (100, 11, torch.float32, (128, 128), False, 10),  # ten blocks are as fast as eleven
    ],
)
def test_so_many_blocks_share_a_tile_as_take_the_least_time(
    steps: int, most: int, dtype: torch.dtype, tile: tuple[int, int], whole: bool, blocks: int
) -> None:
    assert unnamed.blocks_of_tile(steps, most, dtype, tile, whole=whole) == blocks


def fact(found: Prediction) -> Fact:
    """Return the fact on convolutions."""
    return next(fact for fact in found.facts if fact.name == "convolutions")


def test_the_bill_names_the_source(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "network.py"
    file.write_text(NETWORK)
    workload = Workload.from_mapping(
        {"model": {"factory": f"{file}:network"}, "data": {"factory": f"{file}:images"}, "loop": "pytorch"}
    )
    by_rules = predict(workload)
    assert fact(by_rules).value == "rules"
    large = Answers(10**9)
    monkeypatch.setattr("trainatomy.simulator.simulate.heuristics_of", lambda workload, gpu: large)
    by_library = predict(workload)
    assert (fact(by_library).value, fact(by_library).source) == ("library", "9.19.0")
    assert by_library.memory.peak_allocated_bytes > 10**9 > by_rules.memory.peak_allocated_bytes


def test_cards_are_described_from_the_catalog() -> None:
    text = device_text(find_gpu("rtx-4090"))
    assert text is not None
    assert '"deviceVer": 890' in text
    assert '"multiProcessorCount": 128' in text
    assert '"smClockRateKHz": 25' in text  # 2.52 GHz
    assert is_measured(find_gpu("h200"))
    assert not is_measured(find_gpu("rtx-4090"))


def test_the_stem_of_a_resnet_is_as_measured(installed: Backend) -> None:
    text = device_text(find_gpu("h200"))
    assert text is not None
    asked = Heuristics(installed, text)
    plan = asked.plan("forward", STEM, tf32=True, deterministic=False)
    assert plan is not None
    assert plan.workspace == 16081424


def test_random_convolutions_match_more_often_than_by_the_rules(installed: Backend) -> None:
    """They were measured with cuDNN 9.19, whose plans 9.20 has, too; 9.21 and later have others for half of them."""
    text = device_text(find_gpu("h200"))
    assert text is not None
    processor = Processor((9, 0), 132, (2, 11), Heuristics(installed, text))
    exact, missed = {"library": 0, "rules": 0}, {"library": 0, "rules": 0}
    taken = count = 0
    for line in sample("convolution")[::4]:
        one = convolution_of(line)
        if 1 < line["groups"] == line["inside"]:  # many of these run in ATen
            continue
        for kind in KINDS:
            asked = SWAPPED.get(kind, kind) if line["transposed"] else kind
            found = {"library": workspace_bytes(asked, one, processor), "rules": workspace(asked, one)}
            for source, size in found.items():
                exact[source] += size == line[kind]
                missed[source] += abs(size - line[kind])
            taken, count = taken + line[kind], count + 1
    assert exact["library"] > exact["rules"]
    assert missed["library"] < 0.8 * missed["rules"]
    if has_recorded_engines(version_text(installed.version)):
        assert exact["library"] / count > 0.7
        assert missed["library"] / taken < 0.05


def test_the_table_holds_for_the_versions_that_it_was_recorded_with() -> None:
    one, plans = (
        convolution((128, 32, 30, 30), (8, 32, 3, 3), 1, 1),
        "45 2=4 5=3 14=3 | 27 2=1 5=3 14=5 | 45 2=0 5=3 14=4",
    )
    for version, expected in (("9.20.0", 47_222_784), ("9.24.0", 12_345)):
        names = Names(plans, 12_345)
        names.version = version
        assert workspace_bytes("forward", one, Processor((9, 0), 132, (2, 14), cast(Any, names))) == expected


@pytest.mark.parametrize(
    ("name", "version", "noted"),
    [
        ("aten::convolution", "9.24.0", True),
        ("aten::convolution_backward", "9.26.0", True),
        ("aten::convolution", "9.20.0", False),
        ("aten::convolution", None, False),
        ("aten::mm", "9.24.0", False),
    ],
)
def test_a_newer_version_is_noted_where_there_are_convolutions(name: str, version: str | None, noted: bool) -> None:
    found = list(plan_notes([Call(name, (), ())], version))
    assert [f"cuDNN {version} names" in note for note in found] == [True] * noted


def test_every_card_of_the_catalog_is_understood(installed: Backend) -> None:
    for name in ("t4", "a100-80gb", "rtx-3090", "rtx-4090", "h100-sxm"):
        text = device_text(find_gpu(name))
        assert text is not None
        assert Heuristics(installed, text).plan("forward", STEM, tf32=True, deterministic=False) is not None


def test_deterministic_plans_are_deterministic(installed: Backend) -> None:
    text = device_text(find_gpu("h200"))
    assert text is not None
    device = installed.device(text)
    one = convolution((8, 64, 56, 56), (64, 64, 3, 3), 1, 1)
    found = list(plans("weight gradient", one, installed, device, Choice(deterministic=True)))
    assert found
    assert all(Note.NONDETERMINISTIC not in plan.notes for plan in found)
    assert len(found) < len(list(plans("weight gradient", one, installed, device, Choice())))


def test_a_description_that_is_none_is_refused(installed: Backend) -> None:
    with pytest.raises(BackendError):
        installed.device("no JSON")
