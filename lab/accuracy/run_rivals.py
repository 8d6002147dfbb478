"""Ask other tools about the measured rows: ``python lab/accuracy/run_rivals.py NAME... [--jobs 2]``.

Each row is asked in its own process, forked once the libraries are imported, with a time limit.  Answers are kept in
``records/rivals/NAME.json`` with versions and date, so that the report needs none of the tools.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import outcomes
from processes import NVML_CHECK, Forked
from rivals import About, Said

from trainatomy.libraries import version_of

if TYPE_CHECKING:
    from types import ModuleType

FOLDER = outcomes.RECORDS / "rivals"
POLL_SECONDS = 0.02
LENGTH = 160
"""Number of characters of an error that are kept."""
NOT_ASKED = ("h100-sample.jsonl", "h200-fresh.jsonl")
"""Record files that the tools are not asked about: rows measured again on another GPU, and later ones."""


def rival(name: str) -> ModuleType:
    """Import the module of a tool."""
    return importlib.import_module(f"rivals.{name}")


def rows() -> list[dict[str, Any]]:
    """Return the rows to ask about: every training that had been measured by then, once."""
    files = sorted(outcomes.RECORDS.glob("h*.jsonl"))
    return outcomes.read_records([path for path in files if path.name not in NOT_ASKED])


def ask(modules: Sequence[ModuleType], line: dict[str, Any], arguments: Sequence[Any], path: Path) -> None:
    """Write what each tool answers for a row, or why it does not; runs in a child process."""
    content: dict[str, dict[str, Any]] = {}
    for module in modules:
        began = time.perf_counter()
        try:
            found: dict[str, Any] = {"bytes": int(module.answer(line, *arguments))}
        except BaseException as error:
            first = next(iter(str(error).splitlines()), "")
            found = {"problem": f"{type(error).__name__}: {first}"[:LENGTH]}
        content[module.__name__] = found | {"seconds": time.perf_counter() - began}
    draft = path.with_suffix(".draft")
    draft.write_text(json.dumps(content), encoding="utf-8")
    draft.replace(path)


def fork(modules: Sequence[ModuleType], line: dict[str, Any], arguments: Sequence[Any], path: Path) -> Forked:
    """Ask in a child process, which prints nothing."""
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return Forked(pid)
    try:
        descriptor = os.open(os.devnull, os.O_WRONLY)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        os.environ.pop(NVML_CHECK, None)
        ask(modules, line, arguments, path)
    finally:
        os._exit(0)


def ask_all(
    modules: Sequence[ModuleType], lines: list[dict[str, Any]], options: argparse.Namespace
) -> dict[str, dict[str, dict[str, Any]]]:
    """Return the tools' answers for every row, by name; a row beyond the limits counts as not answered."""
    arguments = [options.device] if options.device else []
    waiting, running = list(reversed(lines)), dict[str, tuple[Forked, float]]()
    found: dict[str, dict[str, dict[str, Any]]] = {}
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="trainatomy-") as folder:
        while waiting or running:
            while waiting and len(running) < options.jobs and time.monotonic() - began < options.time_limit:
                line = waiting.pop()
                path = Path(folder, f"{line['name']}.json")
                running[line["name"]] = fork(modules, line, arguments, path), time.monotonic()
            time.sleep(POLL_SECONDS)
            for name, (child, started) in list(running.items()):
                late = time.monotonic() - started > options.row_limit
                if child.status() is None and not late:
                    continue
                child.kill()
                del running[name]
                found[name] = _result(modules, Path(folder, f"{name}.json"), options.row_limit, late)
                print(f"{name}: {found[name]}", file=sys.stderr, flush=True)
            if time.monotonic() - began >= options.time_limit:
                found |= {line["name"]: _silence(modules, "not asked: no time left", 0.0) for line in waiting}
                waiting.clear()
    return found


def _silence(modules: Sequence[ModuleType], problem: str, seconds: float) -> dict[str, dict[str, Any]]:
    return {module.__name__: {"problem": problem, "seconds": seconds} for module in modules}


def _result(modules: Sequence[ModuleType], path: Path, limit: float, late: bool) -> dict[str, dict[str, Any]]:
    with suppress(FileNotFoundError):
        content: dict[str, dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))
        return content
    return _silence(modules, f"took more than {limit:g} s" if late else "its process died", limit)


def versions(packages: Sequence[str]) -> dict[str, str]:
    """Return the installed versions of ``packages``."""
    found = {name: version_of(name) for name in packages}
    return {name: version for name, version in found.items() if version is not None}


def said(module: ModuleType, found: dict[str, dict[str, Any]]) -> Said:
    """Collect all answers into one value."""
    return Said(
        module.ABOUT,
        datetime.now(UTC).date().isoformat(),
        versions(module.ABOUT.packages),
        round(median(content["seconds"] for content in found.values()), 3),
        {name: content["bytes"] for name, content in found.items() if "bytes" in content},
        {name: content["problem"] for name, content in found.items() if "problem" in content},
    )


def write(one: Said, path: Path) -> None:
    """Write the answers as JSON, one row per line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(asdict(one), indent=1) + "\n", encoding="utf-8")


def read(path: Path) -> Said:
    """Read the answers of one tool."""
    content = json.loads(path.read_text(encoding="utf-8"))
    about = content["about"] | {"packages": tuple(content["about"]["packages"])}
    return Said(**content | {"about": About(**about)})


def kept(folder: Path = FOLDER) -> list[Said]:
    """Read the answers of all tools, in the order of their file names."""
    return [read(path) for path in sorted(folder.glob("*.json"))]


def main() -> int:
    """Ask and keep the answers; return 1 where a tool answered nothing at all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rivals", nargs="+", metavar="NAME", help="modules of the folder rivals")
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder (default: records/rivals)")
    parser.add_argument("--names", help="rows, separated by commas (default: all that were measured)")
    parser.add_argument("--jobs", type=int, default=2, help="rows that are asked about at a time (default: 2)")
    parser.add_argument("--row-limit", type=float, default=120, help="seconds for a row (default: 120)")
    parser.add_argument("--time-limit", type=float, default=3600, help="seconds after which no row is begun")
    parser.add_argument("--device", help="for rivals that execute: cpu, on a machine without a GPU")
    options = parser.parse_args()
    lines = [line for line in rows() if options.names is None or line["name"] in options.names.split(",")]
    _preload()
    silent = 0
    modules = [rival(name) for name in options.rivals]
    found = ask_all(modules, lines, options)
    for name, module in zip(options.rivals, modules, strict=True):
        one = said(module, {row: answers[module.__name__] for row, answers in found.items()})
        write(one, options.out / f"{name}.json")
        print(f"{one.about.tool}: {len(one.answers)} of {len(lines)} rows answered, {one.seconds} s each")
        silent += not one.answers
    return int(silent > 0)


def _preload() -> None:
    """Import the libraries that every row needs, without touching CUDA."""
    os.environ[NVML_CHECK] = "1"
    import torch.distributed._tools.mem_tracker
    import transformers  # noqa: F401

    from trainatomy.training import arguments, batch, model, optimizer  # noqa: F401

    torch.set_num_threads(1)


if __name__ == "__main__":
    sys.exit(main())
