"""Compare collectives with published times.

    python lab/public/collectives.py --aiconfigurator FOLDER [--points NAME]

Prints the errors of every card in aiconfigurator's tables of NCCL; with ``--points``, the times of one of them as
catalog/links.yaml has them.  A table's sizes are numbers of 16 bits.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np
import pandas as pd
from products import sources

from trainatomy.catalog.gpus import find_gpu
from trainatomy.catalog.links import links_of
from trainatomy.operators.cost.communication import collective_seconds

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter")
STEP = 4
"""Ratio of the sizes that are kept."""


def table_of(folder: Path, name: str) -> pd.DataFrame:
    """Return collectives of 16-bit numbers by bytes and microseconds."""
    known = sources()["aiconfigurator"]
    rows = pd.read_parquet(folder / known["nccl_path"].format(gpu=name, version=known["nccl"][name]))
    rows = rows[(rows.nccl_dtype == "half") & rows.op_name.isin(COLLECTIVES)]
    return rows.assign(bytes=2 * rows.message_size, us=1e3 * rows.latency)


def print_points(rows: pd.DataFrame) -> None:
    """Print the times of a card, for links.yaml."""
    kept = {*(1024 * STEP ** np.arange(12)), rows.bytes.max()}
    for ranks, some in rows.groupby("num_gpus"):
        print(f"        ranks: {ranks}\n        microseconds:")
        for collective in COLLECTIVES:
            found = some[(some.op_name == collective) & some.bytes.isin(kept)].sort_values("bytes")
            times = ", ".join(f"{size}: {us:.4g}" for size, us in zip(found.bytes, found.us, strict=True))
            print(f"          {collective}: {{{times}}}")


def main() -> int:
    """Print errors, or points."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--aiconfigurator", type=Path, required=True)
    parser.add_argument("--points", help="a card by aiconfigurator's name")
    asked, known = parser.parse_args(), sources()["aiconfigurator"]
    if asked.points:
        print_points(table_of(asked.aiconfigurator, asked.points))
        return 0
    print(f"| GPU | ranks | {' | '.join(f'{each}, from 16 MiB on' for each in COLLECTIVES)} |\n|---|--:{'|--:' * 3}|")
    for name in known["nccl"]:
        gpu = find_gpu(known["gpus"][name])
        for ranks, rows in table_of(asked.aiconfigurator, name).groupby("num_gpus"):
            links, cells = links_of(gpu, int(ranks), 1), []
            for collective in COLLECTIVES:
                some = rows[(rows.op_name == collective) & (rows.bytes >= 2**16)]
                predicted = [collective_seconds(collective, int(size), int(ranks), 1, links) for size in some.bytes]
                errors = np.array(predicted) * 1e6 / some.us.to_numpy() - 1
                large = errors[some.bytes.to_numpy() >= 2**24]
                cells.append(f"{100 * np.median(errors):+.0f}, {100 * np.median(large):+.0f} %")
            print(f"| {gpu.id} | {ranks} | {' | '.join(cells)} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
