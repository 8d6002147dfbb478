"""Which process predicts which training, and in which order."""

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, cast

import pytest

from trainatomy.runs.pools import KEPT_RUNS, RelatedProcesses


class Pool:
    """A process that ends a call when it is told to."""

    def __init__(self) -> None:
        self.futures: list[Future[Any]] = []

    def submit(self, function: Any, /, *arguments: Any) -> Future[Any]:
        self.futures.append(Future())
        return self.futures[-1]

    def end(self) -> None:
        self.futures[-1].set_result(None)


@pytest.fixture
def pools() -> list[Pool]:
    return [Pool(), Pool()]


@pytest.fixture
def processes(pools: list[Pool]) -> RelatedProcesses:
    return RelatedProcesses(cast("Any", pools))


def calls(pools: list[Pool]) -> list[int]:
    return [len(pool.futures) for pool in pools]


def test_a_training_goes_to_the_process_that_remembers_a_related_one(
    processes: RelatedProcesses, pools: list[Pool]
) -> None:
    processes.submit("a", print)
    processes.submit("b", print)
    for pool in pools:
        pool.end()
    processes.submit("b", print)
    assert calls(pools) == [1, 2]


def test_a_busy_process_is_left_alone_while_another_one_is_free(processes: RelatedProcesses, pools: list[Pool]) -> None:
    processes.submit("a", print)
    processes.submit("a", print)
    assert calls(pools) == [1, 1]


@pytest.mark.parametrize(
    ("waiting", "chosen"),
    [
        (["a", "c", "b"], 2),  # the free process remembers it
        (["a", "c", None], 1),  # the busy process is soon free for the first
        (["a", None], 1),
        (["a", "a"], 0),  # nothing else is left
    ],
)
def test_a_free_process_begins_with_what_it_is_ready_for(
    processes: RelatedProcesses, pools: list[Pool], waiting: list[str | None], chosen: int
) -> None:
    processes.submit("a", print)
    processes.submit("b", print)
    pools[1].end()
    assert processes.pick(waiting) == chosen


def test_a_process_forgets_the_training_that_it_used_least_recently(
    processes: RelatedProcesses, pools: list[Pool]
) -> None:
    processes.submit("busy", print)
    for number in (*range(KEPT_RUNS), 0, KEPT_RUNS):
        processes.submit(str(number), print)
        pools[1].end()
    assert processes.pick(["1", "0"]) == 1


def test_related_calls_go_to_the_same_process() -> None:
    both = threading.Barrier(2, timeout=60)

    def place_of(item: str) -> str:
        both.wait()
        return threading.current_thread().name

    with ThreadPoolExecutor(1) as one, ThreadPoolExecutor(1) as other:
        found = RelatedProcesses(cast("Any", [one, other])).call_all(place_of, "abba", "abba")
    assert found[0] == found[3] != found[1] == found[2]
