"""Workspaces of cuBLAS and cuBLASLt in PyTorch's caching allocator, by card, torch version and environment.

Source: aten/src/ATen/cuda/CublasHandlePool.cpp (parseChosenWorkspaceSize, parseCUDABlasLtWorkspaceSize,
getCUDABlasLtWorkspace); the versions at which a rule changed, and the pull request of each, stand in
``workspaces.yaml``.  Left out: ROCm.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainatomy.catalog.files import read_yaml

Version = tuple[int, int]
Environment = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Workspaces:
    """What one (thread, stream) allocates at its first matrix product.

    ``cublaslt_bytes`` is 0 where cuBLASLt shares cuBLAS' workspace.  ``per_call``: allocated for each call and freed
    after it, not kept.
    """

    cublas_bytes: int
    cublaslt_bytes: int
    per_call: bool


def workspaces(capability: tuple[int, int], torch_version: Version, env: Environment = os.environ) -> Workspaces:
    """All three facts at once."""
    return Workspaces(
        cublas_workspace_bytes(capability, torch_version, env),
        cublaslt_workspace_bytes(capability, torch_version, env),
        workspaces_per_call(torch_version, env),
    )


def cublas_workspace_bytes(capability: tuple[int, int], torch_version: Version, env: Environment = os.environ) -> int:
    """Bytes of cuBLAS' workspace: ``CUBLAS_WORKSPACE_CONFIG``, else the default of the card.

    A configuration such as ":4096:2:16:8" means the sum of size (KiB) x count; one that does not parse gives the
    default, as in PyTorch.  0 before torch 1.13, when cuBLAS allocated for itself.
    """
    rule = _holding(read_yaml("workspaces.yaml")["cublas"], torch_version)
    by_capability = rule.get("by_capability", {})
    major, minor = capability
    default = int(by_capability.get(f"{major}.{minor}", by_capability.get(str(major), rule["default_bytes"])))
    pools = re.findall(r":([0-9]+):([0-9]+)", env.get("CUBLAS_WORKSPACE_CONFIG", ""))
    if not default or not pools:
        return default
    counts_pools = torch_version >= (2, 0)
    return sum(int(size) * 1024 * (int(count) if counts_pools else 1) for size, count in pools)


def cublaslt_workspace_bytes(capability: tuple[int, int], torch_version: Version, env: Environment = os.environ) -> int:
    """Bytes of cuBLASLt's own workspace; 0 where it shares cuBLAS' or keeps none (before torch 2.9)."""
    rules = read_yaml("workspaces.yaml")["cublaslt"]
    shared = _switch(env, "TORCH_CUBLASLT_UNIFIED_WORKSPACE", bool(_holding(rules["shared"], torch_version)["default"]))
    if workspaces_per_call(torch_version, env):
        shared = False
    elif not _holding(rules["persistent"], torch_version)["default"]:
        return 0
    if shared and cublas_workspace_bytes(capability, torch_version, env):
        return 0
    size = re.match(r"\s*[+-]?[0-9]+", env.get("CUBLASLT_WORKSPACE_SIZE", ""))
    return int(size.group() if size else rules["default_kib"]) * 1024


def workspaces_per_call(torch_version: Version, env: Environment = os.environ) -> bool:
    """Whether each call allocates its workspace and frees it, instead of keeping it for the (handle, stream)."""
    default = bool(_holding(read_yaml("workspaces.yaml")["per_call"], torch_version)["default"])
    return default and not _switch(env, "TORCH_CUBLAS_WORKSPACE_CACHE", False)


def _holding(rules: Sequence[Mapping[str, Any]], torch_version: Version) -> Mapping[str, Any]:
    return [rule for rule in rules if tuple(rule["since"]) <= torch_version][-1]


def _switch(env: Mapping[str, str], name: str, default: bool) -> bool:
    """An environment variable as c10::utils::check_env reads it: "1" and "0" count, anything else is ignored."""
    return {"1": True, "0": False}.get(env.get(name, ""), default)
