"""Timelines worked out by hand: each operation takes 1 s to launch unless a test says otherwise."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from trainatomy.catalog.machines import reference_host
from trainatomy.operators.cost import recurrence
from trainatomy.results.operations import Array, Call, Operation, Operations
from trainatomy.timing import one_stream, streams, timeline
from trainatomy.timing.host_costs import cpu_costs
from trainatomy.timing.one_stream import StepTimeline, end_within
from trainatomy.timing.timeline import LaunchCosts, replay_step

COSTS = replace(cpu_costs(reference_host().microseconds), launch_delay=0.0, read=0.0)
NO_LOOP = {"step": 0.0, "micro_step": 0.0}
VALUE = Array((), (), "float32", 4, 0)
KERNEL = Call("aten::mul", (VALUE,), (VALUE,))
READ = Call("aten::_local_scalar_dense", (VALUE,), ())


def replay(
    *rows: tuple[int, float],
    launch: float = 1.0,
    dependencies: dict[int, tuple[int, ...]] | None = None,
    reads: tuple[int, ...] = (),
    synchronized: tuple[int, ...] = (),
    cpu_waits: dict[int, tuple[int, ...]] | None = None,
    launch_delay: float = 0.0,
) -> StepTimeline:
    """Replay operations of (stream, GPU seconds); operations in ``reads`` are read by the CPU and run no kernel."""
    calls = [READ if index in reads else KERNEL for index in range(len(rows))]
    operations = [Operation(0, index, "forward", "", 0, 1, (), stream) for index, (stream, _) in enumerate(rows)]
    kernels = [(seconds, int(seconds > 0)) for _, seconds in rows]
    step = Operations(calls, operations, dependencies=dependencies or {}, cpu_waits=cpu_waits or {})
    costs = replace(COSTS, launch_delay=launch_delay)
    return replay_step(step, kernels, LaunchCosts([launch] * len(rows), costs, NO_LOOP, synchronized))


def test_a_gpu_bound_step_takes_its_kernels() -> None:
    found = replay((0, 10.0), (0, 20.0), (0, 30.0))
    assert (found.seconds, found.gpu_seconds, found.cpu_seconds) == (60.0, 60.0, 3.0)
    assert found.phase_gpu_seconds == {"forward": 60.0}


def test_a_cpu_bound_step_takes_its_launches() -> None:
    found = replay((0, 0.25), (0, 0.25), (0, 0.25), launch=2.0)
    assert (found.seconds, found.gpu_seconds, found.cpu_seconds) == (6.0, 0.75, 6.0)


@pytest.mark.parametrize("streams", [(0, 0), (0, 1)])
def test_the_cpu_waits_for_what_the_training_synchronises_with(streams: tuple[int, int]) -> None:
    rows = [(streams[0], 10.0), (streams[1], 1.0)]
    apart = replay(*rows, launch=4.0)
    waited_for = replay(*rows, launch=4.0, cpu_waits={1: (0,)})
    assert apart.seconds == (11.0 if streams == (0, 0) else 10.0)
    assert waited_for.seconds == 4.0 + 10.0 + 4.0


@pytest.mark.parametrize(("on_gpu", "step"), [(1.0, 4.0), (2.0, 4.0), (9.0, 9.0)])
def test_kernels_of_a_recurrent_layer_run_while_others_are_launched(on_gpu: float, step: float) -> None:
    """A layer of seven kernels takes 4 s to launch, the last 3.5 s of them while its first kernels may run."""
    arrays = [Array(shape, (), "float16", 2, 0) for shape in ((2, 1, 512), (1, 1, 512), (512, 512), (512, 512))]
    numbers = (("mode", "RNN"), ("num_layers", "1"), ("bidirectional", "False"))
    layer = Call("aten::_cudnn_rnn", tuple(arrays), (arrays[0],), (), numbers)
    assert recurrence.launches(layer) == 7
    described = Operations([layer], [Operation(0, 0, "forward", "", 0, 1)])
    counted = dict.fromkeys(("step", "follower", "part", "misaligned"), 0.0)
    costs = replace(COSTS, recurrent_launch={"forward": {"kernel": 0.5, **counted}})
    for replayed in (timeline.replay_one_stream, streams.replay_streams):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(timeline, "replay_one_stream", replayed)
            found = replay_step(described, [(on_gpu, 7)], LaunchCosts([4.0], costs, NO_LOOP))
        assert (found.seconds, found.gpu_seconds, found.cpu_seconds) == (step, on_gpu, 4.0)


@pytest.mark.parametrize(
    ("begin", "seconds", "ready", "end"),
    [(0.0, 1.0, 8.0, 8.0), (0.0, 8.0, 1.0, 8.0), (0.0, 4.0, 5.0, 5.0), (1.0, 4.0, 0.5, 5.0)],
)
def test_kernels_end_with_the_slower_of_their_launches_and_the_gpu(
    begin: float, seconds: float, ready: float, end: float
) -> None:
    assert end_within(begin, seconds, ready, alternates=False) == end


def test_two_directions_take_longer_where_neither_the_cpu_nor_the_gpu_is_much_slower() -> None:
    even = end_within(2.0, 4.0, 6.0, alternates=True) - 2.0
    assert even == pytest.approx(4.0 * 2 ** (1 / 4))
    for seconds, launching in ((1.0, 4.0), (4.0, 1.0)):
        assert 4.0 < end_within(2.0, seconds, 2.0 + launching, alternates=True) - 2.0 < 4.01
    assert end_within(2.0, 4.0, 1.0, alternates=True) == 6.0  # all kernels are queued


@pytest.mark.parametrize("directions", [1, 2])
def test_only_two_directions_are_launched_in_turns(directions: int) -> None:
    """A layer whose kernels take as long as their launches: 3.5 of 4 s pass after the first may run."""
    numbers = (("mode", "RNN"), ("num_layers", "1"), ("bidirectional", str(directions == 2)))
    weights = [(512, 512)] * (2 * directions)
    arrays = [Array(shape, (), "float16", 2, 0) for shape in ((2, 1, 512), (directions, 1, 512), *weights)]
    layer = Call("aten::_cudnn_rnn", tuple(arrays), (arrays[0],), (), numbers)
    counted = dict.fromkeys(("step", "follower", "part", "misaligned"), 0.0)
    each = 3.5 / recurrence.launches(layer)
    costs = replace(COSTS, recurrent_launch={"forward": {"kernel": each, **counted}})
    for replayed in (timeline.replay_one_stream, streams.replay_streams):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(timeline, "replay_one_stream", replayed)
            described = Operations([layer], [Operation(0, 0, "forward", "", 0, 1)])
            found = replay_step(described, [(3.5, 7)], LaunchCosts([4.0], costs, NO_LOOP))
        first = 0.5 + 3.5 * 2 ** (1 / 4)
        waiting = 3.5 - (first - 4.5)  # of the second step's launches, when the first step's kernels are done
        assert found.seconds == pytest.approx(4.0 if directions == 1 else (3.5**4 + waiting**4) ** (1 / 4))


def test_two_streams_overlap() -> None:
    """The first runs from 1 to 31, the second from 2 to 32; the next step's kernels wait for their own stream only."""
    found = replay((0, 30.0), (1, 30.0))
    assert (found.seconds, found.cpu_seconds) == (30.0, 2.0)
    one_stream = replay((0, 30.0), (0, 30.0))
    assert (one_stream.seconds, one_stream.gpu_seconds) == (60.0, 60.0)


