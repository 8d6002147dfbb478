"""What a script gives to other processes is done in its own."""

from __future__ import annotations

from pathlib import Path

import pytest
from script_types import RunScript

from trainatomy.scripts.job import Outcome

LOOP = """
import torch
model = torch.nn.Linear(16, 16).cuda()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for step in range(3):
    model(torch.ones(8, 16, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
WORK = """
import os
done, ready = [], []
def begin(value): ready.append(value)
def square(x):
    assert ready, "the initializer was not called"
    done.append(os.getpid())
    return x * x
def fail(x): raise ValueError(f"no {x}")
"""


@pytest.mark.parametrize(
    "pool",
    [
        "multiprocessing.Pool(2, begin, (1,))",
        "multiprocessing.get_context('spawn').Pool(initializer=begin, initargs=(1,))",
        "multiprocessing.pool.Pool(2, begin, (1,), 5)",
        "torch.multiprocessing.Pool(2, begin, (1,))",
        "multiprocess.Pool(2, begin, (1,))",
        "Own(2, begin, (1,))",
        "multiprocessing.Manager().Pool(2, begin, (1,))",
    ],
)
def test_the_work_of_a_pool_is_done_in_this_process(run_script: RunScript, pool: str) -> None:
    text = f"""
import multiprocessing, multiprocessing.pool, multiprocess, torch
class Own(multiprocessing.pool.Pool): pass
with {pool} as pool:
    assert pool.map(square, range(3)) == [0, 1, 4] and pool.apply(square, (3,)) == 9
    assert pool.starmap(pow, [(2, 3), (3, 2)]) == [8, 9]
    assert list(pool.imap(square, [5])) == [25] and pool.imap_unordered(square, [2]).next(timeout=1) == 4
    told = []
    late = pool.map_async(square, [6], callback=told.append)
    assert late.get(1) == [36] and late.ready() and late.successful() and told == [[36]]
    failed = pool.apply_async(fail, (7,), error_callback=told.append)
    assert not failed.successful() and str(told[1]) == "no 7"
    try: pool.map(fail, [8])
    except ValueError as error: assert str(error) == "no 8"
    else: raise AssertionError
    pool.close()
    pool.join()
assert ready == [1] and set(done) == {{os.getpid()}}
"""
    assert run_script(WORK + text + LOOP).message == ""


def test_executors_managers_and_threads(run_script: RunScript) -> None:
    text = """
import multiprocessing
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing.pool import ThreadPool
with ProcessPoolExecutor(2, initializer=begin, initargs=(1,)) as executor:
    assert list(executor.map(square, range(4), chunksize=2)) == [0, 1, 4, 9]
    assert [each.result() for each in as_completed([executor.submit(square, 5)])] == [25]
    assert isinstance(executor.submit(fail, 1).exception(), ValueError)
with multiprocessing.Manager() as manager:
    queue, shared, names = manager.Queue(), manager.dict(a=1), manager.list([1])
    queue.put(3)
    assert queue.get(timeout=1) == 3 and shared["a"] == 1 and names == [1]
    with manager.Lock(): manager.Event().set()
import threading
with ThreadPool(2) as pool:
    assert threading.get_ident() not in pool.map(lambda _: threading.get_ident(), range(4))
assert ready == [1] and set(done) == {os.getpid()}
"""
    assert run_script(WORK + text + LOOP).message == ""


def test_data_sets_are_mapped_filtered_made_and_saved(run_script: RunScript, tmp_path: Path) -> None:
    text = """
import datasets
def rows(starts):
    for start in starts: yield {"a": start}
made = datasets.Dataset.from_generator(rows, gen_kwargs={"starts": [1, 2, 3]}, num_proc=2)
mapped = made.map(lambda row: {"b": row["a"] + 1}, num_proc=2)
kept = mapped.filter(lambda row: row["a"] > 1, num_proc=2)
assert kept["b"][:] == [3, 4]
kept.save_to_disk("saved", num_proc=2)
assert datasets.load_from_disk("saved")["a"][:] == [2, 3]
kept.to_parquet("rows.parquet")
kept.to_json("rows.jsonl", num_proc=2)
for kind, file in (("parquet", "rows.parquet"), ("json", "rows.jsonl")):
    assert datasets.load_dataset(kind, data_files=[file] * 2, num_proc=2)["train"]["a"][:] == [2, 3] * 2
"""
    assert run_script(text + LOOP).message == ""
    assert {each.name for each in tmp_path.iterdir()} == {"train.py"}


@pytest.mark.parametrize("library", ["multiprocessing", "multiprocess", "torch.multiprocessing"])
def test_workers_that_end_with_the_script_are_threads(run_script: RunScript, library: str) -> None:
    """One that fills a queue without an end, as batches are augmented, and one that says when it is done."""
    text = f"""
import multiprocess, multiprocessing, torch, torch.multiprocessing
from multiprocessing.connection import wait
processes = {library}.get_context("spawn")

def produce(rows, stops):
    row = 0
    while not stops.is_set():
        rows.put((row, torch.full((8, 16), float(row))))
        row += 1

def pack(lengths, packed):
    packed.put([sum(lengths)])
    packed.put(None)
    raise SystemExit(3)

rows, packed, stops = processes.Queue(2), processes.SimpleQueue(), processes.Event()
producer = processes.Process(target=produce, args=(rows, stops), daemon=True)
packer = processes.Process(target=pack, args=([1, 2], packed), daemon=True)
producer.start()
packer.start()
wait([packer.sentinel])
packer.join()
assert packer.exitcode == 3 and not packer.is_alive() and producer.is_alive() and producer.exitcode is None
assert [packed.get(), packed.get()] == [[3], None]
assert [rows.get()[0] for _ in range(5)] == list(range(5)) and rows.get()[1][0, 0] == 5
stops.set()
producer.terminate()
producer.join()
assert not producer.is_alive()
rows.cancel_join_thread()
rows.close()
"""
    assert run_script(text + LOOP).message == ""


@pytest.mark.parametrize(
    ("text", "advice"),
    [
        ("import multiprocessing\nmultiprocessing.Process(target=print).start()", "Run the script as one process"),
        ("import multiprocess\nmultiprocess.Process(target=print).start()", "Run the script as one process"),
        (
            "import multiprocessing, torch\nworker = multiprocessing.Process(target=lambda: torch.ones(1).cuda(), "
            "daemon=True)\nworker.start()\nworker.join()",
            "Run the script as one process",
        ),
        (
            "__name__ = 'gymnasium.vector'\nimport multiprocessing\nmultiprocessing.Process(target=print).start()",
            "gymnasium needs none: use SyncVectorEnv",
        ),
    ],
)
def test_other_processes_are_refused_with_what_to_do(run_script: RunScript, text: str, advice: str) -> None:
    found: Outcome = run_script(text)
    assert "starts another process, and a dry run follows one.\n" + advice in found.message
