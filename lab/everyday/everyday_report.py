"""Compare the stored predictions with the measured cases: ``python lab/everyday/everyday_report.py --gpu h200``.

Writes Markdown to ``--out``, or prints it.  Predictions are those that were stored before the cases were measured;
``predict.py --again`` stores the times that the code of today predicts, for the second table of times.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any

import everyday_cases
from everyday_cases import Case, pace_of
from everyday_texts import ABOUT, AGAIN, MARK, MEMORY, SECTIONS, TIMED

from trainatomy.workload.trl import steps_per_generation

SIZES = {
    "peak_allocated_bytes": "allocated",
    "peak_reserved_bytes": "reserved",
    "device_bytes": "device",
    "reserved_before_bytes": "before evaluation",
    "checkpoint_bytes": "disk",
}
TIMES = {
    "step_seconds": "step",
    "evaluation_seconds": "evaluation",
    "first_token_seconds": "first token",
    "token_seconds": "further token",
}
EARLIER_ON_MACHINE, EARLIER_FIRST_EVALUATION = 0.5, 0.016
"""Seconds that predictions of before 2026-11-24, 16 h, added, and above which they did; they did not store it."""
_EXACT = 5e-5
OTHER_GPU = "h100-sxm"


@dataclass(frozen=True, slots=True)
class Outcome:
    """A case as predicted and as measured; figures by their name in ``SIZES`` and ``TIMES``, None where one is missing.

    ``at_pace``: predicted times at the pace that was measured; ``bound``: what the prediction says bounds the step;
    ``predicted_on``: when it was stored.
    """

    name: str
    kind: str
    held_out: bool
    status: str
    measured: Mapping[str, float | None]
    predicted: Mapping[str, float | None]
    at_pace: Mapping[str, float] = field(default_factory=dict)
    bound: str = ""
    predicted_on: str = ""

    def error(self, figure: str, *, at_pace: bool = False) -> float | None:
        """Return (predicted - measured) / measured; None for a run that did not complete."""
        found = self.at_pace if at_pace else self.predicted
        measured, predicted = self.measured.get(figure), found.get(figure)
        if self.status != "completed" or not measured or predicted is None:
            return None
        return predicted / measured - 1


def figures_of(line: Mapping[str, Any]) -> dict[str, float | None]:
    """Return the figures of a line of predictions or of records."""
    memory, evaluation = line.get("memory") or {}, line.get("evaluation") or {}
    generation, checkpoint = line.get("generation") or {}, line.get("checkpoint") or {}
    totals = {name: line.get(name, memory.get(name)) for name in ("step_seconds", *SIZES)}
    if (lengths := line.get("lengths")) is not None:
        totals["step_seconds"] = first_epoch_step_seconds(line["step_seconds"], lengths)
    elif line.get("kind") == "trl" and line.get("timed_step_seconds"):
        totals["step_seconds"] = mean_step_seconds(line)
    spent = evaluation.get("seconds")
    figures = totals | {
        "reserved_before_bytes": evaluation.get("reserved_before_bytes"),
        "evaluation_seconds": None if spent is None else spent + first_evaluation_extra(evaluation),
        "first_token_seconds": generation.get("first_token_seconds"),
        "token_seconds": generation.get("token_seconds"),
        "checkpoint_bytes": sum(checkpoint["files"].values()) if checkpoint else None,
    }
    return figures | dict.fromkeys(TIMES if line.get("shared") else ())


def first_evaluation_extra(evaluation: Mapping[str, Any], pace: float = 1.0) -> float:
    """Return what the first evaluation on a machine takes longer; a measured one says nothing of it.

    Predictions of before it was known apart from the rest added the same half a second at any pace of the host.
    """
    extra: float = evaluation.get("first_extra_seconds") or 0.0
    if "first_on_machine_seconds" in evaluation:
        return pace * extra + (evaluation["first_on_machine_seconds"] or 0.0)
    return extra + (EARLIER_ON_MACHINE if extra > EARLIER_FIRST_EVALUATION else 0.0)


def mean_step_seconds(record: Mapping[str, Any]) -> float:
    """Return the time of a measured step: the median, or the mean of whole periods where only some steps generate."""
    workload = Case(record["name"], record["kind"], record["workload"]).workload("h200")
    period = steps_per_generation(workload) if workload.loop == "grpo" else 1
    times = record["timed_step_seconds"]
    whole = len(times) // period * period
    return fmean(times[-whole:]) if period > 1 and whole else float(record["step_seconds"])


def first_epoch_step_seconds(step_seconds: float, lengths: Mapping[str, Any]) -> float | None:
    """Return the mean step of an epoch whose lengths are new; None where a prediction does not know their cost."""
    extra, shapes = lengths.get("new_shape_seconds"), lengths.get("new_shapes")
    return None if extra is None or shapes is None else step_seconds + extra * shapes / lengths["steps"]


def at_pace(times: Mapping[str, float], pace: float) -> float:
    """Return a predicted time at a pace; beyond those that were predicted, at the last of them."""
    known = sorted((float(one), seconds) for one, seconds in times.items())
    pace = min(max(pace, known[0][0]), known[-1][0])
    for (low, before), (high, after) in pairwise(known):
        if pace <= high:
            return before + (after - before) * (pace - low) / (high - low)
    return known[-1][1]


def paced_times(record: Mapping[str, Any], prediction: Mapping[str, Any]) -> dict[str, float]:
    """Return the predicted times at the pace of the record, of a prediction that knows several paces.

    Where the readings of each thread are known, evaluations and tokens are at the pace of the main thread.
    """
    if pace_of(record) is None or record.get("shared"):
        return {}
    share, found = prediction.get("backward_host_share"), dict[str, float]()
    for name, times in prediction.get("paced", {}).items():
        own = share if name == "step_seconds" else 0.0
        pace = pace_of(record, None if share is None else own)
        if times and pace is not None:
            found[name] = at_pace(times, pace)
            if name == "evaluation_seconds":
                found[name] += first_evaluation_extra(prediction.get("evaluation") or {}, pace)
            if name == "step_seconds" and (lengths := prediction.get("lengths")) is not None:
                found[name] += pace * (first_epoch_step_seconds(0.0, lengths) or 0.0)
    return found


def outcomes(records: Iterable[Mapping[str, Any]], predictions: Mapping[str, Mapping[str, Any]]) -> list[Outcome]:
    """Return the measured cases that have a prediction."""
    return [
        Outcome(
            line["name"],
            line["kind"],
            line["held_out"],
            line["status"],
            figures_of(line),
            figures_of(ours) | (everyday_cases.memory_as_run(ours, line) if "memory" in ours else {}),
            paced_times(line, ours),
            "host" if ours.get("bound_by") == "host" else "GPU",
            ours["date"],
        )
        for line in records
        if (ours := predictions.get(line["name"])) is not None
    ]


def memory_table(found: Sequence[Outcome]) -> list[str]:
    """Return a table of errors of memory by kind: exact ones of all, and the worst."""
    rows = []
    for kind in sorted({one.kind for one in found}):
        of_kind = [one for one in found if one.kind == kind]
        rows.append([kind, str(len(of_kind)), *(_exact(of_kind, figure) for figure in SIZES)])
    heads = [f"{title}: exact, median, worst" for title in SIZES.values()]
    return table(["kind", "cases", *heads], rows)


def _exact(found: Sequence[Outcome], figure: str) -> str:
    errors = [abs(error) for one in found if (error := one.error(figure)) is not None]
    if not errors:
        return ""
    exact = sum(error < _EXACT for error in errors)
    return f"{exact} of {len(errors)}, {percent(median(errors))}, {percent(max(errors))}"


def time_table(found: Sequence[Outcome]) -> list[str]:
    """Return a table of errors of times, at a quiet host and at the measured pace, by what bounds the step."""
    groups: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
    for one in found:
        for figure, title in TIMES.items():
            quiet, paced = one.error(figure), one.error(figure, at_pace=True)
            if quiet is not None and paced is not None:
                what = f"{title}, bound by the {one.bound}" if figure == "step_seconds" else title
                groups[one.kind, what].append((abs(quiet), abs(paced)))
                groups["all", what].append((abs(quiet), abs(paced)))
    rows = [
        [kind, what, str(len(errors)), *(_short(list(column)) for column in zip(*errors, strict=True))]
        for (kind, what), errors in sorted(groups.items())
    ]
    return table(["kind", "time", "cases", "quiet host: median, worst", "at the pace: median, worst"], rows)


def _short(errors: Sequence[float]) -> str:
    return f"{median(errors):.1%}, {max(errors):.1%}".replace("%", " %")


def details(found: Sequence[Outcome]) -> Iterator[str]:
    """Yield a table with the errors of every case; of times those at the pace, where it is known."""
    rows = []
    for one in sorted(found, key=lambda each: (each.kind, each.name)):
        sizes = [one.error(figure) for figure in SIZES]
        times = [one.error(figure, at_pace=True) for figure in TIMES]
        shown = ["" if error is None else signed(error) for error in sizes]
        shown += ["" if error is None else f"{error:+.1%}".replace("-", "−").replace("%", " %") for error in times]
        outcome = [] if one.status == "completed" else [f" ({one.status})"]
        rows.append(["".join([one.name, *outcome]), "held out" if one.held_out else "tuning", *shown])
    yield from table(["case", "set", *SIZES.values(), *TIMES.values()], rows)


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return a table in Markdown."""
    return [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}", *(f"| {' | '.join(row)} |" for row in rows)]


