"""The benchmark on two GPUs: its cases, its runs (on the CPU), and its page."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import parallel_cases
import pytest
from measured import FULL, GIB

from trainatomy.measurement import measure as ranks
from trainatomy.results.measurement import RankMeasurement

CASES = """
models:
  tiny:
    model: {class: LlamaForCausalLM, config: {num_hidden_layers: 1, hidden_size: 16, intermediate_size: 16,
      vocab_size: 32, num_attention_heads: 2, num_key_value_heads: 2}}
    data: {sequence_length: 8}
    train: {per_device_train_batch_size: 1}
cases:
  tiny-ddp: {of: tiny}
  tiny-refused:
    of: tiny
    model: {config: {num_hidden_layers: 1, hidden_size: 16, intermediate_size: 16, num_attention_heads: 1}}
    parallel: {tp_size: 2}
  tiny-fsdp2: {of: tiny, parallel: {strategy: fsdp2}}
"""


def script(name: str) -> Any:
    """Load a script of the benchmark, whose name other benchmarks have too."""
    path = parallel_cases.HERE / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"parallel_{name}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_every_case_is_a_training_on_two_gpus() -> None:
    found = parallel_cases.cases()
    assert len(found) >= 24
    workloads = [case.workload() for case in found]
    assert {workload.parallel.world_size for workload in workloads} == {2}
    assert len({workload.digest() for workload in workloads}) == len(found)
    strategies = {workload.parallel.strategy or f"tp{workload.parallel.tp_size}" for workload in workloads}
    assert strategies == {"tp1", "tp2", "fsdp1", "fsdp2", "zero1"}


@pytest.mark.parametrize("gpus", [4, 8])
def test_cases_of_several_gpus_are_trainings_on_as_many(gpus: int) -> None:
    found = parallel_cases.cases(gpus=gpus)
    assert {case.workload().parallel.world_size for case in found} == {gpus}
    assert all(case.name.endswith(f"-{gpus}") for case in found)
    with_8 = {case.name for case in found if case.name.startswith("trainer-fsdp2-llama-8b")}
    assert bool(with_8) == (gpus == 8)


def test_cases_of_another_gpu_are_recorded_apart() -> None:
    found = parallel_cases.cases(gpus=4, gpu="h100-sxm")
    assert {case.workload().gpu for case in found} == {"h100-sxm"}
    assert parallel_cases.records(4, "h100-sxm").name == "h100-sxmx4.jsonl"


def test_the_name_alone_decides_what_is_held_out() -> None:
    held_out = [case.held_out for case in parallel_cases.cases()]
    assert 0.35 < sum(held_out) / len(held_out) < 0.65
    assert parallel_cases.Case("ddp-bert-base-fp32", {}).held_out is False
    assert parallel_cases.Case("ddp-gpt2-fp32", {}).held_out is True


def test_cases_are_measured_once_and_one_that_fails_does_not_end_the_others(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    same_processes: Callable[[ModuleType], None],
) -> None:
    measure = script("measure")
    same_processes(measure)
    monkeypatch.setattr(ranks, "RUN", "rank_tasks:measured_on_cpu")
    monkeypatch.setattr(measure, "require_gpus", lambda parallel: "2 × CPU")
    monkeypatch.setattr(measure, "TIMED_SECONDS", 0.01)
    (tmp_path / "cases.yaml").write_text(CASES)
    out = tmp_path / "records" / "out.jsonl"
    arguments = ["--cases", str(tmp_path / "cases.yaml"), "--out", str(out)]
    assert measure.main(arguments) == 1
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(line["name"], line["status"], len(line["other_ranks"])) for line in lines] == [
        ("tiny-ddp", "completed", 1), ("tiny-fsdp2", "completed", 1),
    ]  # fmt: skip
    # Eight timed steps or more, then those with a synchronisation after each.
    assert {line["steps"] for line in lines} == {line["other_ranks"][0]["steps"] for line in lines}
    assert all(len(line["timed_step_seconds"]) >= 8 and line["synchronized_step_seconds"] for line in lines)
    (failure,) = out.with_name("out.jsonl.failed").read_text().splitlines()
    assert json.loads(failure)["name"] == "tiny-refused"
    capsys.readouterr()
    measure.main([*arguments, "--list"])
    assert capsys.readouterr().out.split()[0] == "tiny-refused"


def test_the_page_shows_errors_and_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = script("report")
    (tmp_path / "cases.yaml").write_text(CASES)
    case = parallel_cases.cases(tmp_path / "cases.yaml")[0]
    other = replace(RankMeasurement.of(FULL), rank=1, step_seconds=0.5)
    line = asdict(replace(FULL, nccl_bytes=GIB, other_ranks=(other,)))
    line |= {"name": case.name, "held_out": True, "workload": dict(case.mapping)}
    prediction = report.predict(case.workload())
    outcome = report.outcome_of(line, prediction)
    assert (
        outcome.error("peak_allocated_bytes") == prediction.memory.peak_allocated_bytes / FULL.peak_allocated_bytes - 1
    )
    assert outcome.measured["step_seconds"] == 0.5
    text = report.page([line], [outcome])
    assert "## Held out: 1 cases" in text and "| tiny-ddp | 1 |" in text and "1.00 GiB" in text
    failed = report.outcome_of(line | {"status": "out of memory"}, prediction)
    assert failed.error("peak_allocated_bytes") is None
    assert "out of memory" in "\n".join(report.details([failed]))
