"""Every command that a message proposes is one that the command line accepts."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import trainatomy
from trainatomy.cli.app import COMMANDS, load

_COMMANDS = {entry.name for entry in COMMANDS}

_PROPOSED = re.compile(r"trainatomy ([a-z]+)((?: (?:--[a-z][a-z-]*|[A-Z{}][\w.{}]*|[a-z0-9{}_.=,\[\]/…]+))*)")
_LAUNCHERS = ("torchrun", "accelerate", "python")


def _proposals() -> dict[str, tuple[str, list[str]]]:
    """Return the commands that texts in the package name, with their options, by the place of the text."""
    found: dict[str, tuple[str, list[str]]] = {}
    root = Path(trainatomy.__file__).parent
    for path in sorted(root.rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        documentation = {
            id(node.body[0].value)
            for node in ast.walk(tree)
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
            and node.body
            and isinstance(node.body[0], ast.Expr)
        }
        for node in ast.walk(tree):
            if id(node) in documentation or not isinstance(node, ast.Constant | ast.JoinedStr):
                continue
            for command, rest in _PROPOSED.findall(_text(node)):
                before = re.split(rf"\b(?:{'|'.join(_LAUNCHERS)})\b|\.py ", rest)[0]  # what follows is not ours
                if command in _COMMANDS:
                    place = f"{path.relative_to(root)}:{node.lineno} trainatomy {command}{before}"
                    found[place] = (command, re.findall(r"--[a-z][a-z-]*", before))
    return found


def _text(node: ast.AST) -> str:
    """Return a text with braces in place of what is filled in."""
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(part) for part in node.values)
    return str(node.value) if isinstance(node, ast.Constant) and isinstance(node.value, str) else "{}"


@pytest.fixture(scope="module")
def accepted() -> dict[str, set[str]]:
    """Return the options of every command."""
    options: dict[str, set[str]] = {}
    for entry in COMMANDS:
        parameters = load(entry.name).params
        options[entry.name] = {spelling for each in parameters for spelling in (*each.opts, *each.secondary_opts)}
    return options


def test_options_of_proposed_commands_exist(accepted: dict[str, set[str]]) -> None:
    proposals = _proposals()
    assert len(proposals) > 20
    wrong = {place for place, (command, options) in proposals.items() if not set(options) <= accepted[command]}
    assert not wrong
