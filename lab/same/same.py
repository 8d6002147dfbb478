"""Check that predictions, and the ingredients that they are made of, are what they were, to the last bit.

    python lab/same/same.py                     compare with predictions.jsonl; exit status 1 if any differs
    python lab/same/same.py --write             record them instead
    python lab/same/same.py --only qlora ddp    cases whose names contain one of these
    python lab/same/same.py --cudnn             networks with convolutions, as where cuDNN's library is installed
    python lab/same/same.py --allocations out.json --only qlora    what is allocated by phase, module and operation

A change of the code that is meant to change no prediction changes nothing here.  One that is meant to records the new
predictions in the same commit, and says why.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import zlib
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing import get_context
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
RECORD = HERE / "predictions.jsonl"
RECORD_WITH_LIBRARY = HERE / "predictions_cudnn.jsonl"
"""The same by cuDNN's library, which builds of torch for CUDA bring, instead of rules."""
CONVOLVING = ("convnext", "efficientnet", "mobilenet", "mobilevit", "segformer", "unet")
"""Parts of names of cases that are predicted by cuDNN's library: networks of transformers, and one of our own."""
GRID_SHARE = 6
"""A sample has one in so many rows of the accuracy grid."""
TASKS = 40
"""Predictions of a worker before another takes its place, as libraries keep memory."""
SHOWN = 6
"""Figures shown of a prediction that differs."""


def find_modules() -> None:
    """Let this process, or a worker, import the cases and the rows of the grid, and predict convolutions by rules."""
    os.environ.setdefault("TRAINATOMY_CUDNN", "none")  # not by the library of cuDNN that a build of torch brings
    os.environ["TRAINATOMY_CACHE"] = ""  # no code of PyTorch's compiler that other runs wrote
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # read by torch: each worker has a core, and threads wait for one
    sys.path[:0] = [str(HERE), str(HERE.parent / "accuracy")]


def predict_case(name: str, in_detail: bool = False) -> Any:
    """Predict, or compute, the case of that name; see ``predicted.Predicted``."""
    import ingredients
    import predicted

    if name in ingredients.cases():
        return predicted.Predicted(name, ingredients.figures(ingredients.cases()[name]()))
    commands = predicted.command_cases()
    if name in commands:
        return predicted.run_command(name, commands[name])
    row = next(row for row in predicted.training_cases() if row.name == name)
    return predicted.predict_training(row, in_detail=in_detail)


def names_of(only: Sequence[str], *, sampled: bool = False) -> list[str]:
    """Return the names of the cases that contain one of the texts, in the order to predict them; all if there is none.

    ``sampled`` leaves out the ingredients, and most rows of the accuracy grid by a hash of their names.
    """
    import ingredients
    import predicted

    grid = [row.name for row in predicted.grid_rows()]
    if sampled:
        grid = [name for name in grid if not zlib.crc32(name.encode()) % GRID_SHARE]
    names = [*predicted.command_cases(), *(row.name for row in predicted.feature_rows()), *grid]
    names = names if sampled else [*ingredients.cases(), *names]
    last = predicted.cases_with_torchvision()
    chosen = [name for name in names if not only or any(text in name for text in only)]
    return sorted(chosen, key=lambda name: name in last)  # a worker that has loaded torchvision cannot load much else


def predict_all(names: Sequence[str], jobs: int, *, in_detail: bool = False) -> Iterator[Any]:
    """Yield the predictions of these cases as they are ready."""
    tasks = [(name, in_detail) for name in names]
    with get_context("spawn").Pool(jobs, find_modules, maxtasksperchild=TASKS) as pool:
        for number, found in enumerate(pool.imap_unordered(_predict_task, tasks), 1):
            if sys.stderr.isatty() or not number % TASKS:
                print(
                    f"{number} of {len(tasks)}", end="\r" if sys.stderr.isatty() else "\n", file=sys.stderr, flush=True
                )
            yield found


def _predict_task(task: tuple[str, bool]) -> Any:
    return predict_case(*task)


