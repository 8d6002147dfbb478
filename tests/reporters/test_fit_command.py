"""``trainatomy fit``: what its options ask of the search, and what it does with the answer."""

from __future__ import annotations

import json
import signal
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import pytest

import trainatomy.api
from trainatomy.cli import exits, main
from trainatomy.requests.fitting import FitRequest
from trainatomy.results.comparison import Comparison
from trainatomy.results.fit import Fit, FitAcross
from trainatomy.runs.comparison import ComparisonInterrupted

GPT2 = ("fit", "--model", "gpt2", "--json")
Calls = list[tuple[str, Any, FitRequest, tuple[Any, ...]]]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch, fit: Fit, nothing_fits: Fit, across: FitAcross) -> Calls:
    """Return the searches that are asked for; each is answered at once."""
    calls: Calls = []
    answers = {"fit_gpus": across, "why_out_of_memory": nothing_fits.shortage}

    def search(training: Any, request: FitRequest, progress: Any) -> Fit:
        calls.append(("search_settings", training.what, request, ()))
        return fit

    def answer(name: str, workload: Any, *gpus: Any, request: FitRequest, progress: Any, **costs: Any) -> Any:
        calls.append((name, workload, request, (*gpus, *costs.values())))
        return answers[name]

    monkeypatch.setattr(trainatomy.api, "search_settings", search)
    for name in answers:
        monkeypatch.setattr(trainatomy.api, name, partial(answer, name))
    return calls


def test_options_become_one_request(calls: Calls, tmp_path: Path) -> None:
    options = ["--gpu", "t4", "--allow", "lora,precision", "--keep", "gradient-checkpointing", "--headroom", "10%"]
    more = ["--effective-batch-size", "32", "--exhaustive", "--jobs", "3", "--trust-remote-code"]
    assert main([*GPT2, *options, *more]) == 0
    ((name, workload, asked, _),) = calls
    assert (name, asked.maximize, asked.jobs) == ("search_settings", "throughput", 3)
    assert workload.gpu == "t4" and asked.trust_remote_code
    assert (asked.effective_batch_size, asked.headroom, asked.exhaustive) == (32, 0.1, True)
    assert (asked.allow, asked.keep) == (("lora", "precision"), ("gradient_checkpointing",))


@pytest.mark.parametrize(
    ("options", "name", "rest"),
    [
        (("--maximize", "batch", "--gpu", "t4"), "search_settings", ()),
        (("--why-oom", "--gpu", "t4"), "why_out_of_memory", ()),
        (("--gpu", "all"), "fit_gpus", (None, {})),
        (("--gpu", "t4, h100"), "fit_gpus", (["t4", "h100"], {})),
        (("--price", "h100=2.9,t4=0.3"), "fit_gpus", (["h100", "t4"], {"h100": 2.9, "t4": 0.3})),
        (("--gpu", "all", "--exhaustive"), "fit_gpus", (None, {})),
    ],
)
def test_each_mode_is_its_own_search(calls: Calls, options: tuple[str, ...], name: str, rest: Any) -> None:
    assert main([*GPT2, *options]) == 0
    ((asked, _, request, others),) = calls
    assert (asked, others) == (name, rest)
    assert request.exhaustive == ("--exhaustive" in options)
    assert request.maximize == ("batch" if "--maximize" in options else "throughput")


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (("--maximize", "batch"), ("--why-oom",)),
        (("--why-oom",), ("--measure", "2")),
        (("--maximize", "batch"), ("--exhaustive",)),
        (("--why-oom",), ("--exhaustive",)),
        (("--why-oom",), ("--allow", "lora")),
        (("--why-oom",), ("--effective-batch-size", "8")),
        (("--measure", "1"), ("--gpu", "t4,h100")),
    ],
)
def test_options_that_exclude_each_other(
    calls: Calls, first: tuple[str, ...], second: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*GPT2, *first, *second]) == 2
    named = "several GPUs or --price" if second[0] == "--gpu" else second[0]
    assert f"{first[0]} and {named} cannot be combined" in " ".join(capsys.readouterr().err.split())
    assert not calls


