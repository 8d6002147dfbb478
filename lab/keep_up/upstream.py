"""Which source files of PyTorch that the package names changed between two of its tags: a list of files to read."""

from __future__ import annotations

import json
import subprocess
import urllib.request
from collections.abc import Collection, Mapping
from pathlib import Path

REPOSITORY = "pytorch/pytorch"
_TREE = "https://api.github.com/repos/{repository}/git/trees/{tag}?recursive=1"

Tree = Mapping[str, str]
"""Hash of each file of a tag, by its path."""


def read_tree(tag: str, checkout: Path | None = None) -> Tree:
    """Return the files of a tag: from GitHub, or from a checkout of PyTorch that has it.

    Raises:
        OSError: GitHub cannot be reached.
        ValueError: GitHub did not list all files.
        CalledProcessError: The checkout has no such tag.
    """
    if checkout is not None:
        command = ["git", "-C", str(checkout), "ls-tree", "-r", "--format=%(objectname) %(path)", tag]
        lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
        return {path: name for name, path in (line.split(" ", 1) for line in lines)}
    address = _TREE.format(repository=REPOSITORY, tag=tag)
    with urllib.request.urlopen(address, timeout=60) as answer:
        found = json.load(answer)
    if found.get("truncated"):
        raise ValueError(f"GitHub listed only some of the files of {tag}")
    return {entry["path"]: entry["sha"] for entry in found["tree"] if entry["type"] == "blob"}


def changed_files(old: Tree, new: Tree, named: Collection[str]) -> dict[str, str]:
    """Return which of the named files changed, as ``changed`` or ``gone``, by their path in the repository.

    A name is a path, or the end of one.
    """
    ends = tuple(f"/{name}" for name in named)
    known = {path: content for path, content in old.items() if f"/{path}".endswith(ends)}
    return {path: "changed" if path in new else "gone" for path, content in known.items() if new.get(path) != content}
