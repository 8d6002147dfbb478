"""Predict the published throughputs of ``throughput.yaml``: ``python benchmarks/parallel/published/throughput.py``."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import yaml

from trainatomy.api import predict
from trainatomy.errors import TrainatomyError
from trainatomy.workload.schema import Workload

ROWS = Path(__file__).with_name("throughput.yaml")


class Row(NamedTuple):
    """A training, and the tokens per second of each GPU that its source gives."""

    group: str
    name: str
    workload: Mapping[str, Any]
    tokens_per_second: float


def rows() -> Iterator[Row]:
    """Yield the rows of all groups."""
    for group, content in yaml.safe_load(ROWS.read_text(encoding="utf-8"))["groups"].items():
        for row in content.get("rows", ()):
            yield Row(group, row["name"], merged(content["workload"], row["set"]), row["tokens_per_second"])
        for size, gpus, batch, accumulation, checkpointed, published in content.get("table", ()):
            changes = {
                "model": {"config": content["sizes"][size]},
                "train": {
                    "per_device_train_batch_size": batch,
                    "gradient_accumulation_steps": accumulation,
                    "gradient_checkpointing": checkpointed,
                },
                "parallel": {"nodes": gpus // 8},
            }
            yield Row(group, f"{size} on {gpus}", merged(content["workload"], changes), published)


def merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return a mapping with others inside it, changed key by key."""
    result = dict(base)
    for key, value in changes.items():
        result[key] = merged(result.get(key, {}), value) if isinstance(value, Mapping) else value
    return result


def tokens_per_second(mapping: Mapping[str, Any]) -> float:
    """Return the predicted tokens per second of each GPU."""
    workload = Workload.from_mapping(mapping)
    time = predict(workload).time
    assert time is not None and time.tokens_per_second is not None
    return time.tokens_per_second


def main() -> int:
    """Print a line for each row and a summary for each group."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="rows whose group or name contains this")
    options = parser.parse_args()
    errors: dict[str, list[float]] = {}
    for row in rows():
        if options.only not in f"{row.group} {row.name}":
            continue
        try:
            found = tokens_per_second(row.workload)
        except TrainatomyError as refusal:
            print(f"{row.group:28} {row.name:40} {str(refusal).splitlines()[0]}", flush=True)
            continue
        error = found / row.tokens_per_second - 1
        errors.setdefault(row.group, []).append(error)
        print(f"{row.group:28} {row.name:40} {found:8,.0f} {row.tokens_per_second:8,.0f} {error:+7.1%}", flush=True)
    for group, found_errors in errors.items():
        print(f"{group}: median {median(map(abs, found_errors)):.1%}, worst {max(map(abs, found_errors)):.1%}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
