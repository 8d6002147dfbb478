"""Write docs/convolutions.md: the workspaces of single calls, and the memory of networks, predicted and measured.

python benchmarks/cudnn/report.py [--out FILE]      (with cuDNN's library: pip install "trainatomy[cudnn]")

Calls are ``records/calls*.jsonl.gz``, written by ``probe.py``; networks are those of ``CAMPAIGNS``, each with the files
of their measurements and predictions.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "everyday"))

import everyday_cases
import torch
from probe import KINDS, SWAPPED, as_called
from report_text import DETAILS_TEXT, EARLIER_TITLE, PAGE_TEXT

from trainatomy.catalog.cudnn import device_text
from trainatomy.catalog.gpus import find_gpu
from trainatomy.operators.allocation import convolution
from trainatomy.operators.allocation.cudnn.convolution import Kind
from trainatomy.operators.allocation.cudnn.grouped import is_cudnn_depthwise
from trainatomy.operators.allocation.cudnn.heuristics import Heuristics
from trainatomy.operators.allocation.cudnn.library import cudnn_library
from trainatomy.operators.allocation.plan import Processor

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs" / "convolutions.md"
TABLE = HERE.parents[1] / "src" / "trainatomy" / "catalog" / "cudnn_plans.json"
FIGURES = {"peak_allocated_bytes": "allocated", "peak_reserved_bytes": "reserved"}
PRECISIONS = ("fp32", "fp16", "bf16")


@dataclass(frozen=True)
class Campaign:
    """Networks that were measured together, and the files of their predictions by title, in the folder of this script.

    ``records`` and the file of a prediction may be several files.
    """

    title: str
    records: str
    predictions: Mapping[str, str]


SEEN_SINCE = {"library, seen": "seen/h200-library.jsonl", "rules, seen": "seen/h200-rules.jsonl"}
"""Predictions by code that was made with the measurements at hand."""
BLIND = (
    Campaign("H200", "held_out_6/records/h200.jsonl", {
        "library": "held_out_6/predictions/h200-library.jsonl",
        "rules": "held_out_6/predictions/h200-rules.jsonl",
    }),
    Campaign("H100", "held_out_6/records/h100-sxm.jsonl", {
        "library": "held_out_6/predictions/h100-sxm-library.jsonl",
        "rules": "held_out_6/predictions/h100-sxm-rules.jsonl",
    }),
)  # fmt: skip
"""The twenty networks as they were predicted before they were measured."""
EARLIER = (
    Campaign("sixty others of the twenty", "held_out_5/records/h200.jsonl", {
        "library": "held_out_5/predictions/h200-library.jsonl",
        "rules": "held_out_5/predictions/h200-rules.jsonl",
    }),
    Campaign("the same on an H100", "held_out_5/records/h100-sxm.jsonl", {
        "library": "held_out_5/predictions/h100-sxm-library.jsonl",
        "rules": "held_out_5/predictions/h100-sxm-rules.jsonl",
    }),
    Campaign("the twenty, half of usual size", "held_out_4/records/h200*.jsonl", {
        "library": "held_out_4/predictions/h200-library.jsonl",
        "rules": "held_out_4/predictions/h200-rules.jsonl",
    }),
    Campaign("24 of them on an H100", "held_out_4/records/h100-sxm*.jsonl", {
        "library": "held_out_4/predictions/h100-sxm-library.jsonl",
        "rules": "held_out_4/predictions/h100-sxm-rules.jsonl",
    }),
    Campaign("the twenty, drawn batches and images", "held_out_3/records/*.jsonl", {
        "library": "held_out_3/predictions/h200-library.jsonl",
        "rules": "held_out_3/predictions/h200-rules.jsonl",
        **SEEN_SINCE,
    }),
    Campaign("12 networks in 39 training runs, five of them new", "held_out_2/records/h200.jsonl", {
        "library": "held_out_2/predictions/h200-library.jsonl",
        "library, second table": "held_out_2/predictions/h200-library-second.jsonl",
        "rules": "held_out_2/predictions/h200-rules.jsonl",
        **SEEN_SINCE,
    }),
    Campaign("the twenty at other images, eight others", "held_out/records/h200.jsonl", {
        "library": "held_out/predictions/h200-library.jsonl",
        "rules": "held_out/predictions/h200-rules.jsonl",
        **SEEN_SINCE,
    }),
    Campaign("the twenty at batches of 24, 12 others, H100", "records/h100-sxm.jsonl", {
        "library, first": "predictions/h100-sxm-library.jsonl",
        "rules, first": "predictions/h100-sxm-rules.jsonl",
        "library": "predictions/h100-sxm-library-second.jsonl",
        "rules": "predictions/h100-sxm-rules-second.jsonl",
        "library, seen": "seen/h100-sxm-library.jsonl",
        "rules, seen": "seen/h100-sxm-rules.jsonl",
    }),
    Campaign("the same on an H200", "records/h200-batches.jsonl", {
        "library": "predictions/h200-library.jsonl",
        "rules": "predictions/h200-rules.jsonl",
        **SEEN_SINCE,
    }),
    Campaign("the twenty, which the first rules were made from", "records/h200.jsonl", {
        "library": "predictions/h200-library.jsonl",
        "rules": "predictions/h200-rules.jsonl",
        **SEEN_SINCE,
    }),
)  # fmt: skip
LIMITS = 0.04, 0.08
"""Errors of reserved memory that training runs are counted within."""
CALLS = {
    "calls-h200.jsonl.gz": {
        "sample": "those of the stored sample (seen when rules were made)",
        "fresh": "random ones (seen when the library's use was worked out)",
    },
    "calls-h200-held-out.jsonl.gz": {"fresh": "other random ones (seen since, for cuBLAS)"},
}


@dataclass
class Score:
    """Workspaces of one set of calls by one source: how many, how many exact, bytes missed and taken."""

    calls: int = 0
    exact: int = 0
    missed: int = 0
    taken: int = 0

    def add(self, found: int, measured: int) -> None:
        """Count a call."""
        self.calls += 1
        self.exact += found == measured
        self.missed += abs(found - measured)
        self.taken += measured

    def __add__(self, other: Score) -> Score:
        """Return the score of both sets."""
        return Score(*(getattr(self, one.name) + getattr(other, one.name) for one in fields(self)))

    def cells(self) -> list[str]:
        """Return the number of calls, the share of exact ones, and that of bytes missed."""
        return [str(self.calls), f"{100 * self.exact / self.calls:.1f} %", f"{100 * self.missed / self.taken:.1f} %"]


def calls(path: Path) -> list[dict[str, Any]]:
    """Return the calls of a record that were measured."""
    if not path.exists():
        return []
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return [line for line in map(json.loads, file) if "allocated" in line]


def scores(lines: Iterable[Mapping[str, Any]]) -> dict[str, dict[Kind, Score]]:
    """Return the scores by source and operation."""
    text = device_text(find_gpu("h200"))
    assert text is not None
    rules = Processor((9, 0), 132, (2, 11))
    processors = {"library": replace(rules, cudnn=Heuristics(cudnn_library(), text)), "rules": rules}
    found: dict[str, dict[Kind, Score]] = {
        source: {kind: Score() for kind in KINDS} for source in ("handle", *processors)
    }
    for line in lines:
        case = {**line, "output": line["allocated"]["output"]}
        one = as_called(case)
        last, transposed = line["last"], line["transposed"]
        depthwise = 1 < line["groups"] == line["inside"] and not transposed
        in_aten = depthwise and not last and not is_cudnn_depthwise(one)
        for kind in KINDS:
            asked, measured = SWAPPED.get(kind, kind) if transposed else kind, line["allocated"][kind]
            found["handle"][kind].add(0 if in_aten else line["by handle"][kind][0][3], measured)
            for source, processor in processors.items():
                size = 0 if in_aten else convolution.workspace_bytes(asked, one, processor)
                found[source][kind].add(size, measured)
    return found


def calls_table() -> list[str]:
    """Return a table of the single calls."""
    titles = {"handle": "the GPU's handle", "library": "the library", "rules": "the rules"}
    rows = []
    for file, parts in CALLS.items():
        every = calls(HERE / "records" / file)
        for part, title in parts.items():
            lines = [line for line in every if line["source"] == part]
            if not lines:
                continue
            for source, of in scores(lines).items():
                cells = sum(of.values(), Score()).cells()
                rows.append([title, titles[source], *cells])
    return table(["calls", "predicted by", "workspaces", "exact", "bytes missed"], rows)


Errors = Mapping[str, Mapping[str, Mapping[str, float]]]
"""Relative errors by title of the predictions, network and figure."""


def measured_in(campaign: Campaign, *, skipped: bool = True) -> dict[str, dict[str, Any]]:
    """Return the networks that were measured; without ``skipped``, as if no first step had been skipped."""
    found = {line["name"]: line for line in _lines(campaign.records) if line["status"] == "completed"}
    return found if skipped else {name: line | {"skipped_steps": 0} for name, line in found.items()}


def errors_of(campaign: Campaign, *, skipped: bool = True) -> Errors:
    """Return the errors of the networks that were measured, of sources that predicted all of them.

    They are those of the prediction with as many skipped first steps as the run had, or with none.
    """
    measured = measured_in(campaign, skipped=skipped)
    found: dict[str, dict[str, dict[str, float]]] = {}
    for title, file in campaign.predictions.items():
        stored = {line["name"]: line for line in _lines(file) if "memory" in line}
        if measured and measured.keys() <= stored.keys():
            found[title] = {
                name: {figure: total / line[figure] - 1 for figure, total in run.items() if figure in FIGURES}
                for name, line in measured.items()
                for run in (everyday_cases.memory_as_run(stored[name], line),)
            }
    return found


def _lines(files: str) -> list[dict[str, Any]]:
    return [line for path in sorted(HERE.glob(files)) for line in everyday_cases.lines(path)]


def summary(title: str, errors: Errors, *, by_precision: bool) -> Iterator[list[str]]:
    """Yield rows of median and worst errors, by source and precision."""
    for source, by_name in errors.items():
        for precision in (*PRECISIONS, "") if by_precision else ("",):
            of = [each for name, each in by_name.items() if name.endswith(precision)]
            if of:
                yield [title, source, precision or "all", str(len(of)), *figures(of)]


def figures(of: Sequence[Mapping[str, float]]) -> list[str]:
    """Return median and worst error of each figure, and how many training runs are within limits of reserved memory."""
    cells = []
    for figure in FIGURES:
        sizes = [abs(each[figure]) for each in of]
        cells += [percent(median(sizes)), percent(max(sizes))]
    return cells + [str(sum(abs(each["peak_reserved_bytes"]) <= limit for each in of)) for limit in LIMITS]


def networks_table(errors: Errors, measured: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return a table of all networks, with the first steps that they skipped."""
    names = sorted({name for by_name in errors.values() for name in by_name})
    rows = [
        [
            name,
            str(measured[name]["skipped_steps"] or ""),
            *(signed(of[name][figure]) if name in of else "" for of in errors.values() for figure in FIGURES),
        ]
        for name in names
    ]
    heads = [f"{figure}, {source}" for source in errors for figure in FIGURES.values()]
    return table(["network", "skipped steps", *heads], rows)


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return a table in Markdown."""
    if not rows:
        return ["Not measured yet."]
    return [f"| {' | '.join(heads)} |", f"|{' --- |' * len(heads)}", *(f"| {' | '.join(row)} |" for row in rows)]


def percent(share: float) -> str:
    """Format the size of an error."""
    return f"{100 * share:.2f} %"


def signed(share: float) -> str:
    """Format an error."""
    return f"{100 * share:+.2f} %".replace("-", "−")


def page() -> str:
    """Return the page."""
    heads = ["training runs", "predicted with", "precision", "count"]
    heads += [f"{title}, {what}" for title in FIGURES.values() for what in ("median", "worst")]
    heads += [f"within {limit:.0%}".replace("%", " %") for limit in LIMITS]
    blind: list[list[str]] = []
    lists = []
    for campaign in BLIND:
        errors = errors_of(campaign)
        blind += summary(campaign.title, errors, by_precision=True)
        plain = {f"{source}, none skipped": of for source, of in errors_of(campaign, skipped=False).items()}
        blind += summary(campaign.title, plain, by_precision=False)
        if errors:
            each = "\n".join(networks_table(errors, measured_in(campaign)))
            lists.append(DETAILS_TEXT.format(title=f"Each training: {campaign.title}", table=each))
    earlier = [row for one in EARLIER for row in summary(one.title, errors_of(one), by_precision=False)]
    folded = DETAILS_TEXT.format(title=EARLIER_TITLE, table="\n".join(table(heads, earlier)))
    about = json.loads(TABLE.read_text(encoding="utf-8"))["counts"]
    return PAGE_TEXT.format(
        blind="\n".join(table(heads, blind)),
        lists="\n".join(lists),
        earlier=folded,
        calls="\n".join(calls_table()),
        asked=f"{about['calls']:,}",
        held_out=f"{about['held out']:,}",
        right=f"{about['right'] / about['held out']:.1%}".replace("%", " %"),
    )


def main() -> int:
    """Write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=PAGE)
    options = parser.parse_args()
    torch.backends.cudnn.deterministic = False
    options.out.write_text(page(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
