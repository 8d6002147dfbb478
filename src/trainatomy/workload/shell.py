"""The commands of a script of the shell: their words, with the variables that are set before them.

Variables that the script itself sets, defaults (``${GPUS:-4}``) and arithmetic (``$(expr 16 / $n)``) are filled in;
loops, conditions and what other commands print are not.
"""

from __future__ import annotations

import ast
import operator
import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType

LAUNCHERS = ("accelerate", "torchrun", "deepspeed", "python", "python3")
"""Commands that start a module or a script of a framework."""
_WRAPPERS = ("nohup", "time", "sudo", "exec", "env", "export")
_ASSIGNMENT = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=.*", re.DOTALL)
_SEPARATORS = ";<>|&"
_QUOTED = re.compile(r"""('[^']*'|"(?:\\.|[^"\\])*")""")
_COMMENT = re.compile(r"(?<!\S)#.*")
_REDIRECTION = re.compile(r"(?<!\S)(\d|&)?>>?(&\d|[ \t]*[^\s;|&]+)")
_DEFAULT = re.compile(r"\$\{(\w+):?-([^}]*)\}")
_NAME = re.compile(r"\$(?:\{(\w+)\}|(\w+))")
_SUM = re.compile(r"\$\((?:expr\s+|\()([\d\s+\-*/%\\()]+?)\)?\)")
_ARITHMETIC = re.compile(r"\$\(\(.*?\)\)")
_WORD = re.compile(r"[A-Za-z_]\w*")
_OPERATORS: Mapping[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.Mod: operator.mod,
}
_MAX_LINES = 400
"""Lines that a quoted text may have; an apostrophe in a text that is no command opens one that never ends."""


def commands_in(
    text: str, known: Mapping[str, str] = MappingProxyType({})
) -> Iterator[tuple[list[str], dict[str, str]]]:
    """Yield the words of each command, with the variables that are set by then.

    Args:
        text: The script.
        known: Variables that are set before it.
    """
    variables = dict(known)
    lines = re.sub(r"\\[ \t]*\n", " ", text).splitlines()
    index = 0
    while index < len(lines):
        if lines[index].lstrip().startswith("#"):
            index += 1
            continue
        commands, used = _commands(lines[index:], variables)
        index += used
        for words in commands:
            while words and (words[0] in _WRAPPERS or _ASSIGNMENT.fullmatch(words[0])):
                name, equals, value = words.pop(0).partition("=")
                if equals:
                    variables[name] = value
            if words:
                yield words, dict(variables)


def _commands(lines: list[str], variables: Mapping[str, str]) -> tuple[list[list[str]], int]:
    """Return the commands of the first of some lines, and how many lines they take: a quoted text may have many."""
    text = ""
    for count, line in enumerate(lines[:_MAX_LINES], start=1):
        text = f"{text}\n{line}" if text else line
        try:
            return _split(_without_comments(_filled(text, variables))), count
        except ValueError:  # a quotation that has no end yet
            continue
    return [], 1


def _split(text: str) -> list[list[str]]:
    """Return the words of each command of a text.

    Raises:
        ValueError: A quotation has no end.
    """
    lexer = shlex.shlex(text, posix=True, punctuation_chars=_SEPARATORS)
    lexer.whitespace_split, lexer.commenters = True, ""
    commands: list[list[str]] = [[]]
    is_file = False
    for word in lexer:
        if not word.strip(_SEPARATORS) and word:
            is_file = word.strip("<>&") == "" and word not in ("&", "&&")
            commands += [] if is_file else [[]]
        elif is_file:
            is_file = False
        else:
            commands[-1].append(word)
    return [words for words in commands if words]


def _without_comments(text: str) -> str:
    """Return a text without comments and files for its output: a ``#`` in a word starts none."""
    parts = _QUOTED.split(text)
    return "".join(
        part if index % 2 else _REDIRECTION.sub("", _COMMENT.sub("", part)) for index, part in enumerate(parts)
    )


def _filled(text: str, variables: Mapping[str, str]) -> str:
    """Return a text with the values of variables that are known; one line, so that a value adds no words.

    Between single quotes nothing is filled in.
    """
    parts = re.split(r"('[^']*')", text)
    return "".join(part if part.startswith("'") else _expanded(part, variables) for part in parts)


def _expanded(text: str, variables: Mapping[str, str]) -> str:
    text = _DEFAULT.sub(lambda found: variables.get(found[1], found[2]), text)
    text = _NAME.sub(lambda found: _quoted(variables.get(found[1] or found[2], found[0])), text)
    text = _ARITHMETIC.sub(lambda found: _plain(found[0], variables), text)
    return _SUM.sub(lambda found: _result(found[1], found[0]), text)


def _plain(arithmetic: str, variables: Mapping[str, str]) -> str:
    """Return ``$((…))`` with the values of its variables, which need no dollar there."""
    return _WORD.sub(lambda found: variables.get(found[0], found[0]), arithmetic)


def _quoted(value: str) -> str:
    return value.replace('"', '\\"').replace("\n", " ")


def _result(terms: str, otherwise: str) -> str:
    """Return the value of an expression of whole numbers; ``otherwise`` where it is none."""
    try:
        return str(_value_of(ast.parse(terms.replace("\\", "").strip(), mode="eval").body))
    except (SyntaxError, KeyError, ZeroDivisionError):
        return otherwise


def _value_of(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if not isinstance(node, ast.BinOp):
        raise SyntaxError
    return _OPERATORS[type(node.op)](_value_of(node.left), _value_of(node.right))