def test_the_gpu_is_busy_once_while_streams_overlap() -> None:
    """In the second step stream 0 is busy from 31 to 61 and stream 1 from 32 to 62: 31 s, not 60."""
    found = replay((0, 30.0), (1, 30.0))
    assert found.gpu_seconds == 31.0
    assert found.phase_gpu_seconds == {"forward": 60.0}


def test_a_dependency_serialises_streams() -> None:
    """Stream 1 starts when stream 0 is done, at 31, and is done at 61; the second step adds 30 s on each stream."""
    overlapping = replay((0, 30.0), (1, 30.0), reads=())
    dependent = replay((0, 30.0), (1, 30.0), dependencies={1: (0,)})
    both_ways = replay((0, 30.0), (1, 30.0), dependencies={1: (0,), 0: (1,)})
    assert overlapping.seconds == 30.0
    assert dependent.seconds == 30.0, "streams of consecutive steps still overlap"
    assert both_ways.seconds == 60.0 == both_ways.gpu_seconds


def test_a_dependency_takes_effect_within_the_step() -> None:
    """A communication of 10 s on stream 1 between two kernels of 5 s, read at the end."""
    rows = ((0, 5.0), (1, 10.0), (0, 5.0), (0, 0.0))
    overlapped = replay(*rows, launch=0.0, reads=(3,), synchronized=(0,))
    waited_for = replay(*rows, launch=0.0, reads=(3,), synchronized=(0,), dependencies={1: (0,), 2: (1,)})
    assert overlapped.seconds == 10.0
    assert waited_for.seconds == 20.0


def test_a_read_waits_for_its_own_stream() -> None:
    """The CPU waits for the kernel of 5 s and then launches another of 1 s; the 50 s on stream 1 go on meanwhile."""
    own = replay((1, 50.0), (0, 5.0), (0, 0.0), (0, 1.0), launch=0.0, reads=(2,), synchronized=(0,))
    other = replay((1, 50.0), (0, 5.0), (1, 0.0), (0, 1.0), launch=0.0, reads=(2,), synchronized=(0,))
    assert own.seconds == 50.0
    assert other.seconds == 51.0


