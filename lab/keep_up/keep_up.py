"""Try the newest releases of the libraries, and write what a maintainer has to read and mend to one page.

    python lab/keep_up/keep_up.py                            the newest releases, in an environment of its own
    python lab/keep_up/keep_up.py 'torch==2.14.1'            with this requirement
    python lab/keep_up/keep_up.py --python PATH              an environment that exists
    python lab/keep_up/keep_up.py --record                   record the pinned releases, as they are compared with

The page has the tests that fail, the predictions that changed and at which operation, and what changed in the
libraries: settings, operators, code that the package uses or replaces, and source files that its rules name.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import named_sources
import sections
import upstream
import yaml

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
SAME = ROOT / "lab" / "same" / "same.py"
SURFACE = HERE / "surface.json"
EXTRAS = "lora,bitsandbytes,app,test"


def reasons() -> dict[str, str]:
    """Return the reason for each pattern of names that the package reaches into or replaces."""
    groups = yaml.safe_load((HERE / "reached.yaml").read_text(encoding="utf-8"))
    return {pattern: group["reason"] for group in groups for pattern in group["names"]}


def reason_of(name: str) -> str | None:
    return next((reason for pattern, reason in reasons().items() if fnmatch(name, pattern)), None)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("requirements", nargs="*", help="requirements of pip, such as torch==2.14.1")
    parser.add_argument("--python", type=Path, help="the Python of an environment that exists")
    parser.add_argument(
        "--pytorch",
        type=Path,
        metavar="FOLDER",
        help="a checkout of PyTorch with the tags of both releases, instead of GitHub",
    )
    parser.add_argument(
        "--folder", type=Path, default=ROOT / "build" / "keep-up", help="where to write the page, report.md"
    )
    parser.add_argument(
        "--without", nargs="+", default=[], choices=["tests", "predictions", "upstream"], help="leave parts out"
    )
    parser.add_argument("--record", action="store_true", help="record the pinned releases instead")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    if options.record:
        return record(options.folder)
    old = json.loads(SURFACE.read_text(encoding="utf-8"))
    python = options.python or _environment(options.folder, options.requirements)
    new = surface(python, list(old["names"]), options.folder)
    parts = [sections.releases(old, new)]
    if "tests" not in options.without:
        parts.append(sections.tests(run_tests(python, options.folder)))
    if "predictions" not in options.without:
        parts.append(sections.predictions(*compare_predictions(python, options.folder)))
    parts += [
        sections.settings(old, new),
        sections.operators(old, new),
        sections.names(old, new, reason_of),
        sections.files(old, new),
    ]
    if "upstream" not in options.without:
        parts.append(_upstream_section(old, new, options.pytorch))
    report = options.folder / "report.md"
    report.write_text(sections.whole(parts), encoding="utf-8")
    print(sections.summary(parts), f"see {report}", sep="\n")
    return int(any(section.needs_work for section in parts))


def record(folder: Path) -> int:
    """Record what the libraries of this environment are, and what the package replaces in them."""
    sys.path[:0] = [str(SAME.parent), str(SAME.parents[1] / "accuracy")]
    import predicted
    from replaced import recorded_replacements

    with recorded_replacements() as replaced:
        for row in predicted.feature_rows():
            predicted.predict_training(row)
    names = sorted({*replaced, *named_sources.private_names()})
    found = surface(Path(sys.executable), names, folder)
    SURFACE.write_text(json.dumps(found, indent=0, sort_keys=True) + "\n", encoding="utf-8")
    return 0


def surface(python: Path, names: Sequence[str], folder: Path) -> dict[str, Any]:
    """Return what an environment's libraries are; see ``surface.py``."""
    named = folder / "named.json"
    named.write_text(json.dumps({"names": list(names), "files": list(named_sources.files_named())}), encoding="utf-8")
    found: dict[str, Any] = json.loads(_output([python, HERE / "surface.py", named]))
    return found


def run_tests(python: Path, folder: Path) -> Path:
    """Run the tests, and return pytest's report of them."""
    report = folder / "tests.xml"
    command = [
        python,
        "-m",
        "pytest",
        "-n",
        "auto",
        "--maxprocesses",
        "4",
        "--dist",
        "loadgroup",
        f"--junit-xml={report}",
    ]
    subprocess.run([str(part) for part in command], cwd=ROOT, check=False)
    return report


def compare_predictions(
    python: Path, folder: Path
) -> tuple[dict[str, list[str]], dict[str, list[sections.Change]], int]:
    """Predict a sample in the environment.

    Returns:
        What differs from the recorded predictions, by case; where other bytes are allocated, by case; and the number of
        predictions.
    """
    sys.path.insert(0, str(SAME.parent))
    import same

    path, pinned, newest = (folder / name for name in ("predictions.jsonl", "pinned.json", "newest.json"))
    path.unlink(missing_ok=True)
    _output([python, SAME, "--write", "--sampled", "--record", path, "--allocations", newest])
    old, new = same.read(), same.read(path)
    different = {name: same.differences(old.get(name, {}), found) for name, found in new.items()}
    different = {name: lines for name, lines in different.items() if lines}
    moved = [
        name for name in different if old.get(name, {}).get("trace") and new[name].get("trace") != old[name]["trace"]
    ]
    allocated = {}
    if moved:
        _output([sys.executable, SAME, "--sampled", "--only", *moved, "--allocations", pinned])
        before, after = (json.loads(file.read_text(encoding="utf-8")) for file in (pinned, newest))
        allocated = {name: sections.changes(before.get(name, []), after.get(name, [])) for name in moved}
    return different, allocated, len(new)


def _environment(folder: Path, requirements: Sequence[str]) -> Path:
    """Return the Python of a new environment with the newest releases, and with these requirements."""
    venv = folder / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(venv)], check=True)
    python = venv / "bin" / "python"
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--upgrade"]
    subprocess.run([*pip, *requirements, "--editable", f"{ROOT}[{EXTRAS}]"], check=True)
    subprocess.run([*pip, *requirements, "torchvision", "scipy", "pillow"], check=True)
    return python


def _upstream_section(old: dict[str, Any], new: dict[str, Any], checkout: Path | None) -> sections.Section:
    tags = [f"v{entry['releases']['torch'].partition('+')[0]}" for entry in (old, new)]
    named = named_sources.files_named()
    try:
        before, after = (upstream.read_tree(tag, checkout) for tag in tags)
    except (OSError, ValueError, subprocess.CalledProcessError) as error:
        return sections.Section("Source files of PyTorch to read", f"Not compared: {error}\n", True)
    return sections.upstream_files(
        upstream.changed_files(before, after, [name for name in named if not name.endswith(".py")]), named, tags
    )


def _output(command: Sequence[Any]) -> str:
    return subprocess.run(
        [str(part) for part in command], cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True
    ).stdout


if __name__ == "__main__":
    sys.exit(main())