def read(path: Path = RECORD) -> dict[str, dict[str, Any]]:
    """Return recorded predictions by the names of their cases."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return {entry["name"]: entry for entry in map(json.loads, lines)}


def write(records: Mapping[str, Mapping[str, Any]], path: Path = RECORD) -> None:
    path.write_text("".join(json.dumps(records[name]) + "\n" for name in sorted(records)), encoding="utf-8")


def is_library_installed() -> bool:
    """Return whether cuDNN's library is installed; say why not."""
    from trainatomy.errors import MissingLibrary
    from trainatomy.operators.allocation.cudnn.backend import cudnn_library

    try:
        cudnn_library()
    except MissingLibrary as missing:
        print(f"not compared: {missing}")
        return False
    return True


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Return what differs between two records of a case: memory first, and the largest relative change of a figure."""
    if old.get("error", "") != new.get("error", ""):
        return [f"error: {old.get('error') or 'none'} -> {new.get('error') or 'none'}"]
    before, after = old.get("figures", {}), new.get("figures", {})
    changed = [path for path in {**before, **after} if before.get(path) != after.get(path)]
    changed.sort(key=lambda path: (not path.startswith("memory."), -_relative(before.get(path), after.get(path))))
    lines = [f"{path}: {_change(before.get(path), after.get(path))}" for path in changed[:SHOWN]]
    if len(changed) > SHOWN:
        lines.append(f"{len(changed) - SHOWN} more figures")
    other = [key for key in ("cudnn", "trace", "operations", "details") if old.get(key, "") != new.get(key, "")]
    return lines + ([f"not the same {', '.join(other)}"] if other else [])


def _relative(old: Any, new: Any) -> float:
    if all(isinstance(value, (int, float)) for value in (old, new)) and old:
        return abs(new / old - 1)
    return float("inf")


def _change(old: Any, new: Any) -> str:
    relative = _relative(old, new)
    return f"{old} -> {new}" + (f" ({new / old - 1:+.3%})" if relative < float("inf") else "")


def _write_allocations(predictions: Sequence[Any], path: Path) -> None:
    rows = {
        found.name: [[*place, *counts] for place, counts in sorted(found.allocations.items())] for found in predictions
    }
    path.write_text(json.dumps(rows), encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="record the predictions")
    parser.add_argument("--only", nargs="+", default=[], metavar="TEXT", help="cases whose names contain a text")
    parser.add_argument("--sampled", action="store_true", help="one in six rows of the accuracy grid")
    parser.add_argument("--cudnn", action="store_true", help="by cuDNN's library: networks with convolutions")
    parser.add_argument("--record", type=Path, metavar="FILE", help="recorded predictions")
    parser.add_argument("--allocations", type=Path, metavar="FILE", help="write what is allocated; compare nothing")
    parser.add_argument("--jobs", type=int, default=2, metavar="N")
    options = parser.parse_args()
    if os.environ.get("PYTHONHASHSEED") != "0":  # transformers walks through sets of names of layers
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, "PYTHONHASHSEED": "0"})
    if options.cudnn:
        os.environ["TRAINATOMY_CUDNN"] = ""  # look for the library
        options.only = options.only or CONVOLVING
    options.record = options.record or (RECORD_WITH_LIBRARY if options.cudnn else RECORD)
    find_modules()
    if options.cudnn and not is_library_installed():
        return 0
    names = names_of(options.only, sampled=options.sampled)
    predictions = list(predict_all(names, options.jobs, in_detail=options.allocations is not None))
    found = {new.name: new.record() for new in predictions}
    known = read(options.record)
    if options.allocations:
        _write_allocations(predictions, options.allocations)
    if options.write:
        write({**(known if options.only else {}), **found}, options.record)
    if options.write or options.allocations:
        return 0
    different = {name: differences(known.get(name, {}), new) for name, new in sorted(found.items())}
    different = {name: lines for name, lines in different.items() if lines}
    for name, lines in different.items():
        print(name, *lines, sep="\n  ")
    print(f"{len(found) - len(different)} of {len(found)} cases are the same")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
