"""Draw trainings for ``trainings.yaml``: model, precision and batch by a seed, so that nobody chooses what is easy.

``python benchmarks/timing/drawn_trainings.py [--seed 24] [--count 32] [--of usual] [--wide 0] [--random 0]`` prints
rows of ``trainings.yaml``.  Each family of ``drawn_trainings.yaml`` gives as many trainings as its share of the
candidates; a candidate is drawn once.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from random import Random
from typing import Any

import yaml

sys.path.append(str(Path(__file__).resolve().parent))

CANDIDATES = Path(__file__).resolve().parent / "drawn_trainings.yaml"
UNNUMBERED = (24, 25)
"""Seeds that the names of their trainings do not say."""
PRECISIONS = ("fp32", "tf32", "bf16", "bf16", "fp16")
LONG_TRANSCRIPTS = 52
"""The last seed whose recordings had transcripts of 512 labels, longer than what is spoken."""
FACTORS, LATER_FACTORS = (0.5, 0.75, 1.0, 1.25, 1.5), (0.6, 0.9, 1.1, 1.4, 1.75)
"""Multiples of a candidate's batch; those of draws after ``LAST_USUAL``, when few of the former had not been drawn."""
LAST_USUAL = 60
"""The last seed with the usual factors."""

NETWORKS = ("images", "images", "volumes", "series", "texts", "rows")
"""Families of random networks, those of images twice."""

Families = dict[str, dict[str, dict[str, Any]]]


def sets() -> dict[str, Families]:
    """Return what may be drawn from: for each family the models with their usual batch, by the name of the set."""
    known: dict[str, Families] = yaml.safe_load(CANDIDATES.read_text(encoding="utf-8"))
    known |= {f"usual and {name}": known["usual"] | known[name] for name in ("latest", "coming")}
    before = {name.rpartition("-drawn-")[0].rpartition("-")[0] for name in drawn(30, 46, known["usual and coming"])}
    remaining = {
        family: {name: row for name, row in models.items() if name not in before}
        for family, models in known["coming"].items()
    }
    known |= {"usual and remaining": known["usual"] | remaining}
    quantised = {
        name: settings
        for set_name, families in known.items()
        for models in families.values()
        for name, settings in models.items()
        if set_name not in ("quantised later", "quantised last") and "quantization" in settings.get("model", {})
    }
    known["quantised"] = {"quantised": quantised}
    others = [known[name] for name in ("never timed", "further", "others", "latest", "coming")]
    return known | {"all others": {family: models for one in others for family, models in one.items()}}


def drawn(seed: int, count: int, candidates: Mapping[str, Mapping[str, dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    """Return rows by their names: from each family as many as its share, with a precision and a batch."""
    random, ending = Random(seed), "drawn" if seed in UNNUMBERED else f"drawn-{seed}"
    total = sum(map(len, candidates.values()))
    rows: dict[str, dict[str, Any]] = {}
    for family in candidates.values():
        for name in sorted(random.sample(sorted(family), round(count * len(family) / total))):
            settings = family[name]
            if seed <= LONG_TRANSCRIPTS and "ForCTC" in settings.get("model", {}).get("class", ""):
                settings = {**settings, "target": 512}
            precision = "bf16" if "quantization" in settings.get("model", {}) else random.choice(PRECISIONS)
            rows[f"{name}-{precision}-{ending}"] = _row(random, seed, settings, precision)
    return rows


def wide(seed: int, count: int) -> dict[str, dict[str, Any]]:
    """Return rows of wide recurrent networks by their names: kind, sizes, layers, directions, precision and batch."""
    random = Random(f"wide recurrent {seed}")
    rows: dict[str, dict[str, Any]] = {}
    for _ in range(count):
        kind = random.choice(("lstm", "lstm", "gru", "gru", "rnn"))
        inputs, hidden = random.randrange(128, 769, 32), random.randrange(384, 1281, random.choice((2, 4, 8, 64)))
        form = f"{kind}_{inputs}_{hidden}_{random.choice((1, 2, 3, 4))}{random.choice(('', '', '_both'))}"
        precision = random.choice(PRECISIONS)
        settings = {"of": "recurrent", "model": {"factory": f"recurrent_networks.py:{form}"}, "batch": 48}
        rows[f"{form.replace('_', '-')}-{precision}-drawn-{seed}"] = _row(random, seed, settings, precision)
    return rows


def networks(seed: int, count: int) -> dict[str, dict[str, Any]]:
    """Return rows of random networks (``random_networks.py``) by their names."""
    from random_networks import usual_batch

    random = Random(f"random networks {seed}")
    rows: dict[str, dict[str, Any]] = {}
    for number in range(count):
        family, precision = random.choice(NETWORKS), random.choice(PRECISIONS)
        own = 100 * seed + number
        form = f"random_networks.py:{family}_{own}"
        settings = {"of": "random", "model": {"factory": form}, "data": {"factory": f"{form}_batch"}}
        row = _row(random, seed, {**settings, "batch": usual_batch(family, own)}, precision)
        rows[f"random-{family}-{number}-{precision}-drawn-{seed}"] = row
    return rows


def _row(random: Random, seed: int, settings: Mapping[str, Any], precision: str) -> dict[str, Any]:
    factor = random.choice(FACTORS if seed <= LAST_USUAL else LATER_FACTORS)
    row = {**settings, "batch": max(round(settings["batch"] * factor), 1)}
    return row if precision == "fp32" else {**row, "precision": precision}


def main() -> int:
    """Print the rows."""
    known = sets()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=24)
    parser.add_argument("--count", type=int, default=32)
    parser.add_argument("--of", choices=tuple(known), default="usual", help="what to draw from")
    parser.add_argument("--wide", type=int, default=0, help="wide recurrent networks besides")
    parser.add_argument("--random", type=int, default=0, help="random networks besides")
    options = parser.parse_args()
    rows = drawn(options.seed, options.count, known[options.of]) | wide(options.seed, options.wide)
    rows |= networks(options.seed, options.random)
    for name, row in rows.items():
        print(f"  {name}: {json.dumps(row)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
