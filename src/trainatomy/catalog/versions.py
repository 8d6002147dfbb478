"""Facts that depend on the version of torch or transformers, and how far each release was checked.

Workspaces of cuBLAS and cuBLASLt in PyTorch's caching allocator, by GPU, torch version and environment.

Source: aten/src/ATen/cuda/CublasHandlePool.cpp (parseChosenWorkspaceSize, parseCUDABlasLtWorkspaceSize,
getCUDABlasLtWorkspace); ``versions.yaml`` lists the releases in which a rule changed, with the pull request of each. On
AMD GPUs they are hipBLAS' and hipBLASLt's, which never share one.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from trainatomy.catalog.files import read_yaml
from trainatomy.errors import WorkloadError
from trainatomy.libraries import version_of

Version = tuple[int, int]
Checked = Literal["measured", "published", "source", "unverified"]

_NUMBERS = re.compile(r"(\d+)\.(\d+)")


def parse_version(text: str) -> Version:
    """Return major and minor number: ``"2.11.0+cu130"`` gives ``(2, 11)``.

    Raises:
        WorkloadError: The text does not begin with two numbers.
    """
    found = _NUMBERS.match(text)
    if found is None:
        raise WorkloadError(f"{text!r} is not a version such as 2.11")
    return int(found[1]), int(found[2])


def version_text(version: Version) -> str:
    """Return ``"2.11"`` for ``(2, 11)``."""
    return ".".join(map(str, version))


def behaviour(name: str, torch_version: Version) -> Any:
    """Return the value of a behaviour (a key of ``versions.yaml``) in a release of torch."""
    return [value for since, value in _history(name) if since <= torch_version][-1]


def first_release_with(name: str, wanted: str) -> Version | None:
    """Return the first release in which a list-valued behaviour contains ``wanted``."""
    return next((since for since, value in _history(name) if wanted in value), None)


def transformers_since(name: str) -> Version:
    """Return the first release of transformers that has something (a key of ``transformers`` in ``versions.yaml``)."""
    return parse_version(read_yaml("versions.yaml")["transformers"][name]["since"])


def transformers_has(name: str) -> bool:
    """Return whether the installed release of transformers has something; a release that is not known has not."""
    installed = version_of("transformers")
    until = read_yaml("versions.yaml")["transformers"][name].get("until")
    if installed is None:
        return False
    version = parse_version(installed)
    return transformers_since(name) <= version and (until is None or version < parse_version(until))


def checked(library: str, version: Version) -> Checked:
    """Return how far the rules of a release were checked; ``unverified`` where the data file does not list it."""
    entry = _releases(library).get(version)
    return entry["checked"] if entry is not None else "unverified"


def oldest_release(library: str) -> Version:
    """Return the oldest release that can be simulated."""
    return min(_releases(library))


@dataclass(frozen=True, slots=True)
class PythonChange:
    """A change of a part of PyTorch that is written in Python, and runs here in the installed release."""

    part: str
    since: Version
    what: str
    source: str


def python_changes(one: Version, other: Version) -> tuple[PythonChange, ...]:
    """Return the known changes between two releases of torch, in either order."""
    first, last = sorted((one, other))
    entries = read_yaml("versions.yaml")["python_parts"]
    changes = (
        PythonChange(part, parse_version(entry["since"]), entry["what"], entry["source"])
        for part, of_part in entries.items()
        for entry in of_part
    )
    return tuple(change for change in changes if first < change.since <= last)


def version_note(library: str, version: Version) -> str | None:
    """Return a note for the reader of a prediction where a release was never checked, else ``None``.

    Raises:
        WorkloadError: The release is older than all whose rules are known.
    """
    oldest = oldest_release(library)
    if version < oldest:
        raise WorkloadError(
            f"{library} {version_text(version)} cannot be simulated: rules are known from "
            f"{library} {version_text(oldest)} on",
            key=f"software.{library}" if library == "torch" else None,
        )
    if checked(library, version) != "unverified":
        return None
    known = [version_text(each) for each in sorted(_releases(library))]
    return (
        f"{library} {version_text(version)} is simulated by the rules of the releases that were checked "
        f"({', '.join(known)}); no prediction for it was verified"
    )


@cache
def _history(name: str) -> tuple[tuple[Version, Any], ...]:
    entries = read_yaml("versions.yaml")["behaviours"][name]["releases"]
    return tuple(sorted((parse_version(entry["since"]), entry["value"]) for entry in entries))


@cache
def _releases(library: str) -> Mapping[Version, Mapping[str, Any]]:
    return {parse_version(text): entry for text, entry in read_yaml("versions.yaml")["releases"][library].items()}


Environment = Mapping[str, str]

_CUBLASLT_DEFAULT_KIB = 1024
_CONFIGURATIONS = ("CUBLAS_WORKSPACE_CONFIG", "HIPBLAS_WORKSPACE_CONFIG", "ROCBLAS_WORKSPACE_CONFIG")
_LT_SIZES = ("CUBLASLT_WORKSPACE_SIZE", "HIPBLASLT_WORKSPACE_SIZE")
_LT_SWITCHES = ("TORCH_BLAS_PREFER_CUBLASLT", "TORCH_BLAS_PREFER_HIPBLASLT")


@dataclass(frozen=True, slots=True)
class Workspaces:
    """Workspaces that one (thread, stream) allocates at its first matrix product.

    Attributes:
        cublas_bytes: cuBLAS' workspace.
        cublaslt_bytes: cuBLASLt's own; 0 where it shares cuBLAS'.
        per_call: Allocated for each call and freed after it, not kept.
    """

    cublas_bytes: int
    cublaslt_bytes: int
    per_call: bool


def workspaces(
    capability: tuple[int, int], torch_version: Version, env: Environment | None = None, architecture: str = ""
) -> Workspaces:
    """Return the workspaces of one (thread, stream); by default those that the process's environment asks for.

    ``architecture``: that of an AMD GPU.
    """
    env = os.environ if env is None else env  # not as a default: datasets binds os.environ to another object
    if architecture:
        return _workspaces_on_amd(architecture, torch_version, env)
    return Workspaces(
        cublas_workspace_bytes(capability, torch_version, env),
        cublaslt_workspace_bytes(capability, torch_version, env),
        workspaces_per_call(torch_version, env),
    )


def _workspaces_on_amd(architecture: str, torch_version: Version, env: Environment) -> Workspaces:
    """Return hipBLAS' and hipBLASLt's workspaces, which the variables of cuBLAS set too, and before HIP's own."""
    rule = behaviour("hipblas_workspaces", torch_version)
    config = next((env[name] for name in _CONFIGURATIONS if name in env), "")
    size = re.match(r"\s*[+-]?[0-9]+", next((env[name] for name in _LT_SIZES if name in env), ""))
    default = int(rule["by_architecture"].get(architecture[:-1], rule["hipblas_bytes"]))
    pools = re.findall(r":([0-9]+):([0-9]+)", config)
    return Workspaces(
        sum(int(size) * int(count) for size, count in pools) * 1024 if pools else default,
        int(size.group()) * 1024 if size else int(rule["hipblaslt_bytes"]),
        per_call=False,
    )