def test_freed_memory_waits_for_all_streams() -> None:
    waiting = replay((0, 5.0), (1, 50.0), (0, 1.0), launch=0.0, synchronized=(0, 2))
    assert waiting.seconds == 51.0


def test_a_kernel_starts_after_the_launch_delay() -> None:
    assert replay((0, 1.0), (0, 0.0), launch=0.0, reads=(1,), launch_delay=0.5).seconds == 1.5


def test_each_stream_has_a_launch_queue_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check a queue of two kernels: the third launch on a stream waits for the first kernel, done at 10."""
    for module in (one_stream, streams):
        monkeypatch.setattr(module, "LAUNCH_QUEUE_DEPTH", 2)
    full = replay((0, 10.0), (0, 10.0), (0, 10.0), (1, 25.0), launch=0.0, synchronized=(0,))
    spread = replay((0, 10.0), (0, 10.0), (1, 25.0), launch=0.0, synchronized=(0,))
    assert full.seconds == 35.0
    assert spread.seconds == 25.0


@pytest.mark.parametrize("replayed", [timeline.replay_one_stream, streams.replay_streams])
def test_the_cpu_goes_on_while_the_last_kernels_of_a_long_operation_are_queued(
    monkeypatch: pytest.MonkeyPatch, replayed: Any
) -> None:
    """Eight kernels run from 1 to 9; at 7 the queue holds the last two, and the next launch takes 3 s."""
    for module in (one_stream, streams):
        monkeypatch.setattr(module, "LAUNCH_QUEUE_DEPTH", 2)
    monkeypatch.setattr(timeline, "replay_one_stream", replayed)
    described = [Operation(index, index, "forward", "", 0, 1) for index in range(2)]
    launch = LaunchCosts([1.0, 3.0], COSTS, NO_LOOP, {0})
    found = replay_step(Operations([KERNEL] * 2, described), [(8.0, 8), (0.5, 1)], launch)
    assert (found.seconds, found.gpu_seconds, found.cpu_seconds) == (10.5, 8.5, 4.0)


def test_streams_are_replayed_like_one_where_only_one_is_used() -> None:
    rows = [(0, 0.1 * (index % 7)) for index in range(50)]
    other = [(5, seconds) for _, seconds in rows]
    assert replay(*rows, launch=0.17, reads=(20,)) == replay(*other, launch=0.17, reads=(20,))


def test_a_step_without_operations_takes_only_the_time_of_the_loop() -> None:
    found = replay_step(Operations(), [], LaunchCosts([], COSTS, {"step": 2.0, "micro_step": 3.0}))
    assert (found.seconds, found.gpu_seconds) == (0.0, 0.0)


def unrolled(*repeats: int) -> list[int]:
    return Operations([], [Operation(0, 0, "forward", "", 0, count) for count in repeats]).unrolled()


def test_a_micro_batch_is_repeated_as_a_whole() -> None:
    assert unrolled(1, 1, 3, 3, 1) == [0, 1, 2, 3, 2, 3, 2, 3, 4]


def test_unrolling_single_runs_nothing_and_several_blocks() -> None:
    assert unrolled(1, 1) == [0, 1]
    assert unrolled() == []
    assert unrolled(2, 3) == [0, 0, 1, 1, 1]


def test_one_stream_is_replayed_as_several_are(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(0)
    for module in (one_stream, streams):
        monkeypatch.setattr(module, "LAUNCH_QUEUE_DEPTH", 5)
    calls = [KERNEL, READ, KERNEL._replace(name="aten::view")]
    kernels = [(2.7, 2), (0.0, 0), (0.1, 0)]
    phases = ("forward", "backward", "optimizer")
    for _ in range(20):
        described = [
            Operation(0, draw.choice((0, 0, 0, 1, 2)), draw.choice(phases), "", index // 9, 1 + 2 * (9 <= index < 18))
            for index in range(30)
        ]
        step = Operations(calls, described)
        launches = [draw.random() * 3 for _ in described]
        costs = replace(COSTS, launch_delay=0.3, read=0.7)
        loop = {"step": 1.9, "micro_step": 0.4}
        found = replay_step(step, kernels, LaunchCosts(launches, costs, loop, {3, 20}))
        with monkeypatch.context() as patch:
            patch.setattr(timeline, "replay_one_stream", streams.replay_streams)
            assert replay_step(step, kernels, LaunchCosts(launches, costs, loop, {3, 20})) == found


@pytest.mark.parametrize("reads", [0, 1])
@pytest.mark.parametrize("launch", [0.1, 2.0, 30.0])
def test_many_repetitions_are_replayed_as_one_by_one(
    monkeypatch: pytest.MonkeyPatch, launch: float, reads: int
) -> None:
    """Bound by the GPU, by both in turns, and by the CPU; with and without a read in each repetition."""
    draw = random.Random(1)
    for module in (one_stream, streams):
        monkeypatch.setattr(module, "LAUNCH_QUEUE_DEPTH", 50)
    kernels, loop = [(2.7, 2), (0.0, 0), (0.1, 1)], {"step": 1.9, "micro_step": 0.4}
    replayed: list[one_stream._Pass] = []
    launch_pass = one_stream._OneStream._launch

    def counted(self: one_stream._OneStream, one: one_stream._Pass) -> None:
        replayed.append(one)
        launch_pass(self, one)

    monkeypatch.setattr(one_stream._OneStream, "_launch", counted)
    for _ in range(5):
        kinds = [draw.choice((0, 2)) for _ in range(20)] + [1] * reads + [0, 2, 0]
        described = [
            Operation(0, kind, "backward", "", min(index // 9, 2), 1 + 200 * (9 <= index < 21))
            for index, kind in enumerate(kinds)
        ]
        step = Operations([KERNEL, READ, KERNEL], described)
        launches = [draw.random() * launch for _ in described]
        found = replay_step(step, kernels, LaunchCosts(launches, COSTS, loop))
        assert len(replayed) < 100
        replayed.clear()
        with monkeypatch.context() as patch:
            patch.setattr(timeline, "replay_one_stream", streams.replay_streams)
            every = replay_step(step, kernels, LaunchCosts(launches, COSTS, loop))
        assert (found.seconds, found.cpu_seconds, found.gpu_seconds) == pytest.approx(
            (every.seconds, every.cpu_seconds, every.gpu_seconds), rel=1e-9
        )
        assert found.phase_gpu_seconds == pytest.approx(every.phase_gpu_seconds, rel=1e-9)


def test_communication_is_exposed_where_nothing_else_runs() -> None:
    reduce_ = KERNEL._replace(name="nccl::all_reduce")
    view = KERNEL._replace(name="aten::view")
    described = [
        Operation(0, 0, "backward", "", 0, 1),
        Operation(0, 1, "backward", "", 0, 1, stream=-1),
        Operation(0, 0, "backward", "", 0, 1),
        Operation(0, 2, "optimizer", "", 0, 1),
        Operation(0, 0, "optimizer", "", 0, 1),
    ]
    # The collective waits for the first kernel, and a view for the collective: what comes after the view has to wait.
    step = Operations([KERNEL, reduce_, view], described, dependencies={1: (0,), 3: (1,)})
    costs, loop = replace(COSTS, launch_delay=0.0), {"step": 0.0, "micro_step": 0.0}
    found = replay_step(step, [(10.0, 1), (25.0, 1), (0.0, 0)], LaunchCosts([0.0] * 5, costs, loop))
    assert found.seconds == pytest.approx(10 + 25 + 10)
    assert found.communication_seconds == 25.0
    assert found.exposed_seconds == pytest.approx(25 - 10)
    assert found.gpu_seconds == pytest.approx(45)


@pytest.mark.parametrize(
    ("on_gpu", "factor"),
    [(0.0, 1.0), (7.0, 1.0 + 0.5 * 3 / 10), (14.0, 1.5), (1000.0, 1.5)],
    ids=["no wait", "a short one", "a long one", "no longer than that"],
)
def test_the_loop_takes_longer_after_a_wait_for_the_gpu(
    monkeypatch: pytest.MonkeyPatch, on_gpu: float, factor: float
) -> None:
    """A kernel of ``on_gpu``, launched at 1 s, is read at 5 s, after three views; the loop's work takes 8 s."""
    view = KERNEL._replace(name="aten::view")
    kinds = [(0, "backward"), (2, "backward"), (2, "backward"), (2, "backward"), (1, "other"), (2, "optimizer")]
    step = Operations([KERNEL, READ, view], [Operation(0, kind, phase, "", 0, 1) for kind, phase in kinds])
    costs = replace(COSTS, after_wait=0.5, long_wait=10.0)
    kernels, loop = [(on_gpu, 1), (0.0, 0), (0.0, 0)], {"step": 8.0, "micro_step": 0.0}
    for replayed in (timeline.replay_one_stream, streams.replay_streams):
        monkeypatch.setattr(timeline, "replay_one_stream", replayed)
        found = replay_step(step, kernels, LaunchCosts([1.0] * 6, costs, loop))
        assert found.cpu_seconds == pytest.approx(6.0 + 8.0 * factor)
