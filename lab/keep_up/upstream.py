"""Which source files of PyTorch that the package names changed between two of its tags: a list of files to read."""

from __future__ import annotations

import json
import subprocess
import urllib.request
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

REPOSITORY = "pytorch/pytorch"
FOLDERS = ("aten", "c10", "torch")
"""Folders of PyTorch that have the files that rules name."""
_TREES = "https://api.github.com/repos/{repository}/git/trees/{tree}"
"""A tree by its hash, branch or tag; ``?recursive=1`` cuts at 100,000 entries or 7 MB (docs.github.com/rest/git)."""

Tree = Mapping[str, str]
"""Hash of each file of a tag, by its path."""


def read_tree(tag: str, checkout: Path | None = None) -> Tree:
    """Return the files of a tag: from GitHub, or from a checkout of PyTorch that has it.

    Raises:
        OSError: GitHub cannot be reached.
        ValueError: GitHub did not list all files of a folder.
        CalledProcessError: The checkout has no such tag.
    """
    if checkout is not None:
        command = ["git", "-C", str(checkout), "ls-tree", "-r", "--format=%(objectname) %(path)", tag]
        lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
        return {path: name for name, path in (line.split(" ", 1) for line in lines)}
    whole = _listed(tag, "?recursive=1")
    if not whole["truncated"]:
        return _blobs(whole)
    folders = {entry["path"]: entry["sha"] for entry in _listed(tag)["tree"] if entry["path"] in FOLDERS}
    found: dict[str, str] = {}
    for folder, tree in folders.items():
        part = _listed(tree, "?recursive=1")
        if part["truncated"]:
            raise ValueError(f"GitHub listed only some of the files of {tag} in {folder}")
        found |= {f"{folder}/{path}": name for path, name in _blobs(part).items()}
    return found


def _listed(tree: str, query: str = "") -> Any:
    with urllib.request.urlopen(_TREES.format(repository=REPOSITORY, tree=tree) + query, timeout=60) as answer:
        return json.load(answer)


def _blobs(listed: Any) -> dict[str, str]:
    return {entry["path"]: entry["sha"] for entry in listed["tree"] if entry["type"] == "blob"}


def changed_files(old: Tree, new: Tree, named: Collection[str]) -> dict[str, str]:
    """Return which of the named files changed, as ``changed`` or ``gone``, by their path in the repository.

    A name is a path, or the end of one.
    """
    ends = tuple(f"/{name}" for name in named)
    known = {path: content for path, content in old.items() if f"/{path}".endswith(ends)}
    return {path: "changed" if path in new else "gone" for path, content in known.items() if new.get(path) != content}
