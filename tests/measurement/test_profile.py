"""Profiles of a step: PyTorch's events as a tree, and the tree joined with the prediction."""

from __future__ import annotations

import json
import random
import subprocess
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grid
import pytest
import torch
from kineto_trace import events_of

from trainatomy.catalog.versions import parse_version
from trainatomy.errors import DeviceError
from trainatomy.measurement import profile as profiling
from trainatomy.measurement.profile import UNATTRIBUTED, Profiled, ProfiledStep, _longest_common, join, tree
from trainatomy.results.operations import Array, Call, Operation, Operations
from trainatomy.simulator.simulate import simulate
from trainatomy.workload import Workload

TRACES = Path(__file__).parents[1] / "data" / "traces"
BATCH = {"aten::_to_copy", "aten::ne", "aten::sum", "aten::add", "aten::clone"}


def array(*shape: int, on_host: bool = False, storage: int = 0) -> Array:
    return Array(shape, tuple(1 for _ in shape), "float32", 4, storage, on_host, storage)


MM = Call("aten::mm", (array(8, 4), array(4, 2, storage=1)), (array(8, 2, storage=2),))
OTHER = Call("aten::mm", (array(8, 2), array(2, 6, storage=1)), (array(8, 6, storage=2),))
ZEROS = Call("aten::zeros", (), (array(8),))
LIST = Call("aten::_foreach_add_", (array(8), array(4, storage=1)), (), lengths=(2,))
VIEW = Call("aten::t", (array(8, 4),), (array(4, 8),), is_view=True)
CALLS = [MM, OTHER, ZEROS, LIST, VIEW]


def predicted(*rows: tuple[Call, int] | Call) -> Operations:
    pairs = [row if type(row) is tuple else (row, 1) for row in rows]
    operations = [Operation(0, CALLS.index(call), "forward", "", 0, repeats) for call, repeats in pairs]  # type: ignore[arg-type]
    return Operations(CALLS, operations)


def mm(seconds: float, *shapes: tuple[int, ...]) -> Profiled:
    kernel = Profiled("aten::mm", shapes, seconds)
    return Profiled("aten::linear", (), 0.0, (Profiled("aten::t", (), 0.0), kernel))


def test_operations_find_their_seconds() -> None:
    zeros = Profiled(
        "aten::zeros", ((),), 0.0, (Profiled("aten::zero_", (), 0.0, (Profiled("aten::fill_", (), 3.0),)),)
    )
    lists = Profiled("aten::_foreach_add_", ((), ()), 4.0)
    found = join(
        predicted(MM, VIEW, ZEROS, OTHER, LIST), [mm(1.0, (8, 4), (4, 2)), zeros, mm(2.0, (8, 2), (2, 6)), lists]
    )
    assert list(found.seconds) == [1.0, None, 3.0, 2.0, 4.0]
    assert (found.joined.operations, found.joined.of) == (4, 4)
    assert found.joined.seconds == found.joined.of_seconds == 10.0


def test_unmatched_operations_are_listed() -> None:
    extra = Profiled("aten::topk", (), 0.5)
    found = join(predicted(MM, ZEROS, OTHER), [extra, mm(1.0, (8, 4), (4, 2)), mm(2.0, (8, 2), (2, 6))])
    assert list(found.seconds) == [1.0, None, 2.0]
    assert found.joined.only_predicted == {"aten::zeros": 1} and found.joined.only_measured == {"aten::topk": 1}
    assert (found.joined.seconds, found.joined.of_seconds) == (3.0, 3.5)


def test_other_shapes_are_joined_by_name_where_nothing_else_fits() -> None:
    found = join(predicted(ZEROS, MM), [mm(1.0, (9, 4), (4, 2))])
    assert list(found.seconds) == [None, 1.0]


def test_repeats_are_unrolled_as_a_whole() -> None:
    tree = [mm(1.0, (8, 4), (4, 2)), mm(5.0, (8, 2), (2, 6)), mm(3.0, (8, 4), (4, 2)), mm(7.0, (8, 2), (2, 6))]
    found = join(predicted((MM, 2), (OTHER, 2)), tree)
    assert list(found.seconds) == [2.0, 6.0]
    assert found.joined.of == 4