def test_check_and_output_follow_the_answer(
    calls: Calls, monkeypatch: pytest.MonkeyPatch, nothing_fits: Fit, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    best = tmp_path / "best.yaml"
    assert main([*GPT2, "--gpu", "t4", "--check", "--output", str(best)]) == 0
    assert "gradient_accumulation_steps" in best.read_text() and json.loads(capsys.readouterr().out)["best"]
    monkeypatch.setattr(trainatomy.api, "search_settings", lambda *_: nothing_fits)
    none = tmp_path / "none.yaml"
    assert main([*GPT2, "--gpu", "t4", "--output", str(none)]) == 0
    assert not none.exists() and "there are no best settings" in capsys.readouterr().err
    assert main([*GPT2, "--gpu", "t4", "--check"]) == 8
    monkeypatch.setattr(trainatomy.api, "search_settings", lambda *_: replace(nothing_fits, interrupted=True))
    assert main([*GPT2, "--gpu", "t4", "--check"]) == 130


def test_the_best_are_measured_as_they_were_predicted(
    calls: Calls, monkeypatch: pytest.MonkeyPatch, fit: Fit, tmp_path: Path
) -> None:
    seen: list[Any] = []

    def measure_fit(found: Fit, count: int, request: Any, progress: Any, processes: Any) -> Fit:
        seen.append((found, count, request))
        return found

    monkeypatch.setattr(trainatomy.api, "measure_fit", measure_fit)
    assert main([*GPT2, "--gpu", "t4", "--measure", "2", "--records", str(tmp_path), "--trust-remote-code"]) == 0
    ((found, count, request),) = seen
    assert found is fit and count == 2
    assert request.predicting == calls[0][2].predicting and request.trust_remote_code
    assert request.store == str(tmp_path) and request.command.startswith("trainatomy")


def test_ctrl_c_while_the_best_are_measured_shows_what_was_found(
    calls: Calls, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measure_fit(*_: Any, **__: Any) -> NoReturn:
        raise interrupt

    monkeypatch.setattr(trainatomy.api, "measure_fit", measure_fit)
    for interrupt in (KeyboardInterrupt(), ComparisonInterrupted(Comparison(()), ())):
        assert main([*GPT2, "--gpu", "t4", "--measure", "2", "--json"]) == 130
        found = json.loads(capsys.readouterr().out)
        assert found["best"] and (found["measured"] is None) is not isinstance(interrupt, ComparisonInterrupted)


def test_a_time_limit_shows_the_best_so_far(
    monkeypatch: pytest.MonkeyPatch, fit: Fit, capsys: pytest.CaptureFixture[str]
) -> None:
    def search(*_: object) -> Fit:
        try:
            time.sleep(60)
        except KeyboardInterrupt:
            return replace(fit, interrupted=True)
        raise AssertionError

    monkeypatch.setattr(exits, "_received", [])
    monkeypatch.setattr(trainatomy.api, "search_settings", search)
    before = signal.getsignal(signal.SIGUSR1)
    try:
        assert main([*GPT2, "--gpu", "t4", "--time-limit", "1", "--json"]) == 124
    finally:
        signal.signal(signal.SIGUSR1, before)
    captured = capsys.readouterr()
    assert json.loads(captured.out)["interrupted"] and "stopped by the time limit" in captured.err


def test_a_measured_search_trusts_remote_code_for_both(monkeypatch: pytest.MonkeyPatch, fit: Fit) -> None:
    given: list[Any] = []
    monkeypatch.setattr(trainatomy.api.fitting, "search_settings", lambda *_: fit)
    monkeypatch.setattr(trainatomy.api.fitting, "measure_fit", lambda *arguments: given.append(arguments))
    workload = trainatomy.Workload.from_mapping({"model": {"id": "gpt2"}})
    trainatomy.fit(workload, gpu="t4", measure=1, trust_remote_code=True)
    assert given[0][2].trust_remote_code


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--flag", "batch=1,2", "--model", "gpt2"], "--flag names a flag of a script, which --script gives"),
        (
            ["--script", "train.py", "--flag", "batch=1,2", "--headroom", "9%"],
            "--headroom cannot be used with --script",
        ),
        (["--script", "train.py", "--flag", "batch=1,2", "--fp16"], "--fp16 cannot be used with --script"),
        (["--script", "train.py", "--flag", "batch=1,2", "w.yaml"], "FILE cannot be used with --script"),
        (["--script", "train.py", "--flag", "batch=1,2", "--gpu", "all"], "are searched for one GPU"),
        (["--model", "gpt2", "--gpu", "t4", "--keep", "nothing"], "known: batch, mini_batch, gradient_checkpointing"),
    ],
)
def test_what_a_search_would_ignore_is_refused(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["fit", *options]) != 0
    assert message in " ".join(capsys.readouterr().err.split())
