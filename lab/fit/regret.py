"""Predict what is measured, and report how good the choices were: ``python lab/fit/regret.py --predict``.

``--predict`` predicts every point of every grid under every limit, and writes ``records/plan.json``; ``--choose`` adds
what the search chooses, and ``--time`` how long it takes. All come before the measurement (``measure.py``) and need no
GPU. ``--report`` compares the plan with ``records/h200.jsonl`` and ``records/h200-again.jsonl``, and writes
``records/regret.json`` and ``lab/pages/fit.md``.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import fit_cases
import fit_page as page
import fit_results as results
import fit_search
import outcomes
from fit_cases import GIB, RECORDS, Case, Cases, Setting
from fit_tasks import PLAN, Plan, read_plan

from trainatomy import api
from trainatomy.catalog.calibrations import Calibration, resolve_calibration
from trainatomy.requests.fitting import FitRequest
from trainatomy.runs.predicting import predict_rows
from trainatomy.workload.schema import Workload

if TYPE_CHECKING:
    from trainatomy.results.fit import Fit
    from trainatomy.results.prediction import Prediction

LINES = RECORDS / "h200.jsonl"
AGAIN = RECORDS / "h200-again.jsonl"
CALIBRATED = RECORDS / "plan-calibrated.json"
REPORT = RECORDS / "regret.json"
PAGE = fit_cases.HERE.parent / "pages" / "fit.md"
TORCH = "2.11.0"
HEADROOM = 0.05


def predict(cases: Cases, jobs: int, torch: str, calibration: Calibration | None = None) -> Plan:
    """Return the plan: the predicted points of all grids, without choices."""
    entries = [(case, setting) for case in cases.cases for setting in cases.grid]
    limits: list[Any] = [fit_cases.BASE, *(fit_cases.limited(gib) for gib in cases.limits_gib)]
    workloads = [
        Workload.from_mapping(setting.apply(case.mapping) | {"gpu": gpu, "software": {"torch": torch}})
        for case, setting in entries
        for gpu in limits
    ]
    found = predict_rows(partial(api.predict, calibration=calibration), workloads, jobs)
    for one in found:
        if isinstance(one, Exception):
            raise one
    points = []
    for index, (case, setting) in enumerate(entries):
        of_point = found[index * len(limits) : (index + 1) * len(limits)]
        points.append(point_of(case, setting, of_point, cases.limits_gib))
    head = {"predicted_with": outcomes.software(), "for_torch": torch, "headroom": HEADROOM}
    return head | {"calibrated": calibration is not None, "points": points, "choices": []}


def point_of(case: Case, setting: Setting, found: list[Any], limits_gib: tuple[int, ...]) -> dict[str, Any]:
    """Return a point of the plan; ``found``: its predictions without a limit and under each limit."""
    free: Prediction = found[0]
    time_ = free.time
    assert time_ is not None
    limits = {}
    for gib, one in zip(limits_gib, found[1:], strict=True):
        limits[str(gib)] = {
            "fits": one.fits,
            "device_bytes": one.memory.device_bytes,
            "num_alloc_retries": one.memory.num_alloc_retries,
            "samples_per_second": one.time.samples_per_second,
            "capacity_bytes": gib * GIB - one.memory.components.context,
        }
    return {
        "case": case.name,
        "label": setting.label,
        "batch": setting.batch,
        "accumulation": setting.accumulation,
        "checkpointing": setting.checkpointing,
        "workload": setting.apply(case.mapping),
        "step_seconds": time_.step_seconds,
        "samples_per_second": time_.samples_per_second,
        "bound_by": time_.bound_by,
        "gpu_seconds": time_.gpu_seconds,
        "host_seconds": time_.host_seconds,
        "peak_allocated_bytes": free.memory.peak_allocated_bytes,
        "peak_reserved_bytes": free.memory.peak_reserved_bytes,
        "device_bytes": free.memory.device_bytes,
        "limits": limits,
    }


def choice_of(case: Case, gib: int, found: Fit) -> dict[str, Any]:
    """Return what the search chose for a case and a limit; ``workload`` is ``None`` where nothing fits."""
    head: dict[str, Any] = {"case": case.name, "limit_gib": gib, "executed": found.counts.executed, "workload": None}
    if found.best is None:
        return head | {"label": "nothing fits"}
    prediction = found.best.prediction
    mapping = _bare(found.best.workload)
    time_, memory = prediction.time, prediction.memory
    assert time_ is not None
    return head | {
        "label": label_of(mapping, case),
        "workload": mapping,
        "capacity_bytes": gib * GIB - memory.components.context,
        "step_seconds": time_.step_seconds,
        "samples_per_second": time_.samples_per_second,
        "bound_by": time_.bound_by,
        "device_bytes": memory.device_bytes,
        "fits": prediction.fits,
        "ties": [label_of(_bare(tie.workload), case) for tie in found.ties],
    }


def _bare(mapping: Mapping[str, Any]) -> dict[str, Any]:
    """Return a workload without the GPU and the software that it is predicted for."""
    return {key: value for key, value in mapping.items() if key not in ("gpu", "software")}


def label_of(mapping: dict[str, Any], case: Case) -> str:
    """Return the label of chosen settings: that of the grid's point, or that of the nearest and what differs."""
    setting = fit_cases.setting_of(mapping, case.mapping)
    if setting is not None:
        return setting.label
    train = mapping.get("train", {})
    near = Setting(
        train.get("per_device_train_batch_size", 8),
        train.get("gradient_accumulation_steps", 1),
        bool(train.get("gradient_checkpointing")),
    )
    plain = near.apply(case.mapping)
    changed = [
        f"{key}={value}"
        for key, value in _flat(mapping).items()
        if key not in ("name", "gpu", "software") and _flat(plain).get(key) != value
    ]
    return "; ".join([near.label, *changed])