def prefers_hipblaslt(architecture: str, torch_version: Version, env: Environment) -> bool:
    """Return whether PyTorch gives matrix products on an AMD GPU to hipBLASLt (``Context::blasPreferredBackend``)."""
    rule = behaviour("hipblas_workspaces", torch_version)
    chosen = {env.get(name) for name in _LT_SWITCHES}
    if "1" in chosen:
        return architecture in rule["has_hipblaslt"]
    return "0" not in chosen and architecture in rule["prefers_hipblaslt"]


def cublas_workspace_bytes(capability: tuple[int, int], torch_version: Version, env: Environment) -> int:
    """Return the bytes of cuBLAS' workspace: ``CUBLAS_WORKSPACE_CONFIG``, else the default of the GPU.

    A configuration such as ":4096:2:16:8" is the sum of size (KiB) x count; one that does not parse gives the default,
    as in PyTorch.  0 before torch 1.13, when cuBLAS allocated for itself.
    """
    rule = behaviour("cublas_workspace", torch_version)
    by_capability = rule.get("by_capability", {})
    major, minor = capability
    default = int(by_capability.get(f"{major}.{minor}", by_capability.get(str(major), rule["default_bytes"])))
    pools = re.findall(r":([0-9]+):([0-9]+)", env.get("CUBLAS_WORKSPACE_CONFIG", ""))
    if not default or not pools:
        return default
    counts_pools = behaviour("cublas_workspace_config_counts_pools", torch_version)
    return sum(int(size) * 1024 * (int(count) if counts_pools else 1) for size, count in pools)


def cublaslt_workspace_bytes(capability: tuple[int, int], torch_version: Version, env: Environment) -> int:
    """Return the bytes of cuBLASLt's own workspace; 0 where it shares cuBLAS' or keeps none (before torch 2.9)."""
    by_default = behaviour("cublaslt_shares_the_workspace_of_cublas", torch_version)
    shared = _switch(env, "TORCH_CUBLASLT_UNIFIED_WORKSPACE", by_default)
    if workspaces_per_call(torch_version, env):
        shared = False
    elif not behaviour("cublaslt_workspace_is_kept", torch_version):
        return 0
    if shared and cublas_workspace_bytes(capability, torch_version, env):
        return 0
    size = re.match(r"\s*[+-]?[0-9]+", env.get("CUBLASLT_WORKSPACE_SIZE", ""))
    return int(size.group() if size else _CUBLASLT_DEFAULT_KIB) * 1024


def workspaces_per_call(torch_version: Version, env: Environment) -> bool:
    """Return whether each call allocates and frees its workspace instead of keeping it for the (handle, stream)."""
    per_call = behaviour("workspaces_are_taken_per_call", torch_version)
    return per_call and not _switch(env, "TORCH_CUBLAS_WORKSPACE_CACHE", False)


def _switch(env: Mapping[str, str], name: str, default: bool) -> bool:
    """Read an environment variable as c10::utils::check_env reads it: "1" and "0" count, anything else is ignored."""
    return {"1": True, "0": False}.get(env.get(name, ""), default)
