"""Reading PyTorch's memory history as an allocation trace, through a file."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from trainatomy.measurement.traces import history as histories
from trainatomy.measurement.traces.history import MAX_FRAMES, AllocationHistory, HistoryEvent, Note, shorten_stack
from trainatomy.measurement.traces.trace import to_trace
from trainatomy.results.trace import Event

if TYPE_CHECKING:
    from pathlib import Path
    from typing import TextIO

STACK = [
    {"filename": "/site/torch/nn/functional.py", "line": 12, "name": "linear"},
    {"filename": "/site/torch/nn/modules/module.py", "line": 99, "name": "_call_impl"},
    {"filename": "/site/transformers/models/bert/modeling_bert.py", "line": 7, "name": "forward"},
]


def entry(action: str, address: int, size: int, **more: object) -> dict[str, object]:
    return {"action": action, "addr": address, "size": size, "stream": 0, **more}


def history(*events: tuple[str, int, int]) -> AllocationHistory:
    return AllocationHistory({}, [HistoryEvent(*event, 0) for event in events])


def test_an_address_used_again_is_another_allocation() -> None:
    found = to_trace(
        history(
            ("segment_alloc", 64, 2**21),
            ("alloc", 64, 4),
            ("free_requested", 64, 4),
            ("free_completed", 64, 4),
            ("alloc", 64, 100),
        )
    )
    assert found.events == [Event("alloc", 0, 4), Event("free", 0, 0), Event("alloc", 1, 100)]
    assert len(found.origins) == 2


def test_a_release_from_before_the_history_is_left_out() -> None:
    assert to_trace(history(("free_completed", 64, 4))).events == []


def test_only_segments_returned_without_a_growth_were_an_emptied_cache() -> None:
    emptied = history(("segment_free", 1, 8), ("segment_free", 2, 8), ("alloc", 3, 4))
    assert [event.action for event in to_trace(emptied).events] == ["empty_cache", "alloc"]
    retried = history(("segment_free", 1, 8), ("segment_free", 2, 8), ("segment_alloc", 3, 8), ("alloc", 3, 4))
    assert [event.action for event in to_trace(retried).events] == ["alloc"]


def test_notes_are_placed_between_the_right_allocations(tmp_path: Path) -> None:
    trace = [
        entry("segment_alloc", 64, 2**21),
        entry("alloc", 64, 4),
        entry("alloc", 128, 8),
        entry("free_requested", 64, 4),
        entry("free_completed", 64, 4),
        entry("alloc", 64, 100),
    ]
    notes = [
        Note(2, "loaded", -1, {"weight": [128, 999]}),
        Note(3, "step", 0, {}),
        Note(3, "forward", 0, {}),
        Note(4, "forward end", 0, {"gradient": [64]}),
    ]
    histories.write(histories.from_snapshot({"name": "x"}, trace, notes), tmp_path / "tape.json.gz")
    found = to_trace(histories.read(tmp_path / "tape.json.gz"))
    assert found.marks == [(2, "loaded", -1), (3, "step", 0), (3, "forward", 0), (4, "forward end", 0)]
    assert found.origins == [("", "", "load", -1), ("", "", "load", -1), ("", "", "forward", 0)]
    assert found.labels == {1: "weight", 2: "gradient"}


def test_without_notes_everything_is_one_step() -> None:
    assert to_trace(history(("alloc", 1, 4))).origins == [("", "", "other", 0)]


def test_stacks_are_stored_once_and_reach_the_origins(tmp_path: Path) -> None:
    trace = [entry("alloc", 1, 4, frames=STACK), entry("alloc", 2, 4), entry("alloc", 3, 4, frames=STACK)]
    histories.write(histories.from_snapshot({}, trace), tmp_path / "tape.json.gz")
    read = histories.read(tmp_path / "tape.json.gz")
    assert read.stacks == ["nn/functional.py:12 linear < bert/modeling_bert.py:7 forward"]
    assert [bool(origin.operation) for origin in to_trace(read).origins] == [True, False, True]


def test_a_disk_that_is_full_leaves_the_file_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "tape.json.gz"
    histories.write(history(("alloc", 1, 4)), path)
    before = path.read_bytes()

    def full(_: object, file: TextIO, **__: object) -> None:
        file.write("a part")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("json.dump", full)
    with pytest.raises(OSError, match="No space left"):
        histories.write(history(("alloc", 1, 8)), path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_an_out_of_memory_event_has_no_address() -> None:
    oom = {"action": "oom", "device_free": 5, "size": 10, "stream": 0}
    assert histories.from_snapshot({}, [oom]).events == [HistoryEvent("oom", 5, 10, 0)]


@pytest.mark.parametrize(
    ("name", "kept"),
    [("at::native::layer_norm_cuda(at::Tensor const&)", True), ("c10::cuda::CUDACachingAllocator::malloc", False)],
)
def test_only_informative_cpp_frames_are_kept(name: str, kept: bool) -> None:
    assert bool(shorten_stack([{"filename": "??", "line": 0, "name": name}])) is kept


def test_a_deep_stack_is_cut() -> None:
    deep = [{"filename": f"/a/f{index}.py", "line": index, "name": "g"} for index in range(40)]
    assert shorten_stack(deep).count(" < ") == MAX_FRAMES - 1
