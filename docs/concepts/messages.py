"""The messages of errors, read off the code that raises them."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from concepts.page import ROOT

_SOURCE = ROOT / "src" / "trainatomy"
_FEWEST_WORDS = 4
"""Words of a message; of those with fewer, most are names that only the run knows."""


def messages(kind: str) -> list[str]:
    """Return the messages with which errors of a class are raised, sorted, with ``…`` for what differs."""
    trees = (ast.parse(file.read_text("utf-8")) for file in sorted(_SOURCE.rglob("*.py")))
    found = {text for tree in trees for text in _raised(tree, kind)}
    return sorted((text for text in found if len(text.replace("…", "").split()) >= _FEWEST_WORDS), key=str.casefold)


def _raised(tree: ast.AST, kind: str) -> Iterator[str]:
    assigned = {
        node.targets[0].id: node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == kind and node.args:
            given = node.args[0]
            given = assigned.get(given.id, given) if isinstance(given, ast.Name) else given
            yield " ".join(_text(given).replace("{…}", "…").split())


def _text(node: ast.expr) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(part) if isinstance(part, ast.Constant) else "…" for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _text(node.left) + _text(node.right)
    return "…"