def test_a_step_that_repeats_itself_is_followed_layer_by_layer() -> None:
    """Align 50 layers of 8 products with a profile that lacks every 23rd, repeats every 29th and has other calls."""
    layer = [MM._replace(inputs=(array(8, 4 + place), array(4 + place, 2, storage=1))) for place in range(8)]
    rows: list[Profiled] = []
    for place, call in enumerate(layer * 50):
        copies = 0 if place % 23 == 22 else 2 if place % 29 == 28 else 1
        rows += [mm(float(place), *(tensor.shape for tensor in call.inputs))] * copies
        if place % 5 == 0:
            rows.append(Profiled("aten::topk", (), 0.5))
    operations = Operations(layer, [Operation(0, place % 8, "forward", "", 0, 1) for place in range(400)])
    found = join(operations, rows)
    assert [s for p, s in enumerate(found.seconds) if s is not None and s != p] == []
    assert found.joined.operations == 400 - 400 // 23
    assert found.joined.only_measured["aten::topk"] == 80


@pytest.mark.parametrize("seed", range(20))
def test_the_alignment_is_a_longest_common_subsequence(seed: int) -> None:
    draw = random.Random(seed)
    first, second = ([(draw.choice("abc"), ()) for _ in range(draw.randrange(14))] for _ in range(2))
    longest = [[0] * (len(second) + 1) for _ in range(len(first) + 1)]
    for i, one in enumerate(first):
        for j, other in enumerate(second):
            longest[i + 1][j + 1] = longest[i][j] + 1 if one == other else max(longest[i][j + 1], longest[i + 1][j])
    pairs = _longest_common(first, second)
    assert len(pairs) == longest[-1][-1] and pairs == sorted(pairs)
    assert all(first[i] == second[j] for i, j in pairs)


def test_autocast_passes_on_to_the_product_that_it_casts_for() -> None:
    cast = Profiled("aten::to", (), 0.0, (Profiled("aten::_to_copy", ((4, 2),), 5.0),))
    inner = Profiled("aten::mm", ((8, 4), (4, 2)), 1.0)
    copies = Call("aten::_to_copy", (array(4, 2),), (array(4, 2),))
    operations = Operations([copies, MM], [Operation(0, index, "forward", "", 0, 1) for index in range(2)])
    found = join(operations, [Profiled("aten::mm", ((8, 4), (4, 2)), 0.0, (cast, inner))])
    assert list(found.seconds) == [5.0, 1.0]


def test_names_of_the_same_kernel() -> None:
    """Match fills of any name and shape, batch norm by cuDNN, and a CPU scalar copied into a tensor."""
    ones = Call("aten::new_ones", (array(2, 3),), (array(8),))
    norm = Call("aten::native_batch_norm", (array(2, 3, 4, 4),), (array(2, 3, 4, 4),))
    number = array(4, on_host=True, storage=1)._replace(strides=(0,))
    copies = Call("aten::copy_", (array(4), number), (array(4),))
    operations = Operations([ones, norm, copies], [Operation(0, index, "forward", "", 0, 1) for index in range(3)])
    tree = [
        Profiled("aten::ones", ((), ()), 0.0, (Profiled("aten::fill_", ((8,), ()), 1.0),)),
        Profiled("aten::batch_norm", (), 0.0, (Profiled("aten::cudnn_batch_norm", ((2, 3, 4, 4),), 2.0),)),
        Profiled("aten::fill_", ((4,), ()), 3.0),
    ]
    assert list(join(operations, tree).seconds) == [1.0, 2.0, 3.0]


@pytest.mark.skipif(
    parse_version(metadata.version("transformers")) > (5, 17),
    reason="later releases of transformers make other operations than the recorded steps have",
)
@pytest.mark.parametrize("name", ["gpt2-bf16", "mixtral-bf16-weights"])
def test_a_step_of_an_h200_finds_its_operations(name: str) -> None:
    """Traces of rows of the accuracy grid (torch 2.11, only operators, kernels, copies and fills) match the prediction.

    All GPU time matches, and all operations but those of the batch, which was fetched before the trace began.
    """
    row = next(row for row in grid.rows() if row.name == name)
    workload = row.workload().replace("software.torch", "2.11").replace("gpu", "h200")
    operations = simulate(workload, workload.resolve_gpu()).operations
    events = events_of(TRACES / f"{name}.trace.json.gz")
    found = join(operations, tree(events)).joined
    kernels = [event for event in events if event.device_type.name == "CUDA" and "Optimizer.step" not in event.name]
    assert found.of_seconds == pytest.approx(sum(kernel.time_range.elapsed_us() for kernel in kernels) / 1e6)
    assert found.seconds >= 0.999 * found.of_seconds
    assert found.of - found.operations <= 8 and set(found.only_predicted) <= BATCH
    assert found.only_measured == {}


