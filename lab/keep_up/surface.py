"""Print as JSON what an environment's libraries are, as far as the package depends on it: run with its Python.

    python lab/keep_up/surface.py NAMED.json > surface.json

``NAMED.json`` has two lists: ``names``, dotted names whose code is hashed, and ``files``, ends of paths of sources.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import hashlib
import importlib
import importlib.metadata
import importlib.util
import inspect
import json
import pkgutil
import re
import sys
import textwrap
from collections.abc import Iterable
from pathlib import Path
from typing import Any

SETTINGS = {
    "TrainingArguments": "transformers",
    "Seq2SeqTrainingArguments": "transformers",
    "GenerationConfig": "transformers",
    "BitsAndBytesConfig": "transformers",
    "LoraConfig": "peft",
    "SFTConfig": "trl",
    "DPOConfig": "trl",
    "GRPOConfig": "trl",
    "RewardConfig": "trl",
    "FullyShardedDataParallelPlugin": "accelerate",
    "DeepSpeedPlugin": "accelerate",
    "ParallelismConfig": "accelerate",
}
RELEASES = ("torch", "transformers", "accelerate", "peft", "trl", "torchao", "bitsandbytes", "liger_kernel", "datasets")
_ENVIRONMENT = re.compile(rb"(?:PYTORCH|TORCH|CUBLAS|CUBLASLT|CUDNN|NCCL)_[A-Z0-9_]{4,60}(?=\0)")
MISSING = "missing"


def main() -> None:
    named = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    with contextlib.redirect_stdout(sys.stderr):  # libraries greet
        surface = {
            "releases": _releases(RELEASES),
            "pins": _pins(),
            "operators": _operators(),
            "settings": {name: _fields(library, name) for name, library in SETTINGS.items()},
            "python_overrides": _python_overrides(),
            "environment": _environment_names(),
            "names": {name: source_hash(name) for name in named["names"]},
            "files": _file_hashes(named["files"]),
        }
    json.dump(surface, sys.stdout, indent=0, sort_keys=True)


def _releases(libraries: Iterable[str]) -> dict[str, str]:
    found = {}
    for library in libraries:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[library] = importlib.metadata.version(library)
    return found


def _pins() -> dict[str, str]:
    """Return the CUDA libraries that torch's wheel asks for; none of a CPU build."""
    lines = importlib.metadata.requires("torch") or []
    found = (re.match(r"((?:nvidia|cuda|triton)[\w-]*)(?:\[[^]]*\])?\s*==\s*([\w.]+)", line) for line in lines)
    return {match[1]: match[2] for match in found if match}


def _operators() -> dict[str, str]:
    """Return the schemas of ATen's operators by name."""
    import torch

    schemas = torch._C._jit_get_all_schemas()
    named = {f"{schema.name}.{schema.overload_name}".rstrip("."): str(schema) for schema in schemas}
    return {name: hashlib.sha256(text.encode()).hexdigest()[:8] for name, text in named.items() if name[:6] == "aten::"}


def _fields(library: str, name: str) -> dict[str, str]:
    """Return the fields of a class of settings with their defaults."""
    try:
        kind = getattr(importlib.import_module(library), name)
    except (ImportError, AttributeError):
        return {}
    if dataclasses.is_dataclass(kind):
        return {field.name: _default(field) for field in dataclasses.fields(kind)}
    return {key: repr(value)[:80] for key, value in vars(kind()).items() if not key.startswith("_")}


def _default(field: Any) -> str:
    if field.default is not dataclasses.MISSING:
        return repr(field.default)[:80]
    return "computed" if field.default_factory is not dataclasses.MISSING else "required"


def _python_overrides() -> list[str]:
    """Return the modules of torch in which kernels written in Python replace ATen's."""
    try:
        package = importlib.import_module("torch._native.ops")
    except ImportError:
        return []
    return sorted(module.name for module in pkgutil.walk_packages(package.__path__, "torch._native.ops."))


def _environment_names() -> list[str]:
    """Return the names of environment variables in torch's libraries that a CPU build has too."""
    import torch

    folder = Path(torch.__file__).parent / "lib"
    found: set[bytes] = set()
    for name in ("libc10.so", "libtorch_cpu.so"):
        if (folder / name).exists():
            found.update(_ENVIRONMENT.findall((folder / name).read_bytes()))
    return sorted(name.decode() for name in found)


def source_hash(name: str) -> str:
    """Return a hash of the code behind a dotted name, without comments and docstrings."""
    try:
        found = _resolve(name)
    except (ImportError, AttributeError):
        return MISSING
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(found)))
    except (TypeError, OSError, SyntaxError):  # in C++, or a value
        return f"a {type(found).__name__}"
    return _hash_of_tree(tree)


def _hash_of_tree(tree: ast.Module) -> str:
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Module)):
            is_documented = ast.get_docstring(node, clean=False) is not None
            node.body = node.body[is_documented:] or [ast.Pass()]
    return hashlib.sha256(ast.dump(tree).encode()).hexdigest()[:12]


def _resolve(name: str) -> Any:
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:length]))
        except ImportError:
            continue
        for part in parts[length:]:
            found = inspect.getattr_static(found, part) if inspect.isclass(found) else getattr(found, part)
        return inspect.unwrap(found) if callable(found) else getattr(found, "__func__", found)
    raise ImportError(name)


def _file_hashes(ends: Iterable[str]) -> dict[str, str]:
    """Return hashes of the Python files and headers whose paths below site-packages end so, without comments."""
    wanted = tuple(f"/{end}" for end in ends)
    found = {}
    for library in RELEASES:
        spec = importlib.util.find_spec(library)
        for folder in (spec.submodule_search_locations or []) if spec else []:
            for path in Path(folder).rglob("*"):
                relative = path.relative_to(Path(folder).parent).as_posix()
                if f"/{relative}".endswith(wanted) and path.is_file():
                    found[relative] = _hash_of_code(path)
    return found


def _hash_of_code(path: Path) -> str:
    text = path.read_text(encoding="utf-8", errors="replace")
    if path.suffix == ".py":
        return _hash_of_tree(ast.parse(text))
    without_comments = re.sub(r"//[^\n]*|/\*.*?\*/", "", text, flags=re.DOTALL)
    return hashlib.sha256("".join(without_comments.split()).encode()).hexdigest()[:12]


if __name__ == "__main__":
    main()
