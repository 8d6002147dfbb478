"""Run scripts of other projects without a GPU, and write lab/pages/scripts.md: ``python lab/scripts/run.py``.

The sources are fetched from GitHub at the commits in ``scripts.yaml``, or taken from bare repositories in a folder
(``--mirror``, named ``owner+name/repo``), and stay in ``build/scripts``.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
BUILD = ROOT / "build" / "scripts"
RESULTS = HERE / "results.json"
PAGE = ROOT / "lab" / "pages" / "scripts.md"
BEGIN, END = "<!-- Written by lab/scripts/run.py. -->", "<!-- End of what run.py writes. -->"
GPUS = "predicted for an H200, on a machine with two busy processors"
LIMIT = 60
"""Seconds that a script may take."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--names", help="only these scripts, with commas")
    parser.add_argument("--mirror", type=Path, help="folder of bare repositories")
    parser.add_argument("--gpu", default="h200")
    parser.add_argument("--build", type=Path, default=BUILD)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--page", action="store_true", help="only write the page from the results")
    given = parser.parse_args()
    listed = yaml.safe_load((HERE / "scripts.yaml").read_text())
    if given.page:
        write_page(listed, json.loads(given.results.read_text()))
        return
    names = given.names.split(",") if given.names else list(listed["scripts"])
    known = json.loads(given.results.read_text()) if given.results.is_file() else {}
    for name in names:
        entry = listed["scripts"][name]
        folder = fetch(entry, listed["repositories"][entry["from"]], given.build, given.mirror)
        found = run(entry, folder, given.gpu)
        known[name] = found
        print(f"{name:40} {found['ending']:12} {found['seconds']:5.1f} s  {found['message'][:150]}", flush=True)
        given.results.write_text(json.dumps(dict(sorted(known.items())), indent=1) + "\n")
    write_page(listed, known)


def write_page(listed: dict[str, Any], known: dict[str, Any]) -> None:
    """Write the table of lab/pages/scripts.md: the scripts that ran, and those that did not with the reason."""
    ran = [
        "| script | optimizer steps | models | allocated | reserved | seconds |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    failed: list[str] = []
    for name, entry in listed["scripts"].items():
        found = known.get(name)
        if found is None:
            continue
        source = listed["repositories"][entry["from"]]
        path = "/".join(one for one in (entry.get("folder", ""), shlex.split(entry["run"])[0]) if one)
        link = f"[{name}](https://github.com/{source['repo']}/blob/{source['commit']}/{path})"
        if found["ending"] not in ("steps", "finished") or not found.get("steps"):
            failed.append(f"- {link}: {found['message']}".rstrip(": "))
            continue
        sizes = (f"{found[key] / 2**20:,.0f} MiB" for key in ("peak_allocated_bytes", "peak_reserved_bytes"))
        models = ", ".join(dict.fromkeys(found["models"]))
        ran.append(f"| {link} | {found['steps']} | {models} | {' | '.join(sizes)} | {found['seconds']:.0f} |")
    text = PAGE.read_text()
    begin, rest = text.split(BEGIN)
    files = len({line.split("](")[1].split(")")[0] for line in ran[2:]})
    title = f"{len(ran) - 2} configurations of {files} scripts ran ({GPUS}):\n"
    table = "\n".join([title, *ran, "", "These did not:\n", *failed])
    PAGE.write_text(f"{begin}{BEGIN}\n\n{table}\n\n{END}{rest.split(END)[1]}")


def fetch(entry: dict[str, Any], source: dict[str, str], build: Path, mirror: Path | None) -> Path:
    """Return a folder with the files that a script needs."""
    folder = build / source["repo"].replace("/", "+")
    wanted = entry.get("paths", [entry.get("folder", ".")])
    marks = folder / ".fetched"
    have = set(marks.read_text().split()) if marks.is_file() else set()
    missing = [path for path in wanted if path not in have]
    if missing:
        folder.mkdir(parents=True, exist_ok=True)
        bare = folder / ".git" if mirror is None else mirror / source["repo"].replace("/", "+") / "repo"
        if mirror is None and not bare.is_dir():
            git("init", "-q", str(folder))
            url = f"https://github.com/{source['repo']}"
            git("-C", str(folder), "fetch", "-q", "--depth", "1", "--filter=blob:none", url, source["commit"])
        archive = subprocess.run(
            ["git", f"--git-dir={bare}", "archive", source["commit"], *missing], check=True, stdout=subprocess.PIPE
        )
        subprocess.run(["tar", "x", "-C", str(folder)], input=archive.stdout, check=True)
        marks.write_text("\n".join(sorted(have | set(missing))))
    for path, kind in entry.get("prepare", {}).items():
        prepare(folder / path, kind)
    return folder / entry.get("folder", ".")


def git(*arguments: str) -> None:
    subprocess.run(["git", *arguments], check=True)


def prepare(file: Path, kind: str) -> None:
    """Make a file that a script reads, which its users make or download."""
    if file.is_file():
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    if kind == "tokens":
        import numpy

        numpy.arange(200_000, dtype=numpy.uint16).__mod__(50_000).astype(numpy.uint16).tofile(file)
    elif kind == "words":
        lines = (" ".join(f"w{(row * 7 + word) % 8000}" for word in range(20)) for row in range(2000))
        file.write_text("\n".join(lines))
    elif kind == "image":
        from PIL import Image

        Image.new("RGB", (320, 320), (120, 60, 30)).save(file)
    else:
        raise ValueError(f"{kind} is not a kind of file")


def run(entry: dict[str, Any], folder: Path, gpu: str) -> dict[str, Any]:
    """Run a script without a GPU, and return what came of it."""
    began = time.perf_counter()
    command = [sys.executable, "-m", "trainatomy", "run", "--gpu", gpu, "--json", "--time-limit", str(LIMIT)]
    done = subprocess.run(
        [*command, *entry.get("options", "").split(), *shlex.split(entry["run"])],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=LIMIT * 5,
    )
    taken = round(time.perf_counter() - began, 1)
    error = next((line for line in done.stderr.splitlines()[::-1] if line.startswith("error: ")), "")
    found: dict[str, Any] = {"gpu": gpu, "ending": "failed", "seconds": taken, "message": error.removeprefix("error: ")}
    if done.stdout.startswith("{"):
        said = json.loads(done.stdout)
        memory, script = said["memory"], said["script"]
        found |= {
            "ending": script["ending"],
            "steps": script["steps"],
            "models": [one["name"] for one in script["models"]],
            "optimizers": [one["name"] for one in script["optimizers"]],
            "stand_ins": sorted({one["kind"] for one in script["stand_ins"]}),
            "peak_allocated_bytes": memory["peak_allocated_bytes"],
            "peak_reserved_bytes": memory["peak_reserved_bytes"],
            "step_seconds": said["time"] and said["time"]["step_seconds"],
            "versions": said["versions"],
        }
    return found


if __name__ == "__main__":
    main()
