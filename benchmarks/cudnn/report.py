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
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "everyday"))

import everyday_cases
import torch
from probe import KINDS, SWAPPED, as_called
from report_text import DETAILS_TEXT, PAGE_TEXT

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
FIGURES = {"peak_allocated_bytes": "allocated", "peak_reserved_bytes": "reserved"}
SOURCES = {"library": "cuDNN's library", "rules": "the rules"}


SEEN = tuple(case.name.removesuffix("fp32") for case in everyday_cases.cases(HERE / "cases") if case.kind == "networks")
"""The twenty networks that the rules were made from; names end with a hyphen."""


@dataclass(frozen=True)
class Campaign:
    """Networks that were measured together, and the files of their predictions by title, in the folder of this script.

    ``records`` may be several files; ``listed`` are the titles whose errors are listed for each network.
    """

    title: str
    records: str
    predictions: Mapping[str, str]
    listed: tuple[str, ...] = tuple(SOURCES.values())


SEEN_SINCE = {"cuDNN's library, seen": "seen/h200-library.jsonl", "the rules, seen": "seen/h200-rules.jsonl"}
"""Predictions by code that was made with the measurements at hand."""
CAMPAIGNS = {
    "fourth": Campaign("Drawn batches and images", "held_out_3/records/*.jsonl", {
        "cuDNN's library": "held_out_3/predictions/h200-library.jsonl",
        "the rules": "held_out_3/predictions/h200-rules.jsonl",
    }),
    "third": Campaign("Yet other batches and images", "held_out_2/records/h200.jsonl", {
        "cuDNN's library": "held_out_2/predictions/h200-library.jsonl",
        "cuDNN's library, second": "held_out_2/predictions/h200-library-second.jsonl",
        "the rules": "held_out_2/predictions/h200-rules.jsonl",
        **SEEN_SINCE,
    }),
    "others": Campaign("Other images", "held_out/records/h200.jsonl", {
        "cuDNN's library": "held_out/predictions/h200-library.jsonl",
        "the rules": "held_out/predictions/h200-rules.jsonl",
        **SEEN_SINCE,
    }),
    "batches": Campaign("Other batches, on an H100", "records/h100-sxm.jsonl", {
        "cuDNN's library, first": "predictions/h100-sxm-library.jsonl",
        "the rules, first": "predictions/h100-sxm-rules.jsonl",
        "cuDNN's library": "predictions/h100-sxm-library-second.jsonl",
        "the rules": "predictions/h100-sxm-rules-second.jsonl",
    }),
    "batches_h200": Campaign("Other batches, on an H200", "records/h200-batches.jsonl", {
        "cuDNN's library": "predictions/h200-library.jsonl",
        "the rules": "predictions/h200-rules.jsonl",
        **SEEN_SINCE,
    }),
    "sixty": Campaign("The sixty", "records/h200.jsonl", {
        "cuDNN's library": "predictions/h200-library.jsonl",
        "the rules": "predictions/h200-rules.jsonl",
        **SEEN_SINCE,
    }),
}  # fmt: skip
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
    titles = {"handle": "cuDNN's heuristics with the GPU's handle", **SOURCES}
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


def errors_of(campaign: Campaign) -> Errors:
    """Return the errors of the networks that were measured."""
    files = sorted(HERE.glob(campaign.records))
    measured = {line["name"]: line for path in files for line in everyday_cases.lines(path)}
    found: dict[str, dict[str, dict[str, float]]] = {}
    for title, file in campaign.predictions.items():
        stored = {line["name"]: line for line in everyday_cases.lines(HERE / file)}
        found[title] = {
            name: {figure: stored[name]["memory"][figure] / line[figure] - 1 for figure in FIGURES}
            for name, line in measured.items()
            if line["status"] == "completed" and "memory" in stored.get(name, {})
        }
    return found


def networks_summary(errors: Errors) -> list[str]:
    """Return a table of median and worst errors by source and precision."""
    rows = []
    for title, by_name in errors.items():
        for precision in ("fp32", "fp16", "bf16", ""):
            of = [each for name, each in by_name.items() if name.endswith(precision)]
            if not of:
                continue
            cells = [title, precision or "all", str(len(of))]
            for figure in FIGURES:
                sizes = [abs(each[figure]) for each in of]
                cells += [percent(median(sizes)), percent(max(sizes))]
            rows.append(cells)
    heads = ["predicted with", "precision", "networks"]
    heads += [f"{title}, {what}" for title in FIGURES.values() for what in ("median", "worst")]
    return table(heads, rows)


def is_new(name: str) -> bool:
    """Return whether a training's network is none of the twenty, with whatever batch and layout."""
    return not any(name.replace("_last-", "-").startswith(known) for known in SEEN)


def networks_table(errors: Errors, listed: Sequence[str]) -> list[str]:
    """Return a table of all networks."""
    rows = [
        [name, *(signed(errors[title][name][figure]) for title in listed for figure in FIGURES)]
        for name in sorted(errors[listed[0]])
    ]
    heads = [f"{figure}, {title}" for title in listed for figure in FIGURES.values()]
    return table(["network", *heads], rows)


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return a table in Markdown."""
    return [f"| {' | '.join(heads)} |", f"|{' --- |' * len(heads)}", *(f"| {' | '.join(row)} |" for row in rows)]


def percent(share: float) -> str:
    """Format the size of an error."""
    return f"{100 * share:.2f} %"


def signed(share: float) -> str:
    """Format an error."""
    return f"{100 * share:+.2f} %".replace("-", "−")


def page() -> str:
    """Return the page."""
    parts = {"calls": calls_table()}
    counts, details = {}, []
    for name, campaign in CAMPAIGNS.items():
        errors = {title: of for title, of in errors_of(campaign).items() if of}
        first = errors.get(campaign.listed[0], {})
        errors = {title: of for title, of in errors.items() if title not in SEEN_SINCE or len(of) == len(first)}
        new = {title: {n: each for n, each in errors[title].items() if is_new(n)} for title in campaign.listed if first}
        counts[f"{name}_new"] = len(new.get(campaign.listed[0], {}))
        counts[f"{name}_measured"] = len(first)
        parts[f"{name}_new_table"] = networks_summary(new)
        parts[name] = networks_summary(errors) if first else ["Not measured yet."]
        if first:
            each = "\n".join(networks_table(errors, campaign.listed))
            details.append(DETAILS_TEXT.format(title=campaign.title, count=len(first), table=each))
    tables = {name: "\n".join(lines) for name, lines in parts.items()}
    return PAGE_TEXT.format(**tables, **counts, details="\n".join(details)).rstrip() + "\n"


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