def event(name: str, start: float, kernels: list[tuple[str, float]], *children: Any, kind: str = "CPU") -> Any:
    made = SimpleNamespace(
        name=name,
        time_range=SimpleNamespace(start=start, end=start + sum(duration for _, duration in kernels)),
        kernels=[SimpleNamespace(name=kernel, duration=duration) for kernel, duration in kernels],
        cpu_children=list(children),
        cpu_parent=None,
        input_shapes=[[8, 4], [], [[2, 2], [3]]],
        device_type=f"DeviceType.{kind}",
    )
    for child in children:
        child.cpu_parent = made
    return made


def test_events_as_a_tree() -> None:
    inner = event("aten::addmm", 2.0, [("gemm", 10.0), ("splitK", 5.0)])
    outer = event("Optimizer.step", 1.0, [("Optimizer.step", 99.0)], inner)
    first, second = tree([event("gemm", 0.0, [], kind="CUDA"), outer, event("aten::add", 0.5, [("add", 1.0)]), inner])
    assert (first.name, second.name, second.seconds) == ("aten::add", "Optimizer.step", 0.0)
    assert second.total_seconds == pytest.approx(15e-6)
    assert second.children[0].shapes == ((8, 4), (), ())


def test_unassigned_time_is_attributed() -> None:
    launched = event("aten::add", 0.0, [("add", 40.0)])
    runner = [event(name, 1.0, [(name, 40.0)], kind="CUDA") for name in ("add", "gemm")]
    *_, last = tree([launched, *runner])
    assert (last.name, last.seconds) == (UNATTRIBUTED, pytest.approx(40e-6))
    assert len(tree([launched, runner[0]])) == 1
    found = join(predicted(MM), [last])
    assert found.joined.only_measured == {UNATTRIBUTED: 1}


def test_real_events_of_this_machine() -> None:
    """Check with the CPU profiler, which has the same kind of events without kernels."""
    with torch.profiler.profile(record_shapes=True, acc_events=True) as profiler:
        torch.nn.Linear(4, 2)(torch.ones(8, 4)).sum().backward()
    roots = tree(profiler.events() or ())
    (linear,) = [root for root in roots if root.name == "aten::linear"]
    assert linear.shapes == ((8, 4), (2, 4), (2,))
    assert "aten::addmm" in [child.name for child in linear.children]
    assert any(root.name.startswith("autograd::engine") for root in roots)


def test_the_step_after_the_warm_up_is_profiled(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: order.append("synchronize"))
    profiler: Any = SimpleNamespace(start=lambda: order.append("start"), stop=lambda: order.append("stop"))
    observer = ProfiledStep(profiler, 2)
    for step in range(4):
        order.append(str(step))
        observer.step_end(step)
    assert order == ["0", "1", "synchronize", "start", "2", "synchronize", "stop", "3"]


def _workload() -> Workload:
    return Workload.from_mapping({"model": {"id": "google-bert/bert-base-uncased"}, "gpu": "h200"})


def test_runs_in_a_separate_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def ran(command: list[str], **_: object) -> Any:
        workload_file, result_file = map(Path, command[-2:])
        assert json.loads(workload_file.read_text())["model"]["id"] == "google-bert/bert-base-uncased"
        result_file.write_text(json.dumps([mm(1.0, (8, 4))]))
        return SimpleNamespace(returncode=0, stderr="")

    monkeypatch.setattr(subprocess, "run", ran)
    assert profiling.profile(_workload()) == (mm(1.0, (8, 4)),)


def test_a_process_that_fails_is_reported() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU, which would be used")
    with pytest.raises(DeviceError, match=r"profiling failed[\s\S]*finds no GPU"):
        profiling.profile(_workload())
