"""Figures of docs/accuracy.md: from the cases on the pages of the laboratory, measured scripts and published times."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from functools import cache
from math import ceil
from statistics import median
from typing import Any

from concepts.page import ROOT, page, table

LAB = ROOT / "lab"
EXACT = 0.005
"""Errors below this count as exact, in percent, as on the pages that give two decimals."""


def accuracy_page() -> str:
    """Render docs/accuracy.md."""
    walls = found("one-gpu", r": (\d+) runs at the largest batch.*?the verdict was right in (\d+)")
    unpaced = found("step-times", r"off by (\d+ %) \(H200\) and (\d+ %) \(H100\) in the median")
    values = {
        "memory": memory_table(),
        "tuned": len(errors("one-gpu", "Rows", "allocated", of="tuning")),
        "scripts": len(scripts("allocated")),
        "walls": walls.group(1),
        "right": walls.group(2),
        "tools": tools(),
        "time": time_table(),
        "published": len(published()),
        "inside": sum(map(is_inside, published())),
        "steps": {name: step_figures(steps) for name, steps in published_steps().items()},
        "cards": len({step["gpu"] for step in published_steps()["all"]}),
        "unpaced": " and ".join(unpaced.groups()),
        "fit": fit_table(),
        "seen": found("fit", r"settings for (\d+) training runs").group(1),
        "unseen": found("fit", r"For (\d+) more").group(1),
    }
    return page("accuracy.md", values)


def memory_table() -> str:
    """Tabulate the errors of memory: a line for each kind of cases."""
    one_gpu = ("one-gpu", "Rows")
    found_of = {
        "one GPU, held out": ("11-21", one_gpu, "held out"),
        "one GPU, new families": ("11-21", one_gpu, "fresh unseen"),
    }
    figures = ("allocated", "reserved")
    lines = [
        (title, *both(*(errors(*where, one, of=of) for one in figures)), f"H200, {when}", link("one-gpu"))
        for title, (when, where, of) in found_of.items()
    ]
    lines += [
        (title, *both(*(errors(name, section, f"{one}{kind}") for one in figures)), on, link(name))
        for title, name, section, kind, on in (
            ("evaluation and others", "everyday", "Cases", "", "H200, 11-22 to 12-01"),
            ("networks for images", "convolutions", "How accurate it is", ", library", "H200 and H100, 11-24"),
        )
    ]
    lines += [
        ("one GPU, random families", *both(*map(random_families, figures)), "H200, 11-23", link("random-trainings")),
        ("scripts", *both(*map(scripts, figures)), "H200, November", "[cases](../lab/scripts/measured.jsonl)"),
        (
            "two GPUs, held out",
            *both(*(errors("several-gpus", "Cases", one, of="held out") for one in figures)),
            "2 H200, 11-22 to 27",
            link("several-gpus"),
        ),
        (
            "two and four GPUs, blind",
            *both(*(errors("several-gpus-blind", "", one) for one in figures)),
            "H200 and H100, 11-26 and 27",
            link("several-gpus-blind"),
        ),
    ]
    head = (
        "trainings",
        "cases",
        "allocated: exact, within 1 %, worst",
        "reserved: the same",
        "measured on, in 2026",
        "record",
    )
    return table(head, lines)


def time_table() -> str:
    """Tabulate the errors of step times: a line for each kind of cases."""
    lines = [
        (f"{row['']}, today's prices", row["trainings"], row["median"], row["worst"], link("step-times", "today"))
        for row in rows("step-times", "Today")
    ]
    draws = [row for row in rows("step-times", "Blind draws") if "seed 63" in row.get("date, draw", "")]
    for title in ("GPU time", "GPU-bound steps", "CPU-bound steps"):
        count, _, rest = draws[0][title].partition(": ")
        middle, worst, _ = rest.split(", ")
        lines.append((f"{title}, H200, blind draw", count, middle, worst, link("step-times", "blind-draws")))
    held_out = next(row for row in rows("several-gpus", "Held out") if row[""].startswith("time, where the GPU bounds"))
    of_both = held_out["exact"].split(" of ")[1]
    lines.append(
        ("GPU-bound steps, 2 H200, held out", of_both, held_out["median"], held_out["worst"], link("several-gpus"))
    )
    sizes = [100 * abs(one["predicted_seconds"] / one["published_seconds"] - 1) for one in published()]
    about = f"{median(sizes):.1f} %", f"{max(sizes):.1f} %", "[cases](../lab/timing/published.json)"
    lines.append(("steps that others published, held out", str(len(sizes)), *about))
    for title, kind in (
        ("the same on more cards, GPU-bound", "first"),
        ("the same, read and predicted last", "sealed"),
    ):
        figures = step_figures(published_steps()[kind])
        about = f"{figures['median']:.1f} %", f"{figures['worst']:.1f} %", link("published-steps")
        lines.append((title, str(figures["count"]), *about))
    return table(("times", "cases", "median", "worst", "record"), lines)


@cache
def published() -> list[dict[str, Any]]:
    """Return the held-out steps that others published, with their predictions."""
    outcomes = json.loads((LAB / "timing" / "published.json").read_text("utf-8"))["outcomes"]
    return [one for one in outcomes if one["held_out"]]


@cache
def published_steps() -> dict[str, list[dict[str, Any]]]:
    """Return the published steps that nothing is fitted to and that the GPU bounds: read first, sealed, and all."""
    steps = json.loads((LAB / "timing" / "published_steps.json").read_text("utf-8"))["steps"]
    bound = [step for step in steps if step["bound_by"] != "host"]
    return {
        "all": bound,
        "first": [step for step in bound if not step["sealed"]],
        "sealed": [step for step in bound if step["sealed"]],
    }


def step_figures(steps: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return the number of steps, their median, 90th percentile and largest error, and the share inside, in percent."""
    sizes = sorted(100 * abs(one["predicted_seconds"] / one["published_seconds"] - 1) for one in steps)
    inside = 100 * sum(map(is_inside, steps)) / len(steps)
    most = sizes[ceil(0.9 * len(sizes)) - 1]
    return {"count": len(steps), "median": median(sizes), "most": most, "worst": sizes[-1], "inside": inside}


