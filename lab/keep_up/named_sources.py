"""What of other libraries the package's source names: private names that it uses, and files that its rules are from."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

SRC = Path(__file__).resolve().parents[2] / "src"
LIBRARIES = (
    "torch",
    "transformers",
    "accelerate",
    "peft",
    "trl",
    "torchao",
    "bitsandbytes",
    "deepspeed",
    "liger_kernel",
    "datasets",
)
_IN_C = re.compile(r"\b[\w./+-]+\.(?:cpp|cuh|cu|hpp|h)\b")
_IN_PYTHON = re.compile(rf"\b(?:{'|'.join(LIBRARIES)})/[\w./]+\.py\b")


def private_names() -> dict[str, list[str]]:
    """Return the dotted private names of other libraries that the package uses, with the files that use each."""
    users: dict[str, set[str]] = {}
    for path in sorted(SRC.rglob("*.py")):
        for name in _names_in(ast.parse(path.read_text(encoding="utf-8"))):
            if name.partition(".")[0] in LIBRARIES and any(_is_private(part) for part in name.split(".")):
                users.setdefault(name, set()).add(path.relative_to(SRC).as_posix())
    longest = {name for name in users if not any(other.startswith(f"{name}.") for other in users)}
    return {name: sorted(users[name]) for name in sorted(longest)}


def files_named() -> dict[str, list[str]]:
    """Return the source files of other libraries that code, comments and data name, with the files that name each."""
    users: dict[str, set[str]] = {}
    for path in sorted(SRC.rglob("*")):
        if path.suffix in {".py", ".yaml"}:
            text = path.read_text(encoding="utf-8")
            for name in {*_IN_C.findall(text), *_IN_PYTHON.findall(text)}:
                users.setdefault(name.lstrip("./"), set()).add(path.relative_to(SRC).as_posix())
    return {name: sorted(users[name]) for name in sorted(users)}


def _is_private(part: str) -> bool:
    return part.startswith("_") and not part.startswith("__")


def _names_in(tree: ast.Module) -> Iterator[str]:
    """Yield imported names and attributes of imported modules, in full."""
    imported: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                root = alias.name.partition(".")[0]
                imported[alias.asname or root] = alias.name if alias.asname else root
                yield alias.name
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                imported[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                yield f"{node.module}.{alias.name}"
    for node in ast.walk(tree):
        parts: list[str] = []
        inner: ast.expr | ast.AST = node
        while isinstance(inner, ast.Attribute):
            parts.append(inner.attr)
            inner = inner.value
        if parts and isinstance(inner, ast.Name) and inner.id in imported:
            yield ".".join([imported[inner.id], *reversed(parts)])
