"""``trainatomy data``: DataLoaders that are slow on purpose, and what is said of them."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

import trainatomy
from trainatomy.api.loading import loader_of
from trainatomy.cli import main
from trainatomy.errors import FactoryError, WorkloadError
from trainatomy.measurement import loader as reports
from trainatomy.measurement.loader import time_settings, with_settings
from trainatomy.reporters import run_sentences
from trainatomy.results.loader import LoaderReport, LoaderSettings, LoaderTiming, StepToFeed

PLAIN = LoaderSettings(0, None, pin_memory=False, persistent_workers=False)


SMALL = {"num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 32, "vocab_size": 99}


class Slow(Dataset[torch.Tensor]):
    """Dataset that sleeps over each sample."""

    def __init__(self, seconds: float = 0.02, size: int = 1000) -> None:
        self.seconds, self.size = seconds, size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(self.seconds)
        return torch.zeros(256)


class Stream(IterableDataset[torch.Tensor]):
    """Dataset without an index."""

    def __iter__(self) -> Any:
        return iter(torch.zeros(64, 4))


def workers(count: int) -> LoaderSettings:
    return LoaderSettings(count, 2, pin_memory=False, persistent_workers=True)


@pytest.mark.timed
def test_enough_workers_feed_a_step_that_one_thread_cannot() -> None:
    loader = DataLoader(Slow(), batch_size=4)
    found = time_settings(loader, [workers(4)], StepToFeed(0.06, 0.01), name="slow", seconds=0.4)
    alone, four = found.timings
    assert alone.batch_seconds == alone.fetch_seconds and 0.08 <= (alone.batch_seconds or 0) < 0.2
    assert 0.015 <= (four.batch_seconds or 0) < 0.06
    assert (four.fetch_seconds or 1) < 0.03 and (four.first_batch_seconds or 0) >= 0.08
    assert (alone.suffices, four.suffices, found.best) == (False, True, 1)
    assert (found.batch_bytes, found.batch_size) == (4 * 1024, 4)
    assert four.shared_bytes == (4 * 3 + 2) * 4096 and (four.worker_bytes or 0) > 2**20
    assert not torch.multiprocessing.active_children()


@pytest.mark.timed
def test_a_short_dataset_is_read_again_and_again() -> None:
    loader = DataLoader(Slow(0.002, size=12), batch_size=2)
    found = time_settings(loader, [PLAIN], None, name="short", seconds=0.1)
    assert 0.004 <= (found.timings[0].batch_seconds or 0) < 0.03
    assert (found.best, found.notes, found.timings[0].step_seconds) == (None, ("no step",), None)


def test_batches_that_do_not_fit_into_shared_memory_are_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reports, "free_shared_memory", lambda: 10_000)
    loader = DataLoader(Slow(0.0), batch_size=4)
    found = time_settings(loader, [PLAIN, workers(2)], StepToFeed(1.0), name="slow", seconds=0.05)
    assert [one.problem for one in found.timings] == ["", "shared memory"] and found.best == 0
    (said,) = [line for line in run_sentences.notes(found) if "/dev/shm" in line]
    assert "9.8 KiB left" in said and "32.0 KiB" in said and "--shm-size" in said


def test_batches_on_the_gpu_are_not_handed_to_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reports, "has_cuda_tensors", lambda batch: True)
    found = time_settings(DataLoader(Slow(0.0), batch_size=1), [workers(2)], None, name="slow", seconds=0.05)
    assert found.timings[1].problem == "cuda tensors"
    assert any("on the GPU" in line for line in run_sentences.notes(found))


def test_a_dataset_that_uses_cuda_before_the_workers_fork_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([False, True])
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: next(answers))
    found = time_settings(DataLoader(Slow(0.0), batch_size=1), [PLAIN], None, name="slow", seconds=0.02)
    assert "cuda initialised" in found.notes
    assert any("forked subprocess" in line for line in run_sentences.notes(found))


@pytest.mark.parametrize(
    ("count", "batch", "fetch", "step", "suffices"),
    [
        (0, 0.03, 0.03, 0.1, True),  # behind the GPU's 100 ms: 60 ms of launches and 30 ms of data
        (0, 0.05, 0.05, 0.11, False),
        (2, 0.09, 0.001, 0.1, True),
        (2, 0.12, 0.001, 0.12, False),
        (2, 0.05, 0.06, 0.12, False),
    ],
)
def test_the_step_with_a_loader(count: int, batch: float, fetch: float, step: float, suffices: bool) -> None:
    timing = LoaderTiming(workers(count) if count else PLAIN, "", 0.1, batch, fetch)
    found = reports._rated(timing, StepToFeed(0.1, 0.06))
    assert (found.step_seconds, found.suffices) == (pytest.approx(step), suffices)


def test_accumulated_batches_count_each() -> None:
    found = reports._rated(LoaderTiming(workers(1), "", 0.1, 0.03, 0.001), StepToFeed(0.1, 0.06, batches=4))
    assert found.step_seconds == pytest.approx(0.12)


def test_a_loader_keeps_its_batches_whatever_its_workers() -> None:
    loader = DataLoader(Slow(0.0, 10), batch_size=3, drop_last=True, shuffle=True, collate_fn=torch.stack)
    other = with_settings(loader, workers(1))
    assert other.batch_sampler is loader.batch_sampler and other.collate_fn is torch.stack
    assert (other.num_workers, other.prefetch_factor, other.persistent_workers) == (1, 2, True)
    streamed = with_settings(DataLoader(Stream(), batch_size=16, drop_last=True), PLAIN)
    assert (streamed.batch_size, streamed.drop_last) == (16, True) and len(list(streamed)) == 4


def test_what_a_dataset_may_be() -> None:
    loader = DataLoader(Slow())
    assert loader_of(lambda: loader, None) is loader
    assert loader_of(lambda: [torch.zeros(1)] * 4, 2).batch_size == 2
    with pytest.raises(WorkloadError, match="batch_size"):
        loader_of(Slow(), None)
    assert loader_of(Slow, 2).batch_size == 2


@pytest.mark.parametrize(
    "made", [5, "/home/me", b"x", {"a": 1}, (torch.zeros(3), torch.zeros(3)), None, iter([1]), {1, 2}, torch]
)
def test_what_is_no_data_set_is_refused(made: object) -> None:
    with pytest.raises(FactoryError, match=f"gives {type(made).__name__}, which is no data set"):
        loader_of(lambda: made, 2)


def test_a_function_of_the_standard_library_is_no_data_set(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "--dataset", "os:getcwd", "--model", "gpt2"]) == WorkloadError.exit_code
    assert "os:getcwd belongs to Python itself" in capsys.readouterr().err


def test_a_workload_is_timed_with_its_own_batches() -> None:
    workload = trainatomy.Workload.from_mapping(
        {
            "gpu": "h200",
            "model": {"class": "BertForSequenceClassification", "config": SMALL},
            "data": {"sequence_length": 16},
            "train": {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 3},
        }
    )
    found = trainatomy.time_loader(workload, workers=(0,), seconds=0.1)
    assert found.step is not None and found.step.predicted and found.step.batches == 3
    assert found.batch_size == 2 and found.batch_bytes > 2 * 16 * 8
    assert "random samples" in found.notes and found.timings[0].step_seconds is not None


def report(best: int | None) -> LoaderReport:
    timings = (
        LoaderTiming(PLAIN, "", 0.08, 0.08, 0.08, 0, 0, 0.14, suffices=False),
        LoaderTiming(workers(2), "", 1.2, 0.041, 0.001, 14 * 4096, 2**28, 0.1, suffices=best == 1),
    )
    return LoaderReport("mine", 4, 4096, StepToFeed(0.1, 0.06), timings, best, 16, 2**30, "fork")


def test_the_answer_says_how_many_workers_suffice() -> None:
    assert run_sentences.answer(report(1)) == (
        "The loader keeps up with 2 workers: 41 ms per batch; a step of 100 ms takes 1 batch"
    )
    assert any("num_workers=2, prefetch_factor=2" in line for line in run_sentences.notes(report(1)))
    none = replace(report(None), timings=report(None).timings[:1])
    assert run_sentences.answer(none) == (
        "The loader does not keep up: without workers a step takes 140 ms instead of 100 ms, 40.0 % longer"
    )
    unknown = replace(report(None), step=None, notes=("no step",))
    assert run_sentences.answer(unknown) == "The quickest: 41 ms per batch with 2 workers"


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "import torch\nfrom torch.utils.data import DataLoader\n"
        "def make():\n    return DataLoader([torch.zeros(4)] * 64, batch_size=8)\n"
    )
    arguments = ["data", "--dataset", f"{file}:make", "--workers", "0", "--seconds", "0.1", "--step-seconds", "0.5"]
    assert main([*arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["schema"] == "trainatomy/loader/1" and found["best"] == 0
    assert found["timings"][0]["suffices"] and found["batch_bytes"] == 8 * 16
    assert main(arguments) == 0
    assert "keeps up without workers" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train.py"], "--dataset train.py:FUNCTION"),
        ([], "name a workload, or a function"),
        (["--dataset", "torch:zeros", "--workers", "a"], "--workers a: 'a' is not a whole number"),
    ],
)
def test_wrong_arguments(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", *arguments]) == 2
    assert message in capsys.readouterr().err