def percent(share: float) -> str:
    """Format the size of an error."""
    return f"{100 * share:.2f} %"


def signed(share: float) -> str:
    """Format an error."""
    return f"{100 * share:+.2f} %".replace("-", "−")


def with_times_of_today(
    found: Sequence[Outcome], again: Mapping[str, Mapping[str, Any]], records: Any
) -> list[Outcome]:
    """Return the outcomes with the times that the code of today predicts, those that have some."""
    by_name = {line["name"]: line for line in records}
    return [
        replace(
            one,
            predicted={**one.predicted, **{name: times["1.0"] for name, times in ours["paced"].items() if times}},
            at_pace=paced_times(by_name[one.name], ours),
            bound="host" if ours.get("bound_by") == "host" else "GPU",
        )
        for one in found
        if (ours := again.get(one.name)) is not None and "paced" in ours
    ]


def page(
    found: Sequence[Outcome], today: Sequence[Outcome], missing: Sequence[str], other: Sequence[Outcome] = ()
) -> str:
    """Return the report."""
    text = ["# Accuracy of evaluation, generation, lengths, quantised weights, TRL and FlexAttention", "", MARK, ""]
    text += [ABOUT, "", "## Memory", "", MEMORY, ""]
    for title, of in (("held out", True), ("tuning", False)):
        part = [one for one in found if one.held_out is of]
        if part:
            text += [f"{len(part)} cases, {title}:", "", *memory_table(part), ""]
    text += ["## Times", "", TIMED, ""]
    for cases, at in ((found, "here"), (other, "elsewhere")):
        for section in SECTIONS:
            part = [one for one in cases if section.since <= one.predicted_on < section.until]
            about = getattr(section, at)
            text += [about, "", *time_table(part), ""] if any(one.at_pace for one in part) else []
    if today:
        text += [AGAIN, ""]
        for title, of in (("Held out", True), ("Tuning", False)):
            text += [f"{title}:", "", *time_table([one for one in today if one.held_out is of]), ""]
    if missing:
        text += [f"Without a prediction: {', '.join(missing)}.", ""]
    blind = {one.name for one in found if one.at_pace}
    shown = [one for one in found if one.name in blind or one.name not in {each.name for each in today}]
    shown += [one for one in today if one.name not in blind]
    note = "Times at the pace: of cases that stored them blind, else those predicted again."
    return "\n".join([*text, "## Cases", "", note, "", *details(shown), ""])


def main(arguments: list[str] | None = None) -> int:
    """Write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", default="h200")
    parser.add_argument("--predictions", type=Path)
    parser.add_argument("--again", type=Path, help="default: predictions/GPU-again.jsonl")
    parser.add_argument("--records", type=Path)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    records = everyday_cases.lines(options.records or everyday_cases.RECORDS / options.gpu)
    folder = everyday_cases.PREDICTIONS
    known = _by_name(options.predictions or folder / f"{options.gpu}.jsonl")
    again = _by_name(options.again or folder / f"{options.gpu}-again.jsonl")
    found = outcomes(records, known)
    missing = [line["name"] for line in records if line["name"] not in known]
    other = outcomes(everyday_cases.lines(everyday_cases.RECORDS / OTHER_GPU), _by_name(folder / f"{OTHER_GPU}.jsonl"))
    text = page(found, with_times_of_today(found, again, records), missing, () if options.records else other)
    if options.out:
        options.out.write_text(text, encoding="utf-8")
    else:
        print(text)
    return 0


def _by_name(path: Path) -> dict[str, Mapping[str, Any]]:
    return {line["name"]: line for line in everyday_cases.lines(path) if "error" not in line}


if __name__ == "__main__":
    sys.exit(main())
