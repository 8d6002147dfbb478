"""The benchmark of evaluations, generations and checkpoints: cases, the order of prediction and measurement, report."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import everyday_cases
import pytest
from measured import FULL

from trainatomy.catalog.machines import reference_host
from trainatomy.results.tasks import Evaluation

CASES = """
tiny-evaluated:
  model: {class: GPT2LMHeadModel, config: {n_embd: 16, n_layer: 1, n_head: 1, vocab_size: 100}}
  data: {sequence_length: 8}
  train: {per_device_train_batch_size: 1, eval_strategy: steps}
"""


def script(name: str) -> Any:
    """Load a script of the benchmark, whose name other benchmarks have too."""
    path = everyday_cases.HERE / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"everyday_{name}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_every_case_is_valid_and_its_name_decides_what_is_held_out() -> None:
    found = everyday_cases.cases()
    kinds = Counter(case.kind for case in found)
    assert kinds["evaluation"] >= 12 and kinds["generation"] >= 12 and kinds["saving"] >= 6
    assert len({case.name for case in found}) == len(found)
    for case in found:
        workload = case.workload("h100")
        assert workload.evaluates or case.kind != "evaluation"
        assert (workload.mode == "generation") == (case.kind == "generation")
        assert (workload.saves or workload.resumes) == (case.kind == "saving")
    for kind in ("evaluation", "generation"):
        held_out = [case.held_out for case in found if case.kind == kind]
        assert 0.3 < sum(held_out) / len(held_out) < 0.7


def test_cases_are_predicted_before_they_are_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "cases").mkdir()
    written = tmp_path / "cases" / "evaluation.yaml"
    written.write_text(CASES)
    stored, out = tmp_path / "predictions.jsonl", tmp_path / "records.jsonl"
    arguments = ["--cases", str(tmp_path / "cases"), "--out", str(out), "--predictions", str(stored)]
    measure, predict, report = script("measure"), script("predict"), script("everyday_report")
    with pytest.raises(SystemExit, match=r"predict these first.*tiny-evaluated"):
        measure.main(arguments)
    assert predict.main(["--cases", str(tmp_path / "cases"), "--out", str(stored)]) == 0
    predict.main(["--cases", str(tmp_path / "cases"), "--out", str(stored)])
    (line,) = everyday_cases.lines(stored)
    assert line["evaluation"]["batches"] == 2 and line["memory"]["peak_allocated_bytes"] > 0
    written.write_text(CASES.replace("sequence_length: 8", "sequence_length: 16"))
    with pytest.raises(SystemExit, match="as they are written now"):
        measure.main(arguments)

    first = line["evaluation"]["seconds"] + line["evaluation"]["first_extra_seconds"]
    evaluation = Evaluation(**{**line["evaluation"], "seconds": 2 * first, "first_extra_seconds": None})
    reserved = line["memory"]["peak_reserved_bytes"] * 2
    case = everyday_cases.Case("tiny-evaluated", "evaluation", line["workload"])
    record = measure.line_of(case, replace(FULL, evaluation=evaluation, peak_reserved_bytes=reserved), shared=False)
    (outcome,) = report.outcomes([record], {"tiny-evaluated": line})
    assert outcome.error("peak_reserved_bytes") == outcome.error("evaluation_seconds") == -0.5
    out.write_text(json.dumps(record) + "\n")
    capsys.readouterr()
    report.main(["--records", str(out), "--predictions", str(stored)])
    assert "| 0 of 1, 50.00 %, 50.00 % |" in capsys.readouterr().out
    assert asdict(outcome)["status"] == "completed"


def test_times_are_compared_at_the_recorded_pace() -> None:
    report = script("everyday_report")
    host = reference_host()
    (probe, seconds), exponent = next(iter(host.probe_seconds.items())), 1 / next(iter(host.pace_exponents.values()))
    record = {"name": "a", "host_pace": {"probe": probe, "during_seconds": [seconds * 1.5**exponent] * 5}}
    assert everyday_cases.pace_of(record) == pytest.approx(1.5)
    paced = {"step_seconds": {"1.0": 1.0, "2.0": 3.0}, "evaluation_seconds": {"1.0": 1.0, "2.0": 1.0}}
    found = report.paced_times(record, {"paced": paced, "evaluation": {"first_extra_seconds": 0.1}})
    assert found["step_seconds"] == pytest.approx(2.0)
    assert found["evaluation_seconds"] == pytest.approx(1.1 + report.EARLIER_ON_MACHINE)
    evaluation = {"first_extra_seconds": 0.1, "first_on_machine_seconds": 0.4}
    known = report.paced_times(record, {"paced": paced, "evaluation": evaluation})
    assert known["evaluation_seconds"] == pytest.approx(1.0 + 1.5 * 0.1 + 0.4)
    assert report.paced_times({"name": "a", "host_pace": {"probe": "older/1"}}, {"paced": paced}) == {}


def test_steps_are_compared_at_the_pace_of_both_threads_and_tokens_at_that_of_one() -> None:
    report, host = script("everyday_report"), reference_host()
    probe, seconds = next(iter(host.probe_seconds.items()))
    share, exponent = host.backward_probe_shares[probe], 1 / host.pace_exponents[probe]
    main, backward = seconds * (1 - share) * 2.0**exponent, seconds * share
    readings = {"during_seconds": [main + backward] * 5, "backward_seconds": [backward] * 5}
    pace = {"probe": probe, **readings, "backward_reference_share": share}
    paced = {name: {"1.0": 1.0, "3.0": 3.0} for name in ("step_seconds", "token_seconds")}
    found = report.paced_times({"name": "a", "host_pace": pace}, {"paced": paced, "backward_host_share": 0.5})
    assert found == pytest.approx({"step_seconds": 1.5, "token_seconds": 2.0})
    summed = report.paced_times({"name": "a", "host_pace": pace}, {"paced": paced})
    assert (
        summed["step_seconds"] == summed["token_seconds"] == pytest.approx(everyday_cases.pace_of({"host_pace": pace}))
    )


def test_records_of_a_folder_are_those_of_all_its_kinds(tmp_path: Path) -> None:
    for kind in ("b", "a"):
        everyday_cases.append(tmp_path / f"{kind}.jsonl", {"kind": kind})
        everyday_cases.append(tmp_path / f"{kind}.jsonl.failed", {"kind": kind})
    assert everyday_cases.lines(tmp_path) == [{"kind": "a"}, {"kind": "b"}]
    assert everyday_cases.lines(tmp_path / "a.jsonl") == [{"kind": "a"}]


def test_kinds_of_cases_take_turns() -> None:
    one, two, other = (everyday_cases.Case(name, kind, {}) for name, kind in (("a", "x"), ("b", "x"), ("c", "y")))
    assert script("measure").in_turns([one, two, other]) == [one, other, two]


def test_a_generation_is_timed_like_steps_and_an_evaluation_runs_in_the_warm_up() -> None:
    measure = script("measure")
    jobs = {case.name: measure.job_of(case, "h200") for case in everyday_cases.cases() if case.kind != "quantised"}
    assert jobs["llama-1.1b-greedy"].steps == 2 + measure.TIMED_STEPS
    assert jobs["gpt2-loss-batch-16"].steps == 4 + measure.TIMED_STEPS


def test_times_of_a_case_that_shared_its_gpu_are_not_compared() -> None:
    measure, report = script("measure"), script("everyday_report")
    case = everyday_cases.cases()[0]
    alone, beside = (report.figures_of(measure.line_of(case, FULL, shared=shared)) for shared in (False, True))
    assert alone["step_seconds"] == FULL.step_seconds
    assert beside["step_seconds"] is None
    assert beside["peak_reserved_bytes"] == alone["peak_reserved_bytes"]