def is_inside(outcome: dict[str, Any]) -> bool:
    low, high = outcome["interval_seconds"]
    return bool(low <= outcome["published_seconds"] <= high)


def fit_table() -> str:
    """Tabulate the throughput of the settings that the search chose, over that of the fastest measured ones."""
    pattern = r"fastest point of the grid that fits: (?:median (\S+), worst (\S+), (\d+) of (\d+) below 97%)"
    memory = r"Choices that ran out of memory: (\d+) of"
    text = " ".join(text_of("fit").split())
    shares, failed = re.findall(pattern, text), re.findall(memory, text)
    titles = {0: "first trainings", 1: "the same, with a calibration", len(shares) - 1: "unseen trainings"}
    lines = [
        (title, shares[at][3], shares[at][0], shares[at][1], shares[at][2], failed[at], link("fit"))
        for at, title in titles.items()
    ]
    return table(("", "choices", "median", "worst", "below 97%", "out of memory", "record"), lines)


def tools() -> str:
    """Return the smallest and the largest median error of other tools."""
    others = [row for row in rows("one-gpu", "Comparison with other tools") if not row[""].startswith("trainatomy")]
    medians = sorted((row["median"] for row in others), key=lambda text: float(text.split()[0]))
    return f"{medians[0]} to {medians[-1]}"


def random_families(figure: str) -> list[float]:
    """Return the errors of the random families: those that the page lists, and exact ones for all others."""
    count = int(found("random-trainings", r"and (\d+) of these measured").group(1))
    listed = errors("random-trainings", "Those that are not exact", f"{figure}, the rules")
    return [*listed, *[0.0] * (count - len(listed))]


@cache
def scripts(figure: str) -> list[float]:
    """Return the errors of the scripts that were predicted first, without those that try algorithms or compile."""
    lines = map(json.loads, (LAB / "scripts" / "measured.jsonl").read_text("utf-8").splitlines())
    chosen = [one for one in lines if one["set"].startswith("users") and one.get("measured", {}).get("steps")]
    key = f"peak_{figure}_bytes"
    return [100 * (one["predicted"][key] / one["measured"][key] - 1) for one in chosen]


def both(allocated: Sequence[float], reserved: Sequence[float]) -> tuple[str, str, str]:
    """Return the number of cases and a summary of both figures.

    Raises:
        AssertionError: A median error is not below ``EXACT``, as the page says of all.
    """
    assert len(allocated) == len(reserved)
    return str(len(allocated)), summary(allocated), summary(reserved)


def summary(found_errors: Sequence[float]) -> str:
    sizes = [abs(one) for one in found_errors]
    assert median(sizes) < EXACT
    return f"{sum(one < EXACT for one in sizes)}, {sum(one <= 1 for one in sizes)}, {max(sizes):.2f} %"


def errors(name: str, section: str, figure: str, *, of: str = "") -> list[float]:
    """Return the errors of a figure, in percent, of the cases in the tables of a section.

    Args:
        name: Name of the page.
        section: How the heading begins; "" for the whole page.
        figure: How the title of the figure's column begins: the errors are in the next column called *error*, or in
            this one if there is none.
        of: Sets whose cases are meant, as the column *set* names them; "" for all.
    """
    found_errors = []
    for head, cells in tables(name, section):
        at = next((number for number, title in enumerate(head) if title.startswith(figure)), None)
        if at is None or head[0] not in ("row", "case", "run", "network", "training"):
            continue
        if of and cells[head.index("set")] not in of:
            continue
        cell = cells[head.index("error", at) if "error" in head else at]
        if cell == "exact":
            found_errors.append(0.0)
        elif cell.endswith(" %"):
            found_errors.append(float(cell.removesuffix(" %").replace("−", "-")))
    return found_errors


def rows(name: str, section: str) -> Iterator[dict[str, str]]:
    """Yield the rows of the tables of a section, as cells by the titles of the columns."""
    for head, cells in tables(name, section):
        yield dict(zip(head, cells, strict=False))


def tables(name: str, section: str) -> Iterator[tuple[list[str], list[str]]]:
    """Yield each row of the tables of a section, down to the next heading, after the titles of its columns."""
    text = text_of(name)
    if section:
        text = text.split(f"\n## {section}", 1)[1].split("\n## ", 1)[0]
    head: list[str] = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line[1:-1].split("|")] if line.startswith("|") else []
        if not head or not cells:
            head = cells
        elif set(line) - set("|-: "):
            yield head, cells


def found(name: str, pattern: str) -> re.Match[str]:
    """Return where a pattern first occurs in a page whose line ends count as blanks."""
    match = re.search(pattern, " ".join(text_of(name).split()))
    assert match is not None, f"lab/pages/{name}.md has nothing like {pattern}"
    return match


@cache
def text_of(name: str) -> str:
    return (LAB / "pages" / f"{name}.md").read_text(encoding="utf-8")


def link(name: str, anchor: str = "") -> str:
    """Return a link to a page of the laboratory, as text of a table."""
    return f"[cases](../lab/pages/{name}.md{'#' + anchor if anchor else ''})"