def _flat(mapping: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of a workload with those of its sections beneath them, joined by dots."""
    flat: dict[str, Any] = {}
    for key, value in mapping.items():
        flat |= {f"{key}.{name}": each for name, each in value.items()} if isinstance(value, dict) else {key: value}
    return flat


def write_plan(plan: Plan, path: Path) -> None:
    """Write the plan, one point or choice a line."""
    head = {key: value for key, value in plan.items() if key not in ("points", "choices")}
    parts = [f"{json.dumps(key)}: [\n{_lines(plan[key])}\n]" for key in ("points", "choices")]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(head)[:-1] + ",\n" + ",\n".join(parts) + "}\n", encoding="utf-8")


def _lines(entries: list[Any]) -> str:
    return ",\n".join(json.dumps(entry) for entry in entries)


def choose(cases: Cases, options: argparse.Namespace) -> None:
    """Add what the search chooses to the plan, case by case; cases that have choices are left as they are."""
    plan = read_plan(options.plan)
    search_options = FitRequest(cases.effective_batch, plan["headroom"], prices=False)
    for case in cases.cases:
        if any(choice["case"] == case.name for choice in plan["choices"]):
            continue
        found = fit_search.choices(
            case, cases.limits_gib, search_options, options.torch, options.jobs, options.calibration
        )
        plan["choices"] += [choice_of(case, gib, fit) for gib, fit in found.items()]
        write_plan(plan, options.plan)
        print(f"{case.name}: {[choice['label'] for choice in plan['choices'][-len(found) :]]}", flush=True)


def time_searches(cases: Cases, options: argparse.Namespace) -> None:
    """Time ``trainatomy.fit`` where auto_find_batch_size runs too, on an otherwise idle machine; add it to the plan."""
    plan = read_plan(options.plan)
    for case in cases.cases:
        for gib in case.automatic:
            mapping = case.mapping | {"gpu": fit_cases.limited(gib), "software": {"torch": options.torch}}
            began = time.perf_counter()
            api.fit(
                Workload.from_mapping(mapping), effective_batch_size=cases.effective_batch, headroom=HEADROOM,
                jobs=options.jobs,
            )  # fmt: skip
            seconds = time.perf_counter() - began
            choice = next(one for one in plan["choices"] if (one["case"], one["limit_gib"]) == (case.name, gib))
            choice["seconds_to_answer"] = round(seconds, 1)
            write_plan(plan, options.plan)
            print(f"{case.name}, {gib} GiB: {seconds:.1f} s", flush=True)


def report(options: argparse.Namespace, cases: Cases) -> None:
    """Write the figures and the page."""
    lines, again = (
        [json.loads(text) for text in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []
        for path in (options.lines, options.again)
    )
    plans = [read_plan(path) for path in (options.plan, options.calibrated) if path.exists()]
    found = [results.compare(plan, cases, lines, again) for plan in plans]
    content = [results.to_plain(comparison) for comparison in found]
    options.report.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    options.page.write_text(page.page(found, cases, held_out()), encoding="utf-8")
    print(page.summary(found))


def held_out() -> tuple[results.Comparison, Cases] | None:
    """Return the comparison for the training runs that the search had not seen, if they were measured."""
    lines = fit_cases.HELD_OUT / "h200.jsonl"
    if not lines.exists():
        return None
    cases = fit_cases.read(fit_cases.HELD_OUT / "cases.yaml")
    measured = [json.loads(text) for text in lines.read_text(encoding="utf-8").splitlines()]
    return results.compare(read_plan(fit_cases.HELD_OUT / "plan.json"), cases, measured), cases


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--predict", action="store_true", help="predict the grids; drops the plan's choices")
    what.add_argument("--choose", action="store_true", help="let the search choose, and add it to the plan")
    what.add_argument("--time", action="store_true", help="time single searches, and add that to the plan")
    what.add_argument("--report", dest="compare", action="store_true", help="compare the plan with what was measured")
    parser.add_argument("--cases", type=Path, default=fit_cases.CASES, help="the trainings")
    parser.add_argument("--plan", type=Path, default=PLAN)
    parser.add_argument("--calibrated", type=Path, default=CALIBRATED, help="the plan by the machine's calibration")
    parser.add_argument("--lines", type=Path, default=LINES, help="what measure.py wrote")
    parser.add_argument("--again", type=Path, default=AGAIN, help="what a later session wrote: contenders, choices")
    parser.add_argument("--figures", dest="report", type=Path, default=REPORT)
    parser.add_argument("--page", type=Path, default=PAGE)
    parser.add_argument("--torch", default=TORCH, help=f"the version that is measured (default: {TORCH})")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--calibration", type=Path, help="predict and choose by a machine's calibration")
    return parser.parse_args(arguments)


def main() -> int:
    """Predict, choose or report."""
    options = parse()
    cases = fit_cases.read(options.cases)
    if options.predict:
        calibration = resolve_calibration(options.calibration)
        write_plan(predict(cases, options.jobs, options.torch, calibration), options.plan)
    elif options.choose:
        choose(cases, options)
    elif options.time:
        time_searches(cases, options)
    else:
        report(options, cases)
    return 0


if __name__ == "__main__":
    sys.exit(main())
